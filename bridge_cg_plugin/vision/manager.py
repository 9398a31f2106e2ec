"""A vision encoder's graphs over a training run: observe, plan, capture, replay, fall back, report."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..announce import announce
from ..attention_bounds import SIDE_WORK_UP_TO, deterministic
from ..graphs.buckets import Bucket, BucketPlan, plan_buckets
from ..graphs.changes.model_watch import NOTHING_EXEMPT, Exempt
from ..graphs.errors import CaptureError, OutOfMemoryInCapture
from ..graphs.executor import Executor
from ..graphs.fallback import Fallback
from ..graphs.gradients import Reduction
from ..graphs.graphed_module import GraphedModule
from ..graphs.instance import InstanceMethod
from ..graphs.program import RegionProgram
from ..graphs.rank_consensus import Alone, Peers, digest
from ..graphs.region import Region
from ..graphs.report import GIB
from ..graphs.statistics import RegionStatistics
from ..offload.offloading import RegionOffloading, policy_of
from ..options import PROVIDER_FIELDS, VisionGraphOptions
from ..upstream_types import UpstreamModule
from .adapter import NO_OTHER_ATTENTION, EncoderBatch, EncoderCall, EncoderFamily
from .balance.exchange import ImageExchange
from .check import CheckResult, ReplayCheck
from .eager_costs import Clock, CudaClock, MeasuredCosts, Shape, remember, shape_of, watch_backward
from .encoders.layer_parts import AttentionBatch, LayerBatch, layer_parts
from .host_grids import HostGrids
from .memory import measure_memory

# Frames that the most permissive bounds take; a batch of fewer uses cheaper bounds.
DEFAULT_MAX_FRAMES = 64
# A pool's segments are not filled to the brim; measured pools are at most this part fuller than their tensors.
MEMORY_MARGIN = 0.8
LIMIT_ATTEMPTS = 4
MAX_FRAMES_STEP = 16
ALONE = Alone()
# Training steps whose tokens are kept, to see how far ranks are apart.
LAST_STEPS = 100


class VisionGraphs(GraphedModule):
    """Runs one vision encoder on graphs.

    Until `capture` the encoder runs eager and its microbatches are observed.

    Args:
        model: The vision encoder; its `forward` is replaced on the instance until `detach`.
        options: What the user asked for.
        family: The encoder's upstream side.
        executor: Makes recordings.
        slots: Microbatches in flight that `options.slots="auto"` stands for.
        before_replay: Called before each replay; waits for parameters that are still being gathered.
        reduction: Data parallelism's reduction of gradients, where there is one.
        grids: Host copies of grids.
        peers: Ranks that are on graphs together with this one or not at all.
        twins: Those of them that share the encoder's layers, and so its buckets.
        exchange: Levels the work of data-parallel ranks, where it was asked for.
        clock: Times microbatches for `options.cost_fallback`; None takes device events, and no times without a GPU.
        exempt: What may change of the encoder without changing what it computes.
    """

    title = "vision CUDA graphs"
    noun = "encoder"
    group = "vision_cuda_graph"
    out_of_memory_remedy = (
        "Lower max_vision_cuda_graph_seq_length, vision_cuda_graph_tuning.slots or vision_cuda_graph_buckets_max_gb, "
        "or give vision_cuda_graph_buckets a smaller largest bucket."
    )

    def __init__(
        self,
        model: nn.Module,
        options: VisionGraphOptions,
        family: EncoderFamily,
        executor: Executor,
        slots: int = 1,
        before_replay: Callable[[], None] | None = None,
        reduction: Reduction | None = None,
        grids: HostGrids | None = None,
        peers: Peers = ALONE,
        twins: Peers = ALONE,
        exchange: ImageExchange | None = None,
        clock: Clock | None = None,
        exempt: Exempt = NOTHING_EXEMPT,
    ) -> None:
        super().__init__(model, executor, options.strict, before_replay, exempt)
        self.options, self.family = options, family
        self.slots = slots if options.slots == "auto" else options.slots
        self.grids = grids or HostGrids()
        self.plan: BucketPlan | None = None
        self.checks: list[CheckResult] = []
        self._reduction = reduction if options.gradient_hooks == "awaited" else None
        self._observed_tokens: list[int] = []
        self._observed_frames = 0
        self._step_tokens: deque[int] = deque(maxlen=LAST_STEPS)
        self._checked_step = 0
        self._peers, self._twins, self._exchange = peers, twins, exchange
        self._adapter = family.adapt(model)
        self._layers: list[InstanceMethod] = []
        self._costs = self._measured_costs(clock)
        self._chosen: dict[Shape, Bucket | None] = {}
        self._attends_directly = self._attends_by_flash = False
        self._warmup_peak = 0

    def _measured_costs(self, clock: Clock | None) -> MeasuredCosts | None:
        """Return where microbatches are timed, or None where times must not decide.

        Deterministic runs must repeat themselves, and tensor-parallel ranks must decide alike, as their collectives
        depend on it; times do neither. Layers' parts are too short to time one by one.
        """
        if not self.options.cost_fallback or not self.options.whole_encoder or deterministic():
            return None
        if (getattr(self.model.config, "tensor_model_parallel_size", None) or 1) > 1:
            return None
        if clock is None and self.executor.device.type == "cuda":
            clock = CudaClock()
        return MeasuredCosts(clock) if clock is not None else None

    def _recorded(self) -> None:
        """See `GraphedModule`."""
        self._peers.agree(self._finish)

    def _finish(self) -> float:
        self._install_layers()
        if self._exchange is not None:
            self._exchange.forget_times()
        announce(f"vision CUDA graphs: {self.plan}; {self.slots} slot(s), up to {self._max_frames()} frames")
        return 0.0

    def _record(self) -> None:
        """See `GraphedModule`. What takes more memory than allowed is captured again with a smaller largest bucket.

        What can fail on one rank alone is inside an agreement.
        """
        limit = self._peers.agree(self._prepare).smallest
        self._twins.agree(float)  # a communicator that was never used cannot be captured
        if self._may_reach_further() and self._record_with_headroom(limit):
            return
        for _ in range(LIMIT_ATTEMPTS):
            excess = self._peers.agree(partial(self._record_plan, limit)).largest
            self._peers.agree(self._check_twins)
            if excess <= 1:
                return
            limit = max(self._regions[0].buckets).tokens / excess * MEMORY_MARGIN
        raise CaptureError(
            f"graphs do not fit vision_cuda_graph_buckets_max_gb={self.options.buckets_max_gb:g} GiB a slot"
        )

    def _prepare(self) -> float:
        """Choose attention; returns `_capacity_limit`."""
        self._warmup_peak = self._peak_bytes()  # before memory is measured, which forgets it
        self._choose_attention()
        return self._capacity_limit()

    def _choose_attention(self) -> None:
        """Decide which attention recordings call; says so where what was asked for cannot be had."""
        wanted, family = self.options.attention, self.family
        self._attends_directly = self._attends_by_flash = False
        if wanted == "transformer_engine":
            return
        direct = family.direct_attention.refusal()
        flash = family.flash_attention.refusal() if wanted == "flash" else None  # asking imports its compiler
        self._attends_directly = direct is None
        self._attends_by_flash = wanted == "flash" and flash is None
        refusal = {"cudnn": direct, "flash": flash}.get(wanted)
        if refusal is not None:
            stays = "cuDNN's, called directly" if self._attends_directly else "Transformer Engine's"
            stays = "as it is" if family.direct_attention is NO_OTHER_ATTENTION else stays
            announce(f"vision_cuda_graph_tuning.attention={wanted}: {refusal}; attention stays {stays}")

    @property
    def attention(self) -> str:
        """What attention recordings call, as `vision_cuda_graph_tuning.attention` names it."""
        if self._attends_by_flash:
            return "flash"
        return "cudnn" if self._attends_directly else "transformer_engine"

    def _bounds(self, capacity: int, frames: int) -> list[tuple[int, ...]]:
        return self._adapter.bounds(capacity, frames, self._attends_directly)

    def _record_plan(self, limit: float, headroom: float = 1.0) -> float:
        """Plan and capture anew, with a bound of the largest bucket in tokens; returns `_excess`."""
        self.reset()
        self.plan = self._plan(None if limit == math.inf else int(limit), headroom)
        self._regions = self._make_regions(self.plan.capacities)
        for region in self._regions:
            region.capture()
        return self._excess()

    def _check_twins(self) -> float:
        if not self._twins.agree(self._digest).same:
            raise CaptureError("tensor-parallel ranks planned different buckets: they saw different images")
        return 0.0

    def _digest(self) -> float:
        """Return a number that stands for the buckets, their order and the slots."""
        return digest(self.slots, *map(str, self._regions[0].buckets))

    def _may_reach_further(self) -> bool:
        options = self.options
        return options.buckets == "auto" and options.max_seq_length is None and options.headroom > 1

    def _record_with_headroom(self, limit: float) -> bool:
        """Capture buckets beyond the largest size that was seen; returns whether every rank's memory allows it."""
        fits = bool(self._peers.agree(partial(self._fits_with_headroom, limit)).smallest)
        if fits:
            self._peers.agree(self._check_twins)
            return True
        announce(f"vision CUDA graphs: no memory for vision_cuda_graph_tuning.headroom={self.options.headroom:g}")
        return False

    def _fits_with_headroom(self, limit: float) -> bool:
        try:
            excess = self._record_plan(limit, self.options.headroom)
        except (OutOfMemoryInCapture, torch.OutOfMemoryError):
            return False
        return excess <= 1 and self._headroom_bytes() <= self._left_over(self._warmup_peak)

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.executor.device) if self.executor.device.type == "cuda" else 0

    def _headroom_bytes(self) -> float:
        """Return what the graphs take beyond those of the largest size seen, which stand for eager's activations."""
        return sum(region.statistics.memory_bytes for region in self._regions) * (1 - 1 / self.options.headroom)

    def _left_over(self, peak: int) -> float:
        """Return how many bytes of the device no warm-up step has needed, less a margin."""
        if self.executor.device.type != "cuda":
            return math.inf
        return torch.cuda.get_device_properties(self.executor.device).total_memory * MEMORY_MARGIN - peak

    def _excess(self) -> float:
        """Return the graphs' memory over the limit that automatic buckets keep to."""
        if self.options.buckets_max_gb is None or self.options.buckets != "auto":
            return 0.0
        used = sum(region.statistics.memory_bytes for region in self._regions) / self.slots
        return used / (self.options.buckets_max_gb * GIB)

    def reset(self) -> None:
        """See `GraphedModule`."""
        for method in self._layers:
            method.restore()
        self._layers = []
        super().reset()
        self._chosen = {}
        if self._costs is not None:
            self._costs.forget_replays()

    def _plan(self, capacity_limit: int | None, headroom: float = 1.0) -> BucketPlan:
        if self.options.buckets != "auto":
            capacities = self.options.buckets
            if self.options.max_seq_length is not None:
                capacities = (*(c for c in capacities if c < self.options.max_seq_length), self.options.max_seq_length)
            return BucketPlan(tuple(capacities), 0.0, 0)
        return plan_buckets(
            self._observed_tokens,
            largest=self.options.max_seq_length,
            merge_unit=self._adapter.unit,
            capacity_limit=capacity_limit,
            exact_below=self.options.exact_below,
            headroom=headroom,
        )

    def _capacity_limit(self) -> float:
        """Return the most tokens that a bucket may have on this rank, infinity where nothing limits it."""
        limits = [self._adapter.deterministic_tokens] if deterministic() else []
        if self.options.buckets_max_gb is not None and self.executor.device.type == "cuda":
            memory = measure_memory(
                self.executor, self._encoder_program(), self._adapter.unit, lambda tokens: self._bounds(tokens, 1)[0]
            )
            limits.append(memory.tokens_within(self.options.buckets_max_gb * GIB * MEMORY_MARGIN))
        return min(limits, default=math.inf)

    def _max_frames(self) -> int:
        if self.options.max_frames != "auto":
            return self.options.max_frames
        wanted = 2 * self._observed_frames
        return max(DEFAULT_MAX_FRAMES, -(-wanted // MAX_FRAMES_STEP) * MAX_FRAMES_STEP)

    def _encoder_program(self) -> RegionProgram:
        return self._adapter.program(self.options.exact_below, self._kernels)

    @contextmanager
    def _kernels(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        family, options = self.family, self.options
        entered = [family.kernels]
        entered += [family.fused_accumulation] if options.gradient_accumulation_fusion else []
        fast = options.kernels == "fast" or (options.kernels == "auto" and not deterministic())
        entered += [family.reordering_kernels] if fast else []
        entered += [family.direct_attention.kernels] if self._attends_directly else []
        entered += [family.flash_attention.kernels] if self._attends_by_flash else []  # over cuDNN's, so last
        entered += [family.known_activations] if options.moves_activations else []
        with ExitStack() as stack:
            for kernels in entered:
                stack.enter_context(kernels(modules))
            yield

    def _make_regions(self, capacities: tuple[int, ...]) -> list[Region]:
        frames, options = self._max_frames(), self.options
        if options.whole_encoder:
            buckets = [Bucket(c, limits) for c in capacities for limits in self._bounds(c, frames)]
            programs: Sequence[RegionProgram] = [self._encoder_program()]
        else:
            (part,), pack_segments = options.modules, self.family.pack_segments
            if pack_segments is None:
                raise CaptureError(f"{self.family.name} has no layers whose parts could be captured")
            buckets = [Bucket(c, (frames,) if part == "attn" else ()) for c in capacities]
            programs = layer_parts(self._layers_of_model(), part, pack_segments, options.exact_below, self._kernels)
        return [
            Region(
                p,
                self.executor,
                buckets,
                self.slots,
                self.options.evaluation,
                self._before_replay,
                self._reduction,
                offloading=self._offloading(),
                has_side_work=self._has_side_work,
                watch=self._followed(),
                peers=self._peers,
                strict=self.options.strict,
            )
            for p in programs
        ]

    def _has_side_work(self, bucket: Bucket) -> bool:
        """Whether a bucket's recordings are on two streams."""
        options = self.options
        if options.streams != "auto":
            return options.streams == 2
        return options.whole_encoder and not options.moves_activations and bucket.tokens <= SIDE_WORK_UP_TO

    def _offloading(self) -> RegionOffloading | None:
        """Return what keeps a region's activations, None where they stay in the graphs' memory."""
        if not self.options.moves_activations:
            return None
        return RegionOffloading(policy_of(self.options, PROVIDER_FIELDS), self.slots, self.executor.device)

    def _replaced(self) -> list[tuple[nn.Module, str]]:
        """See `GraphedModule`."""
        parts = () if self.options.whole_encoder else self._layers_of_model()
        return [*super()._replaced(), *((layer, self._part[0]) for layer in parts)]

    def _layers_of_model(self) -> Sequence[nn.Module]:
        decoder: UpstreamModule = self.model.decoder
        layers: Sequence[nn.Module] = decoder.layers
        return layers

    @property
    def _part(self) -> "tuple[str, type[_LayerAttention | _LayerMlp]]":
        """The layers' attribute that calls the recorded part, and what stands in for it."""
        if self.options.modules == ("attn",):
            return "_forward_attention", _LayerAttention
        return "_forward_mlp", _LayerMlp

    def _install_layers(self) -> None:
        if self.options.whole_encoder:
            return
        name, wrapper = self._part
        for layer, region in zip(self._layers_of_model(), self._regions, strict=True):
            self._layers.append(InstanceMethod(layer, name, wrapper(self, region, getattr(layer, name))))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The encoder's forward: a replay where possible, eager otherwise.

        Raises:
            BatchError: The pixels do not fit what describes them, or the encoder, and eager refuses them.
        """
        call = self._adapter.read(self.grids, *args, **kwargs)
        eager = partial(self._eager_forward, *args, **kwargs)
        if self._exchange is None:
            return self._encode(call, eager)
        if call.refusal is not None:
            return self._encode_here(call, eager)
        return self._adapter.returned(self._exchange.encode(call.batch, self._encode_batch))

    def _encode_here(self, call: EncoderCall, eager: Callable[[], Any]) -> Any:
        """Encode images that cannot move, after this rank's part in the exchange of the other ranks' images."""
        needed = self.without_images()
        returned = self._encode(call, eager)
        if needed is None:
            return returned
        first, *others = self._adapter.outputs(returned)
        return self._adapter.returned((first + needed.to(first), *others))

    def without_images(self) -> Tensor | None:
        """Take part in the exchange of a microbatch in which this rank has no image; see `ImageExchange`."""
        return self._exchange.without_images(self._encode_batch) if self._exchange is not None else None

    def begin_step(self) -> None:
        """See `GraphedModule`."""
        super().begin_step()
        self._step_tokens.append(0)

    def statistics(self) -> RegionStatistics:
        """See `GraphedModule`."""
        total = super().statistics()
        total.step_tokens = list(self._step_tokens)
        return total

    def _encode_batch(self, batch: EncoderBatch) -> tuple[Tensor, ...]:
        """Encode a batch that did not come as a call of the encoder's forward."""
        call = EncoderCall(batch, usual=True)
        return self._adapter.outputs(self._encode(call, partial(self._adapter.run, self._eager_forward, batch)))

    def _encode(self, call: EncoderCall, eager: Callable[[], Any]) -> Any:
        if self._step_tokens and self.model.training:
            self._step_tokens[-1] += call.batch.tokens
        outputs = None
        if self._may_replay(call):
            outputs = self._replay(call.batch)
        elif self._paused or self.options.whole_encoder:
            self._note_eager()
        if outputs is not None:
            return self._adapter.returned(outputs)
        if self.captured:
            self.family.before_eager((self.model,))
        self._before_eager()
        costs = self._timed_costs() if call.refusal is None else None
        timing = costs.time_eager(call.batch) if costs is not None else None
        returned = call.run(eager)
        if timing is not None and (first := self._adapter.outputs(returned)[0]).requires_grad:
            timing.forward_ended()
            watch_backward(timing, first)
        return returned

    def _may_replay(self, call: EncoderCall) -> bool:
        """Whether the encoder as a whole may try a replay; counts what keeps it from one."""
        if not self.captured:
            if self.failure is not None:
                self._fell_back(Fallback.CAPTURE_FAILED, call.batch.tokens)
            elif call.misfit is None:
                self._observe(call.batch)
            return False
        if self._paused or not self.options.whole_encoder:
            return False
        if call.refusal is not None:
            self._fell_back(call.refusal, call.batch.tokens)
            return False
        return True

    def _run_eager(self, batch: EncoderBatch) -> tuple[Tensor, ...]:
        return self._adapter.outputs(self._adapter.run(self._eager_forward, batch))

    def _replay(self, batch: EncoderBatch) -> tuple[Tensor, ...] | None:
        region = self._regions[0]
        costs = self._timed_costs()
        bucket = self._chosen_bucket(batch) if costs is not None else None
        if costs is not None and bucket is not None and costs.eager_is_faster(shape_of(batch), bucket):
            self._fell_back(Fallback.EAGER_IS_FASTER, batch.tokens)
            region.clear()
            return None
        if not self._check_is_due():
            return self._timed_replay(batch, costs, bucket)
        check = ReplayCheck(
            self._run_eager,
            self.options.check_tolerance,
            self.options.check_action == "stop",
            self.checks,
        )
        check.start(self._step, batch)
        outputs = region.run(batch, check)
        if outputs is not None:
            self._checked_step = self._step
            check.compare_outputs(outputs, region.sources.current)
        return outputs

    def _timed_replay(
        self, batch: EncoderBatch, costs: MeasuredCosts | None, bucket: Bucket | None
    ) -> tuple[Tensor, ...] | None:
        timing = costs.time_replay(bucket) if costs is not None and bucket is not None else None
        outputs = self._regions[0].run(batch, timing)
        if timing is not None:
            timing.forward_ended()
        return outputs

    def _timed_costs(self) -> MeasuredCosts | None:
        """Return where this microbatch is timed, None where it is not."""
        return self._costs if not self._paused and self.model.training and torch.is_grad_enabled() else None

    def _chosen_bucket(self, batch: EncoderBatch) -> Bucket | None:
        """Return the bucket that a training microbatch takes, remembered by its shape."""
        shape = shape_of(batch)
        if shape not in self._chosen:
            found = self._regions[0].choose(batch)
            remember(self._chosen, shape, found if isinstance(found, Bucket) else None)
        return self._chosen[shape]

    def _check_is_due(self) -> bool:
        interval = self.options.check_interval
        return (
            interval > 0
            and self._step != self._checked_step
            and self._step % interval == 0
            and self.model.training
            and torch.is_grad_enabled()
        )

    def _observe(self, batch: EncoderBatch) -> None:
        self._observed_tokens.append(batch.tokens)
        self._observed_frames = max(self._observed_frames, batch.frames)

    def _warmup_microbatches(self) -> int:
        """See `GraphedModule`."""
        return len(self._observed_tokens)

    def _notes(self) -> dict[str, str]:
        """See `GraphedModule`."""
        notes = {}
        if self.plan is not None:
            notes["plan"] = str(self.plan)
        if self.checks:
            worst = max(max(c.forward, c.gradient or 0.0) for c in self.checks)
            notes["checks"] = f"{len(self.checks)} replays compared with eager, largest difference {worst:.2e}"
        if self._exchange is not None:
            notes["balance"] = self._exchange.note()
        if self.grids.device_reads:
            notes["grid reads"] = f"{self.grids.device_reads} grids were read from the device"
        return notes


class _LayerAttention:
    """Stands in for a layer's `_forward_attention`."""

    def __init__(self, graphs: VisionGraphs, region: Region, eager: Callable[..., tuple[Tensor, Any]]) -> None:
        self._graphs, self._region, self._eager = graphs, region, eager

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        packed: Any = kwargs.get("packed_seq_params")
        angles: Any = kwargs.get("rotary_pos_emb")
        usual = not args and packed is not None and angles is not None and kwargs.get("context") is None
        if usual and not self._graphs.is_paused:
            outputs = self._region.run(AttentionBatch(hidden_states, angles, packed.cu_seqlens_q))
            if outputs is not None:
                return outputs[0], None
        return self._eager(hidden_states, *args, **kwargs)


class _LayerMlp:
    """Stands in for a layer's `_forward_mlp`."""

    def __init__(self, graphs: VisionGraphs, region: Region, eager: Callable[..., Tensor]) -> None:
        self._graphs, self._region, self._eager = graphs, region, eager

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self._graphs.is_paused:
            outputs = self._region.run(LayerBatch(hidden_states))
            if outputs is not None:
                return outputs[0]
        return self._eager(hidden_states, *args, **kwargs)
