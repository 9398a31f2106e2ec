"""Which kernels an encoder's recordings call, by the options and by what this process can call."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from ..announce import announce
from ..attention_bounds import deterministic
from ..options import VisionGraphOptions
from .encoder import NO_OTHER_ATTENTION, EncoderFamily


class RecordedKernels:
    """Chooses kernels; called with a region's modules around recorded work.

    Args:
        options: What the user asked for.
        family: The encoder's upstream side.

    Attributes:
        attends_directly: Whether cuDNN's attention is called directly.
    """

    def __init__(self, options: VisionGraphOptions, family: EncoderFamily) -> None:
        self._options, self.family = options, family
        self.attends_directly = self._attends_by_flash = False

    def choose_attention(self) -> None:
        """Decide which attention recordings call; logs where the requested one is not available."""
        wanted, family = self._options.attention, self.family
        self.attends_directly = self._attends_by_flash = False
        if wanted == "transformer_engine":
            return
        other = family.direct_attention
        direct = other.refusal()
        flash = family.flash_attention.refusal() if wanted == "flash" else None  # asking imports its compiler
        self.attends_directly = direct is None and (other.rounds_as_eager or self.fast or wanted == "cudnn")
        self._attends_by_flash = wanted == "flash" and flash is None
        refusal = {"cudnn": direct, "flash": flash}.get(wanted)
        if refusal is not None:
            self._say_stays(refusal)

    def keep_attention(self, reason: str) -> None:
        """Let recordings call no other attention than the encoder's own; logs why."""
        self.attends_directly = self._attends_by_flash = False
        self._say_stays(reason)

    def _say_stays(self, reason: str) -> None:
        other = self.family.direct_attention
        stays = "cuDNN's, called directly" if self.attends_directly else other.replaces
        stays = "as it is" if other is NO_OTHER_ATTENTION else stays
        announce(f"vision_cuda_graph_tuning.attention={self._options.attention}: {reason}; attention stays {stays}")

    @property
    def fast(self) -> bool:
        """Whether kernels may round otherwise than eager's."""
        kernels = self._options.kernels
        return kernels == "fast" or (kernels == "auto" and not deterministic())

    @property
    def attention(self) -> str:
        """What attention recordings call, as `vision_cuda_graph_tuning.attention` names it."""
        if self._attends_by_flash:
            return "flash"
        return "cudnn" if self.attends_directly else "transformer_engine"

    @contextmanager
    def __call__(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Let these modules call the chosen kernels inside."""
        family, options = self.family, self._options
        chosen = (
            (family.kernels, True),
            (family.fused_accumulation, True),
            (family.reordering_kernels, self.fast),
            (family.direct_attention.kernels, self.attends_directly),
            (family.flash_attention.kernels, self._attends_by_flash),  # over cuDNN's, so behind it
            (family.known_activations, options.moves_activations),
        )
        with ExitStack() as stack:
            for kernels, wanted in chosen:
                if wanted:
                    stack.enter_context(kernels(modules))
            yield
