"""A decoder's graphs of packed documents over a training run: observe, plan, capture, replay, fall back, report."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...announce import announce
from ...graphs.buckets import EXACT_BELOW, Bucket, BucketPlan, plan_buckets
from ...graphs.changes.model_watch import NOTHING_EXEMPT, Exempt
from ...graphs.errors import CaptureError
from ...graphs.executor import Executor
from ...graphs.fallback import Fallback
from ...graphs.gradients import Reduction
from ...graphs.graphed_module import GraphedModule
from ...graphs.host_copies import HostCopies
from ...graphs.inputs import want_gradients
from ...graphs.instance import InstanceMethod
from ...graphs.rank_consensus import Alone, Peers, digest
from ...graphs.region import Region
from ...graphs.slot import SharedInputs
from ...offload.offloading import RegionOffloading, policy_of
from ...options import PACKED_FIELDS, OptionError, PackedOptions
from .batch import PackedBatch, pack_batch
from .fit import pack_buckets
from .layout import spread
from .program import SHARED, PackedProgram, PackLayout, Run

MOST_EXACT_BUCKETS = 12
ALONE = Alone()


@dataclass(frozen=True, slots=True)
class DecoderCall:
    """What one call of a decoder says.

    Attributes:
        hidden: `[tokens / (shards * ranks), 1, width]`.
        angles: Rotary angles; None where nothing is rotated.
        offsets: `cu_seqlens` by name; None where the batch has none.
        max_seqlens: Tokens of the longest document by name.
        visual: What is added behind the first layers: `[1, tokens]` mask, and `[marked tokens, width]` for each layer.
    """

    hidden: Tensor
    angles: Tensor | None
    offsets: Mapping[str, Tensor | None]
    max_seqlens: Mapping[str, int]
    visual: tuple[Tensor, Sequence[Tensor]] | None = None


# Turns a piece's outputs into what a call returns.
Answer = Callable[[tuple[Tensor, ...]], Any]


def first(outputs: tuple[Tensor, ...]) -> Tensor:
    """Return the first output."""
    return outputs[0]


@dataclass(frozen=True, slots=True)
class Follower:
    """A later call whose answer a replayed piece has given already.

    Attributes:
        owner: Module whose attribute is called.
        attribute: That attribute.
        answer: Turns the piece's outputs into what the call returns.
    """

    owner: nn.Module
    attribute: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class DecoderPart:
    """A piece of a decoder that becomes a region of its own.

    Attributes:
        name: Of the region.
        owner: Module whose attribute calls the piece; the decoder itself for all layers.
        uses: Names of the owner's submodules whose parameters the piece uses; none are all of them.
        run: The piece.
        attribute: That attribute; empty where the decoder's forward is the call.
        answer: Turns the piece's outputs into what the call returns.
        outputs: How many tensors the piece gives.
        followers: Calls after that one, each once, which the piece answers too.
        counted: Whether the piece must know how many tokens are no padding.
    """

    name: str
    owner: nn.Module
    uses: Sequence[str]
    run: Run
    attribute: str = ""
    answer: Answer = first
    outputs: int = 1
    followers: tuple[Follower, ...] = ()
    counted: bool = False

    def roots(self) -> list[nn.Module]:
        """Return the modules whose parameters the piece uses now: a layer's submodules may be replaced."""
        return [self.owner.get_submodule(name) for name in self.uses or ("",)]


class DecoderFamily(Protocol):
    """What the plugin must know of a decoder's upstream code."""

    per_position: bool
    absolute: bool
    shards: int
    ranks: int
    rank: int

    def kernels(self, modules: Sequence[nn.Module], /) -> AbstractContextManager[Any]:
        """Be around recorded work; swaps in kernels that compute the same."""

    def known_activations(self, modules: Sequence[nn.Module], /) -> AbstractContextManager[Any]:
        """Be around recorded work where activations leave the device: notes what they are."""

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DecoderCall | Fallback:
        """Return what a call says, or why a graph cannot serve it."""

    def parts(self, modules: Sequence[str]) -> list[DecoderPart]:
        """Return the pieces to record; no modules are all layers as one piece."""

    def statistics_kept(self) -> AbstractContextManager[None]:
        """Be around captures, whose passes leave no trace in what layers count and log."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A batch that all parts of layers replay, and the slot in which they do."""

    batch: PackedBatch
    slot: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What a warm-up step's pack looked like."""

    tokens: int
    documents: int
    offsets: tuple[str, ...]
    rotated: int
    width: int
    dtype: torch.dtype
    additions: int

    @property
    def kind(self) -> tuple[tuple[str, ...], int, int, torch.dtype]:
        """What all packs of a recording share."""
        return self.offsets, self.rotated, self.width, self.dtype


