"""What graphs ask of an encoder: how it is called, what it returns, and how it is computed from static buffers."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ..announce import announce
from ..attention_bounds import deterministic, refuse_images
from ..graphs.buckets import Bucket
from ..graphs.fallback import Fallback
from ..graphs.program import Call, RegionProgram
from ..graphs.replays.replay import want_gradients
from ..options import VisionGraphOptions
from ..upstream_types import UpstreamModule
from .batch import EncoderBatch, HostGrids

# Called with an encoder's modules.
RecordingKernels = Callable[[Sequence[nn.Module]], AbstractContextManager[Any]]


def encoder_call(batch: EncoderBatch, usual: bool, misfit: str | None = None, input_gradients: bool = False) -> Call:
    """Return a call of an encoder's forward.

    Args:
        batch: The microbatch.
        usual: Whether everything else about the call is as recordings are made.
        misfit: What is wrong with the batch, None where nothing is. Eager may take it all the same.
        input_gradients: Whether the region returns a gradient of what is encoded.
    """
    refusal = None
    if not usual:
        refusal = Fallback.CALL_ARGUMENTS
    elif misfit is not None:
        refusal = Fallback.OTHER_BATCH
    elif not input_gradients and want_gradients((batch.pixels,)):
        refusal = Fallback.INPUT_GRADIENTS
    return Call(batch, refusal, batch.tokens, misfit, True, batch.shape if refusal is None else None)


class Encoder(RegionProgram):
    """One encoder as its graphs see it: its calls, and as a `RegionProgram` all that is recorded of it.

    Args:
        model: The encoder's module.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around recorded work; swaps in kernels that compute the same.

    Attributes:
        name: Of the region.
        unit: Patches that belong together: of one embedding, or of one image where all are of one size. Capacities
            are multiples of it.
        unit_of: What they are, for messages.
        deterministic_tokens: Largest capacity under deterministic algorithms.

    Raises:
        OptionError: The model cannot be recorded as it is.
    """

    name = "vision_encoder"
    unit: int
    unit_of = "one embedding"
    deterministic_tokens: float = math.inf

    def __init__(self, model: UpstreamModule, exact_below: int = 0, kernels: RecordingKernels = nullcontext) -> None:
        self.model, self.exact_below, self._kernels = model, exact_below, kernels
        self.prepare()

    def prepare(self) -> None:
        """Take from the model what the encoder needs, once, and refuse one that cannot be recorded."""
        return

    @abstractmethod
    def read(self, grids: HostGrids, *args: Any, **kwargs: Any) -> Call:
        """Return what a call of the encoder's forward with these arguments is.

        Raises:
            BatchError: The encoder refuses the batch eager, too.
        """

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """Return the tensors in what the encoder's own forward returned, in the order of the region's outputs."""
        return (returned,)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """Return what the encoder's own forward would return for the region's outputs."""
        return outputs[0]

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """Return the limits to record a capacity for, cheapest first; without an own method there are none.

        Of images they are (frames, tokens of the largest frame); other limits need a `refuse` of their own.

        Args:
            capacity: Tokens.
            frames: Most frames that any bucket takes.
            directly: Whether cuDNN's attention is called directly.
        """
        return [()]

    def refuse(self, batch: EncoderBatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        return refuse_images(batch.shape, self.exact_below, bucket) if bucket.limits else None

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`."""
        return (self.model,)

    def recording(self) -> AbstractContextManager[None]:
        """See `RegionProgram`."""
        return self._kernels(self.modules())


@dataclass(frozen=True, slots=True)
class OtherAttention:
    """Attention in the place of that which an encoder's graphs have else.

    Attributes:
        kernels: Entered with the modules around recorded work; swaps it in.
        refusal: Why that cannot be done in this process, None where it can.
        replaces: Whose attention it replaces.
        rounds_as_eager: Whether outputs are those of the attention that it replaces.
    """

    kernels: RecordingKernels = nullcontext
    refusal: Callable[[], str | None] = lambda: "this encoder has no other attention"
    replaces: str = "Transformer Engine's"
    rounds_as_eager: bool = True


