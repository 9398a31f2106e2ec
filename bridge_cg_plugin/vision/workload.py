"""A vision encoder as the graph manager sees it: calls as images, what is observed and captured, results, notes."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..announce import announce
from ..attention_bounds import SIDE_STREAM_UP_TO, Shape, deterministic, replay_cost
from ..graphs.buckets import BEGIN_WITH, WINDOW, Bucket, Demand, names_of, next_run, raised, round_up
from ..graphs.errors import CaptureError
from ..graphs.manager import GraphManager
from ..graphs.program import FAR, NEAR, Call, Eager, Piece, Workload, digest
from ..graphs.region import Region
from ..offload.offloading import offloading_of
from ..options import PROVIDER_FIELDS, VisionGraphOptions
from .batch import BatchError, HostGrids
from .encoder import EncoderFamily, RecordedKernels

# Frames that the most permissive bounds take; a batch of fewer uses cheaper bounds.
DEFAULT_MAX_FRAMES = 64
MAX_FRAMES_STEP = 16


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
        last: Shapes of the last microbatches of warm-up steps.
    """

    manager: GraphManager
    noun = "encoder"
    out_of_memory_remedy = (
        "Lower max_vision_cuda_graph_seq_length or vision_cuda_graph_slots, or give vision_cuda_graph_buckets a "
        "smaller largest bucket."
    )

    def __init__(self, model: nn.Module, options: VisionGraphOptions, family: EncoderFamily, grids: HostGrids) -> None:
        self.options, self.family = options, family
        self.title, self.group = f"{family.encodes} CUDA graphs", f"{family.encodes}_cuda_graph"
        self.strict = options.strict
        self.grids = grids
        self.kernels = RecordedKernels(options, family)
        self.encoder = family.encoder(model, options.exact_below, self.kernels)
        self.last: deque[Shape] = deque(maxlen=WINDOW)
        self._frames = 0
        self._regions: list[Region] = []

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """See `Workload`."""
        return self.encoder.read(self.grids, *args, **kwargs)

    def observe(self, call: Call) -> None:
        """See `Workload`."""
        if call.misfit is None:
            self.observed += 1
            self.last.append(call.batch.shape)
            self._frames = max(self._frames, call.batch.shape.frames)

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
        options = self.options
        offloading = offloading_of(options, PROVIDER_FIELDS, self.manager)
        self.manager.reset()
        self._regions = []
        if not options.on_demand:
            self.named = self._named()
            buckets = [bucket for capacity in self.named for bucket in self._buckets_of(capacity)]
            self._regions = self.manager.record([self._piece(buckets)], offloading=offloading)
            return
        self.demand = self._demand()
        for shape in self.last:
            self.demand.saw(shape)
        self.demand.begin(BEGIN_WITH)
        piece = self._piece(self.demand.buckets, self.demand)
        self._regions = self.manager.record([piece], self.demand, offloading)

    def _named(self) -> tuple[int, ...]:
        """Return the capacities that the options name."""
        buckets, longest = self.options.named_buckets, self.options.max_seq_length
        return buckets if not buckets or longest is None else (*(c for c in buckets if c < longest), longest)

    def _demand(self) -> Demand:
        """Return what may be captured on demand."""
        limits = [self.encoder.deterministic_tokens] if deterministic() else []
        return Demand(
            self._buckets_of,
            self.encoder.refuse,
            replay_cost,
            unit=self.encoder.unit,
            exact_below=self.options.exact_below,
            named=self.options.named_buckets,
            limit=min([*limits, self.options.max_seq_length or math.inf]),
        )

    def _buckets_of(self, capacity: int, shapes: Sequence[Shape] = ()) -> list[Bucket]:
        """Return the useful buckets of a capacity, cheapest first, for microbatches after warm-up as well."""
        bounds = self.encoder.bounds(capacity, self._max_frames(shapes), self.kernels.attends_directly)
        return [Bucket(capacity, limits) for limits in bounds]

    def _max_frames(self, shapes: Iterable[Shape] = ()) -> int:
        """Return how many frames the most permissive bounds take, with microbatches after warm-up."""
        if self.options.max_frames != "auto":
            return self.options.max_frames
        planned = max(DEFAULT_MAX_FRAMES, round_up(2 * self._frames, MAX_FRAMES_STEP))
        return raised(planned, max((shape.frames for shape in shapes), default=0))

    def _piece(self, buckets: list[Bucket], demand: Demand | None = None) -> Piece:
        rounds_as_eager = self.family.direct_attention.rounds_as_eager
        on_gpu = self.manager.executor.device.type == "cuda"
        return Piece(
            program=self.encoder,
            buckets=buckets,
            has_side_stream=self.has_side_stream,
            growth=demand,
            tolerance=NEAR if rounds_as_eager else FAR,
            exact=rounds_as_eager and self.kernels.attention != "flash" and on_gpu,
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
        most = f"{self._max_frames()} {'clips' if self.family.encodes == 'audio' else 'frames'}"
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