class PackedGraphs(GraphedModule):
    """Runs one decoder's layers on graphs of packed documents.

    Until `capture` it runs eager and its microbatches are observed. With several pieces one choice is made for all of
    them when the decoder is called, so a microbatch replays everywhere or nowhere.

    Args:
        decoder: The decoder; its `forward` is replaced on the instance until `detach`.
        options: What the user asked for.
        modules: Names of the parts of layers to record; none are all layers as one region.
        family: The decoder's upstream side.
        executor: Makes recordings.
        slots: Microbatches in flight that `options.slots="auto"` stands for.
        before_replay: Called before each replay; waits for parameters that are still being gathered.
        reduction: Data parallelism's reduction of gradients, where there is one.
        host: Host copies of offsets.
        peers: Ranks that are on graphs together with this one or not at all; all of them see the same packs.
        exempt: What may change of the decoder without changing what it computes.

    Raises:
        OptionError: A bucket that the options name cannot be shared by the ranks.
    """

    title = "packed-sequence CUDA graphs"
    noun = "decoder"
    group = "packed_cuda_graph"
    out_of_memory_remedy = (
        "Lower the tokens of a pack, cuda_graph_packed_tuning.slots or cuda_graph_max_packed_seqs, or give "
        "cuda_graph_packed_buckets a smaller largest bucket."
    )

    def __init__(
        self,
        decoder: nn.Module,
        options: PackedOptions,
        modules: Sequence[str],
        family: DecoderFamily,
        executor: Executor,
        slots: int = 1,
        before_replay: Callable[[], None] | None = None,
        reduction: Reduction | None = None,
        host: HostCopies | None = None,
        peers: Peers = ALONE,
        exempt: Exempt = NOTHING_EXEMPT,
    ) -> None:
        super().__init__(decoder, executor, options.strict, before_replay, exempt)
        self.options, self.modules, self.family = options, tuple(modules), family
        self.slots = slots if options.slots == "auto" else options.slots
        self.host = host or HostCopies()
        self._reduction, self._peers = reduction, peers
        self.plan: BucketPlan | None = None
        self._observed: list[Observed] = []
        self._installed: list[InstanceMethod] = []
        self._followers: list[_FollowerCall] = []
        self._current: Chosen | None = None
        self._check_buckets()

    def _record(self) -> None:
        """See `GraphedModule`. What can fail on one rank alone is inside an agreement."""
        if not self._peers.agree(self._digest).same:
            raise CaptureError("tensor- or context-parallel ranks planned different buckets: they saw different packs")
        self._peers.agree(self._record_plan)

    def _digest(self) -> float:
        """Plan; returns a number that stands for the buckets, their order and the slots."""
        if not self._observed:
            raise ValueError("no packed microbatch was seen in the warm-up steps, so nothing says how packs look")
        self.plan = self._plan()
        return digest(self.slots, self._kind(), *map(str, self._buckets(self.plan)))

    def _buckets(self, plan: BucketPlan) -> list[Bucket]:
        return pack_buckets(plan.capacities, self.options.max_packed_seqs or 1, self.options.max_seqlen)

    def _record_plan(self) -> float:
        buckets = self._buckets(self.plan or self._plan())
        shared = SharedInputs(SHARED, self.executor.device)
        for part in self.family.parts(self.modules):
            region = Region(
                self._program(part),
                self.executor,
                buckets,
                self.slots,
                self.options.evaluation,
                self._before_replay,
                self._reduction,
                shared if part.attribute else None,
                offloading=self._offloading(),
                watch=self._followed(),
                around=self.family.statistics_kept,
                peers=self._peers,
                strict=self.options.strict,
            )
            self._regions.append(region)
            region.capture()
            if part.attribute:
                self._install(part, region)
        self._regions[0].statistics.static_bytes += shared.nbytes
        return 0.0

    def _offloading(self) -> RegionOffloading | None:
        """Return what keeps a region's activations, None where they stay in the graphs' memory."""
        if not self.options.moves_activations:
            return None
        return RegionOffloading(policy_of(self.options, PACKED_FIELDS), self.slots, self.executor.device)

    def _recorded(self) -> None:
        """See `GraphedModule`."""
        self._peers.agree(self._announce_plan)

    def _announce_plan(self) -> float:
        parts = "" if len(self._regions) == 1 else f" in {len(self._regions)} parts of layers"
        announce(
            f"{self.title}{parts}: {self.plan}; {self.slots} slot(s), up to {self.options.max_packed_seqs} documents"
        )
        return 0.0

    def _plan(self) -> BucketPlan:
        if self.options.buckets != "auto":
            return BucketPlan(self.options.buckets, 0.0, 0)
        tokens = [seen.tokens for seen in self._observed]
        if self.family.shards > 1:  # packs cannot be padded: the sizes that come most often
            usual = [size for size, _ in Counter(tokens).most_common(MOST_EXACT_BUCKETS)]
            return BucketPlan(tuple(sorted(usual)), 0.0, len(tokens))
        return plan_buckets(tokens, merge_unit=self._unit, exact_below=EXACT_BELOW * self.family.ranks)

    @property
    def _unit(self) -> int:
        """What a bucket's tokens are a multiple of, so that every rank has as many."""
        return math.lcm(self.family.shards * self.family.ranks, 2 * self.family.ranks if self.family.ranks > 1 else 1)

    def _check_buckets(self) -> None:
        if self.options.buckets == "auto":
            return
        if wrong := [tokens for tokens in self.options.buckets if tokens % self._unit]:
            allowed = f"multiples of {self._unit}, which ranks share in equal parts"
            raise OptionError(PACKED_FIELDS["buckets"], wrong[0], allowed, "Round the size up.")

    def _kind(self) -> tuple[tuple[str, ...], int, int, torch.dtype]:
        """Return what the packs that were seen most often share."""
        return Counter(seen.kind for seen in self._observed).most_common(1)[0][0]

    def _program(self, part: DecoderPart) -> PackedProgram:
        offsets, rotated, width, dtype = self._kind()
        family = self.family
        layout = PackLayout(
            offsets,
            rotated,
            family.per_position,
            family.absolute,
            family.shards,
            family.ranks,
            family.rank,
            0 if part.attribute else max(seen.additions for seen in self._observed),
            part.counted,
        )
        return PackedProgram(
            part.name, part.roots, width, dtype, layout, part.run, part.outputs, EXACT_BELOW, self._kernels
        )

    @contextmanager
    def _kernels(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.family.kernels(modules))
            if self.options.moves_activations:
                stack.enter_context(self.family.known_activations(modules))
            yield

    def _replaced(self) -> list[tuple[nn.Module, str]]:
        """See `GraphedModule`."""
        parts = [part for part in self.family.parts(self.modules) if part.attribute]
        calls = [(part.owner, part.attribute) for part in parts]
        followers = [(follower.owner, follower.attribute) for part in parts for follower in part.followers]
        return [*super()._replaced(), *calls, *followers]

    def _install(self, part: DecoderPart, region: Region) -> None:
        followers = [_FollowerCall(getattr(f.owner, f.attribute), f.answer) for f in part.followers]
        eager = getattr(part.owner, part.attribute)
        self._put(part.owner, part.attribute, _PartCall(self, region, eager, part.answer, followers))
        for place, follower in zip(part.followers, followers, strict=True):
            self._put(place.owner, place.attribute, follower)
        self._followers += followers

    def _put(self, owner: nn.Module, attribute: str, call: Callable[..., Any]) -> None:
        self._installed.append(InstanceMethod(owner, attribute, call))

    def reset(self) -> None:
        """See `GraphedModule`."""
        for method in reversed(self._installed):
            method.restore()
        self._installed, self._followers = [], []
        super().reset()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's forward: a replay where possible, eager otherwise.

        Raises:
            PackedBatchError: The offsets of the pack do not fit each other or its tokens.
        """
        self._before_eager()
        batch = self._batch(args, kwargs)
        if not isinstance(batch, PackedBatch):
            self._count_unsuited(batch)
            return self._eager_forward(*args, **kwargs)
        if not self._may_replay(batch):
            return self._eager_forward(*args, **kwargs)
        if not self._installed:
            outputs = self._regions[0].run(batch)
            return self._eager_forward(*args, **kwargs) if outputs is None else outputs[0]
        slot = self._common_slot(batch)
        self._current = None if slot is None else Chosen(batch, slot)
        try:
            return self._eager_forward(*args, **kwargs)
        finally:
            self._current = None
            for follower in self._followers:
                follower.outputs = None

    def _batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedBatch | Fallback:
        call = self.family.read(args, kwargs)
        if not isinstance(call, DecoderCall):
            return call
        if want_gradients((call.angles,)):
            return Fallback.INPUT_GRADIENTS
        family = self.family
        batch = pack_batch(
            call.hidden, call.angles, call.offsets, call.max_seqlens, self.host.values, family.shards, family.ranks
        )
        if call.visual is None or self._installed:
            return batch
        mask, embeddings = call.visual
        return replace(batch, additions=tuple(spread(mask, rows) for rows in embeddings))

    def _count_unsuited(self, reason: Fallback) -> None:
        """Count a call that no graph can serve, if there are graphs."""
        if self.captured:
            self._note_eager()
            if not self._paused:
                self._fell_back(reason)

    def _may_replay(self, batch: PackedBatch) -> bool:
        """Whether a replay may be tried; a batch is observed before capture."""
        if self.captured:
            if self._paused:
                self._note_eager()
            return not self._paused
        if self.failure is not None:
            self._fell_back(Fallback.CAPTURE_FAILED, batch.tokens)
        else:
            self._observed.append(_observed(batch))
        return False

    def _common_slot(self, batch: PackedBatch) -> int | None:
        """Return a slot in which every part can replay the batch; without one, count the first part's reason."""
        free = (index for index in range(self.slots) if all(region.is_free(index) for region in self._regions))
        slot = next(free, 0)
        reasons = [region.why_not(batch, slot) for region in self._regions]  # each gets to know what it was asked for
        reason = next((r for r in reasons if r is not None), None)
        if reason is None:
            return slot
        self._note_eager()
        self._fell_back(reason, batch.tokens)
        return None

    @property
    def replaced(self) -> tuple[tuple[nn.Module, str], ...]:
        """Modules and the attributes of theirs that replay once graphs are captured."""
        return tuple((m.module, m.name) for m in self._installed) or ((self.model, "forward"),)

    def run_part(self, region: Region, hidden: Tensor) -> tuple[Tensor, ...] | None:
        """Replay a part of a layer, while the decoder is called with a batch that all parts can replay.

        Args:
            region: The part's.
            hidden: `[tokens of this rank, 1, width]` that the part is called with.

        Returns:
            Its outputs; None where it runs eager.
        """
        if self._current is None:
            return None
        chosen = self._current
        outputs = region.run(replace(chosen.batch, hidden=hidden), index=chosen.slot)
        if outputs is not None and not chosen.batch.loaded:
            self._current = Chosen(replace(chosen.batch, loaded=True), chosen.slot)
        return outputs

    def _warmup_microbatches(self) -> int:
        """See `GraphedModule`."""
        return len(self._observed)

    def _notes(self) -> dict[str, str]:
        """See `GraphedModule`."""
        notes = {} if self.plan is None else {"plan": str(self.plan)}
        if self._observed:
            most = max(seen.documents for seen in self._observed)
            notes["documents"] = f"up to {most} in the packs of warm-up steps"
        if self.host.device_reads:
            notes["offset reads"] = f"{self.host.device_reads} cu_seqlens were read from the device"
        return notes


