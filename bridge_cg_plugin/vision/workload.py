"""A vision encoder as the graph manager sees it: calls as images, what is observed and captured, results, notes."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..announce import announce
from ..attention_bounds import SIDE_STREAM_UP_TO, Shape, deterministic, replay_cost
from ..graphs.buckets import BEGIN_WITH, WINDOW, Bucket, Demand, Menu, names_of, next_run, raised
from ..graphs.errors import CaptureError
from ..graphs.manager import GraphManager
from ..graphs.program import FAR, NEAR, Call, Eager, Piece, Workload, digest
from ..graphs.region import Region
from ..graphs.reports import GIB
from ..offload.offloading import offloading_of
from ..options import PROVIDER_FIELDS, VisionGraphOptions
from .batch import BatchError, EncoderBatch, HostGrids
from .encoder import Encoder, EncoderFamily, RecordedKernels

# Frames that the most permissive bounds take; a batch of fewer uses cheaper bounds.
DEFAULT_MAX_FRAMES = 64
MAX_FRAMES_STEP = 16


class EncoderPlan:
    """Observes an encoder's microbatches and plans buckets for them.

    Args:
        options: What the user asked for.
        encoder: The encoder.
        kernels: What its recordings call.

    Attributes:
        last: Shapes of the last of them.
    """

    def __init__(self, options: VisionGraphOptions, encoder: Encoder, kernels: RecordedKernels) -> None:
        self._options, self._encoder, self._kernels = options, encoder, kernels
        self.last: deque[Shape] = deque(maxlen=WINDOW)
        self._frames = 0

    def observe(self, batch: EncoderBatch) -> None:
        """Take a microbatch of the warm-up steps into account."""
        self.last.append(batch.shape)
        self._frames = max(self._frames, batch.shape.frames)

    def named(self) -> tuple[int, ...]:
        """Return the capacities that the options name; none of automatic buckets."""
        buckets, longest = self._options.named_buckets, self._options.max_seq_length
        return buckets if not buckets or longest is None else (*(c for c in buckets if c < longest), longest)

    def buckets_of(self, capacity: int, shapes: Sequence[Shape] = ()) -> list[Bucket]:
        """Return the useful buckets of a capacity, cheapest first.

        Args:
            capacity: Tokens.
            shapes: Microbatches after warm-up.
        """
        bounds = self._encoder.bounds(capacity, self.max_frames(shapes), self._kernels.attends_directly)
        return [Bucket(capacity, limits) for limits in bounds]

    @property
    def largest(self) -> float:
        """The most tokens that a bucket may have, infinity where nothing limits it."""
        limits = [self._encoder.deterministic_tokens] if deterministic() else []
        return min([*limits, self._options.max_seq_length or math.inf])

    def max_frames(self, shapes: Iterable[Shape] = ()) -> int:
        """Return how many frames the most permissive bounds take.

        Args:
            shapes: Microbatches after warm-up.
        """
        if self._options.max_frames != "auto":
            return self._options.max_frames
        wanted = 2 * self._frames
        planned = max(DEFAULT_MAX_FRAMES, -(-wanted // MAX_FRAMES_STEP) * MAX_FRAMES_STEP)
        return raised(planned, max((shape.frames for shape in shapes), default=0))

    def menu(self) -> Menu:
        """Return what may be captured on demand."""
        return Menu(
            buckets_of=self.buckets_of,
            refuse=self._encoder.refuse,
            cost=replay_cost,
            unit=self._encoder.unit,
            exact_below=self._options.exact_below,
            capacities=self._options.named_buckets,
        )


class VisionWorkload(Workload):
    """See `Workload`. A call that eager refuses raises `BatchError`.

    What can fail on one rank alone is inside an agreement.

    Args:
        model: The vision encoder.
        options: What the user asked for.
        family: The encoder's upstream side.
        grids: Host copies of grids.

    Attributes:
        encoder: The encoder.
        kernels: What recorded work calls.
        plan: Observes microbatches and plans buckets.
    """

    manager: GraphManager
    noun = "encoder"
    out_of_memory_remedy = (
        "Lower max_vision_cuda_graph_seq_length, vision_cuda_graph_tuning.slots or vision_cuda_graph_buckets_max_gb, "
        "or give vision_cuda_graph_buckets a smaller largest bucket."
    )

    def __init__(
        self, model: nn.Module, options: VisionGraphOptions, family: EncoderFamily, grids: HostGrids | None = None
    ) -> None:
        self.options, self.family = options, family
        self.title, self.group = f"{family.encodes} CUDA graphs", f"{family.encodes}_cuda_graph"
        self.strict = options.strict
        self.grids = grids or HostGrids()
        self.kernels = RecordedKernels(options, family)
        self.encoder = family.encoder(model, options.exact_below, self.kernels)
        self.plan = EncoderPlan(options, self.encoder, self.kernels)
        self._regions: list[Region] = []

    @property
    def attention(self) -> str:
        """What attention recordings call, as `vision_cuda_graph_tuning.attention` names it."""
        return self.kernels.attention

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """See `Workload`."""
        return self.encoder.read(self.grids, *args, **kwargs)

    def observe(self, call: Call) -> None:
        """See `Workload`."""
        if call.misfit is None:
            self.observed += 1
            self.plan.observe(call.batch)

    def capture(self) -> None:
        """See `Workload`.

        Raises:
            CaptureError: Ranks that share layers planned different buckets.
        """
        manager = self.manager
        if not manager.consensus.agree(self._choose_attention).same:
            self.kernels.keep_attention("ranks that share layers would attend by different kernels")
        manager.bucket_consensus.agree(float)  # a communicator that was never used cannot be captured
        manager.consensus.agree(self._record)
        manager.consensus.agree(self._check_tensor_ranks)

    def _choose_attention(self) -> float:
        """Choose attention for this rank alone; returns a number that stands for it."""
        self.kernels.choose_attention()
        return digest(self.kernels.attention, self.kernels.attends_directly)

    def _record(self) -> None:
        """Capture what options name, or what microbatches have asked for most: others follow while training runs."""
        options, plan = self.options, self.plan
        offloading = offloading_of(options, PROVIDER_FIELDS, self.manager)
        self.manager.reset()
        self._regions = []
        if not options.on_demand:
            self.named = plan.named()
            buckets = [bucket for capacity in self.named for bucket in plan.buckets_of(capacity)]
            self._regions = self.manager.record([self._piece(buckets)], offloading=offloading)
            return
        self.demand = Demand(plan.menu(), plan.largest)
        for shape in plan.last:
            self.demand.saw(shape)
        self.demand.begin(BEGIN_WITH)
        limited = options.buckets_max_gb is not None and options.buckets == "auto"
        limit = (options.buckets_max_gb or 0) * GIB if limited else None
        piece = self._piece(self.demand.buckets, self.demand)
        self._regions = self.manager.record([piece], self.demand, limit, offloading)

    def _piece(self, buckets: list[Bucket], demand: Demand | None = None) -> Piece:
        return Piece(
            program=self.encoder,
            buckets=buckets,
            has_side_stream=self.has_side_stream,
            growth=demand,
            tolerance=NEAR if self.family.direct_attention.rounds_as_eager else FAR,
        )

    def _check_tensor_ranks(self) -> None:
        if not self.manager.bucket_consensus.agree(self._digest).same:
            raise CaptureError("tensor-parallel ranks planned different buckets: they saw different images")

    def _digest(self) -> float:
        """Return a number that stands for the buckets, their order and the slots."""
        return digest(self.manager.slots, *map(str, self._regions[0].buckets))

    def has_side_stream(self, bucket: Bucket) -> bool:
        """Whether a bucket's recordings are on two streams."""
        options = self.options
        if options.streams != "auto":
            return options.streams == 2
        return not options.moves_activations and bucket.tokens <= SIDE_STREAM_UP_TO

    def captured(self) -> None:
        """See `Workload`."""
        most = f"{self.plan.max_frames()} {'clips' if self.family.encodes == 'audio' else 'frames'}"
        later = "" if self.demand is None else ", others as microbatches ask for them"
        announce(f"{self.title}: {names_of(self.buckets or ())}{later}; {self.manager.slots} slot(s), up to {most}")

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `Workload`."""
        return self.encoder.outputs(returned)

    def run_eager(self, call: Call, eager: Eager) -> Any:
        """See `Workload`.

        Raises:
            BatchError: The pixels do not fit what describes them, or the encoder, and eager refuses them.
        """
        if self.manager.captured:
            self.family.before_eager((self.manager.model,))
        try:
            return eager()
        except Exception as error:
            if call.misfit is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise BatchError(call.misfit) from error

    def returned(self, outputs: tuple[Tensor, ...]) -> Any:
        """See `Workload`."""
        return self.encoder.returned(outputs)

    def notes(self) -> dict[str, str]:
        """See `Workload`."""
        notes = {}
        if self.buckets is not None:
            notes["plan"] = names_of(self.buckets)
        if self.demand is not None and self.buckets and self.family.encodes == "vision":
            notes["next run"] = next_run(self.buckets, PROVIDER_FIELDS["buckets"])
        if self.grids.device_reads:
            notes["grid reads"] = f"{self.grids.device_reads} grids were read from the device"
        return notes
