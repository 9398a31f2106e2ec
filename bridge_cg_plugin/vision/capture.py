"""Capturing an encoder: what is planned, and what microbatches ask for later."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from ..announce import announce
from ..attention_bounds import SIDE_STREAM_UP_TO, deterministic
from ..graphs.errors import CaptureError
from ..graphs.piece import Growth, Piece
from ..graphs.planning.buckets import Bucket
from ..graphs.planning.demand import BEGIN_WITH, Demand
from ..graphs.program import RegionProgram
from ..graphs.rank_consensus import digest
from ..graphs.recordings.compiling import KernelCompiler
from ..graphs.region import Region
from ..graphs.reports.report import GIB
from ..graphs.workload import Manager
from ..offload.offloading import offloading_of
from ..options import PROVIDER_FIELDS, VisionGraphOptions
from .adapter import NO_OTHER_ATTENTION, EncoderAdapter, EncoderBatch, EncoderFamily
from .fit import Shape
from .plan import EncoderPlan


class RecordedKernels:
    """Chooses kernels by the options; called with a region's modules around recorded work.

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
        entered = [family.kernels]
        entered += [family.fused_accumulation] if options.gradient_accumulation_fusion else []
        entered += [family.reordering_kernels] if self.fast else []
        entered += [family.direct_attention.kernels] if self.attends_directly else []
        entered += [family.flash_attention.kernels] if self._attends_by_flash else []  # over cuDNN's, so last
        entered += [family.known_activations] if options.moves_activations else []
        with ExitStack() as stack:
            for kernels in entered:
                stack.enter_context(kernels(modules))
            yield


class EncoderCapture:
    """Plans and captures one encoder. What can fail on one rank alone is inside an agreement.

    Args:
        model: The vision encoder.
        options: What the user asked for.
        family: The encoder's upstream side.
        adapter: The encoder's.

    Attributes:
        plan: Observes microbatches and plans buckets.
        kernels: What recorded work calls.
        buckets: Tokens of the buckets there are; None before.
        demand: What microbatches ask for; None where all that may come is captured at once.
    """

    demand: Demand | None = None

    def __init__(
        self, model: nn.Module, options: VisionGraphOptions, family: EncoderFamily, adapter: EncoderAdapter
    ) -> None:
        self._model, self._options, self._family, self._adapter = model, options, family, adapter
        self.plan = EncoderPlan(options, adapter)
        self.kernels = RecordedKernels(options, family)
        self.buckets: tuple[int, ...] | None = None
        self._compiler = KernelCompiler(partial(family.compilations, (model,)))
        self._regions: list[Region] = []

    def begin(self, device: torch.device) -> None:
        """Prepare for captures on a device, in a thread of its own."""
        self._compiler.begin(device)

    def end(self) -> None:
        """Let go of the encoder in that thread."""
        self._compiler.stop()

    def observe(self, batch: EncoderBatch) -> None:
        """Take a microbatch of the warm-up steps into account."""
        self.plan.observe(batch)
        self._compiler.saw(batch.tokens)

    def capture(self, manager: Manager) -> None:
        """Capture.

        Raises:
            CaptureError: Ranks that share layers planned different buckets.
        """
        self._choose_attention(manager)
        manager.bucket_consensus.agree(float)  # a communicator that was never used cannot be captured
        manager.consensus.agree(partial(self._record, manager))
        manager.consensus.agree(partial(self._check_tensor_ranks, manager))

    def _choose_attention(self, manager: Manager) -> None:
        """Choose attention: that which all ranks that share layers can call, or the encoder's own."""
        if not manager.consensus.agree(self._attention_of_rank).same:
            self.kernels.keep_attention("ranks that share layers would attend by different kernels")

    def _attention_of_rank(self) -> float:
        """Choose attention for this rank alone; returns a number that stands for it."""
        self.kernels.choose_attention()
        return digest(self.kernels.attention, self.kernels.attends_directly)

    def _record(self, manager: Manager) -> float:
        """Plan and capture; returns a number for the others."""
        manager.reset()
        self._regions = []
        if self._options.on_demand:
            self._begin(manager)
        else:
            self.buckets = self.plan.named()
            buckets = [bucket for capacity in self.buckets for bucket in self._buckets_of(capacity)]
            self._regions = manager.record([self._piece(manager, buckets)])
        return 0.0

    def _begin(self, manager: Manager) -> None:
        """Capture what microbatches have asked for most; others follow while training runs."""
        menu = self.plan.menu(self.encoder_program(), self._buckets_of)
        self.demand = Demand(menu, self.plan.largest)
        for shape in self.plan.last:
            self.demand.saw(shape)
        self.demand.begin(BEGIN_WITH)
        piece = self._piece(manager, self.demand.buckets, Growth.of(self.demand))
        self._regions = manager.record([piece], self.demand, self._memory_limit())
        self.note_buckets()

    def note_buckets(self) -> None:
        """Note which buckets there are now, where they are captured on demand."""
        if self.demand is not None:
            self.buckets = self.demand.capacities

    def _check_tensor_ranks(self, manager: Manager) -> float:
        if not manager.bucket_consensus.agree(partial(self._digest, manager.slots)).same:
            raise CaptureError("tensor-parallel ranks planned different buckets: they saw different images")
        return 0.0

    def _digest(self, slots: int) -> float:
        """Return a number that stands for the buckets, their order and the slots."""
        return digest(slots, *map(str, self._regions[0].buckets))

    def _memory_limit(self) -> float | None:
        """Return what recordings of a slot may take, in bytes, of buckets chosen here; None without a limit."""
        options = self._options
        limited = options.buckets_max_gb is not None and options.buckets == "auto"
        return (options.buckets_max_gb or 0) * GIB if limited else None

    def encoder_program(self) -> RegionProgram:
        """Return the whole encoder as a region."""
        return self._adapter.program(self._options.exact_below, self.kernels)

    def _buckets_of(self, capacity: int, shapes: Sequence[Shape] = ()) -> list[Bucket]:
        return self.plan.buckets_of(capacity, self.kernels.attends_directly, shapes)

    def _piece(self, manager: Manager, buckets: Sequence[Bucket], growth: Growth | None = None) -> Piece:
        return Piece(
            program=self.encoder_program(),
            buckets=buckets,
            offloading=offloading_of(self._options, PROVIDER_FIELDS, manager),
            has_side_stream=self.has_side_stream,
            compile=self._compiler.finish,
            growth=growth,
        )

    def has_side_stream(self, bucket: Bucket) -> bool:
        """Whether a bucket's recordings are on two streams."""
        options = self._options
        if options.streams != "auto":
            return options.streams == 2
        return not options.moves_activations and bucket.tokens <= SIDE_STREAM_UP_TO