NO_OTHER_ATTENTION = OtherAttention()


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """What the plugin must know of an encoder's upstream code.

    Attributes:
        name: For messages.
        find: Returns the encoder that a module holds, or the module where it is one; None elsewhere. A model's modules
            are asked in turn, under wrappers.
        encoder: Makes the `Encoder` of a vision model; arguments as there.
        kernels: Entered with the modules around recorded work; swaps in kernels that compute the same.
        reordering_kernels: Likewise, for kernels that add up in another order than eager's.
        direct_attention: Calls cuDNN's attention with a bucket's own bounds.
        flash_attention: Calls FlashAttention where segments may be long; it rounds otherwise than eager's attention.
        fused_accumulation: Entered like kernels; lets weight gradients be added to `main_grad` inside the GEMM.
        before_eager: Called with the modules before a microbatch runs eager in a step that may have replayed others.
        known_activations: Entered like kernels where activations leave the device: notes what they are.
        encodes: "vision" or "audio". A model may have one encoder of each; both are captured.
    """

    name: str
    find: Callable[[nn.Module], nn.Module | None]
    encoder: Callable[..., Encoder]
    kernels: RecordingKernels = nullcontext
    reordering_kernels: RecordingKernels = nullcontext
    direct_attention: OtherAttention = NO_OTHER_ATTENTION
    flash_attention: OtherAttention = NO_OTHER_ATTENTION
    fused_accumulation: RecordingKernels = nullcontext
    before_eager: Callable[[Sequence[nn.Module]], None] = lambda modules: None
    known_activations: RecordingKernels = nullcontext
    encodes: Literal["vision", "audio"] = "vision"


class RecordedKernels:
    """Chooses kernels; called with a region's modules around recorded work.

    Args:
        options: What the user asked for.
        family: The encoder's upstream side.

    Attributes:
        attention: What recordings call, as `vision_cuda_graph_attention` names it.
        attends_directly: Whether cuDNN's attention is called directly where FlashAttention is not.
    """

    def __init__(self, options: VisionGraphOptions, family: EncoderFamily) -> None:
        self._options, self.family = options, family
        self.attention, self.attends_directly = "transformer_engine", False

    def choose_attention(self) -> None:
        """Decide which attention recordings call; logs where the requested one is not available."""
        wanted, family = self._options.attention, self.family
        self.attention, self.attends_directly = "transformer_engine", False
        if wanted == "transformer_engine":
            return
        other = family.direct_attention
        direct = other.refusal()
        flash = family.flash_attention.refusal() if wanted == "flash" else None  # asking imports its compiler
        self.attends_directly = direct is None and (other.rounds_as_eager or self.fast or wanted == "cudnn")
        if self.attends_directly or (wanted == "flash" and flash is None):
            self.attention = "flash" if wanted == "flash" and flash is None else "cudnn"
        refusal = {"cudnn": direct, "flash": flash}.get(wanted)
        if refusal is not None:
            self._say_stays(refusal)

    def keep_attention(self, reason: str) -> None:
        """Let recordings call no other attention than the encoder's own; logs why."""
        self.attention, self.attends_directly = "transformer_engine", False
        self._say_stays(reason)

    def _say_stays(self, reason: str) -> None:
        other = self.family.direct_attention
        stays = "cuDNN's, called directly" if self.attends_directly else other.replaces
        stays = "as it is" if other is NO_OTHER_ATTENTION else stays
        announce(f"vision_cuda_graph_attention={self._options.attention}: {reason}; attention stays {stays}")

    @property
    def fast(self) -> bool:
        """Whether kernels may round otherwise than eager's."""
        kernels = self._options.kernels
        return kernels == "fast" or (kernels == "auto" and not deterministic())

    @contextmanager
    def __call__(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Let these modules call the chosen kernels inside."""
        family, options = self.family, self._options
        chosen = (
            (family.kernels, True),
            (family.fused_accumulation, True),
            (family.reordering_kernels, self.fast),
            (family.direct_attention.kernels, self.attends_directly),
            (family.flash_attention.kernels, self.attention == "flash"),  # over cuDNN's, so behind it
            (family.known_activations, options.moves_activations),
        )
        with ExitStack() as stack:
            for kernels, wanted in chosen:
                if wanted:
                    stack.enter_context(kernels(modules))
            yield