def _observed(batch: PackedBatch) -> Observed:
    width, dtype, additions = batch.hidden.shape[-1], batch.hidden.dtype, len(batch.additions)
    return Observed(batch.tokens, batch.documents, batch.layout, batch.rotated, width, dtype, additions)


class _FollowerCall:
    """Stands in for an attribute whose next call a replayed piece has answered.

    Attributes:
        outputs: Of the replay, until the call; None where nothing was replayed.
    """

    def __init__(self, eager: Callable[..., Any], answer: Answer) -> None:
        self._eager, self._answer = eager, answer
        self.outputs: tuple[Tensor, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs, self.outputs = self.outputs, None
        return self._eager(*args, **kwargs) if outputs is None else self._answer(outputs)


class _PartCall:
    """Stands in for the attribute of a layer that calls one of its parts."""

    def __init__(
        self,
        graphs: PackedGraphs,
        region: Region,
        eager: Callable[..., Any],
        answer: Answer,
        followers: Sequence[_FollowerCall],
    ) -> None:
        self._graphs, self._region, self._eager, self._answer = graphs, region, eager, answer
        self._followers = followers

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = self._graphs.run_part(self._region, hidden_states)
        if outputs is None:
            return self._eager(hidden_states, *args, **kwargs)
        for follower in self._followers:
            follower.outputs = outputs
        return self._answer(outputs)
