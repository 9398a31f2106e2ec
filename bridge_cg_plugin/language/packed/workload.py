"""A decoder as the graph manager sees it: calls as packs or padded rows, what is recorded, results, notes."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ...announce import announce
from ...attention_bounds import deterministic, pack_buckets, replay_cost
from ...graphs.buckets import BEGIN_WITH, EXACT_BELOW, WINDOW, Bucket, Demand, names_of, next_run, raised
from ...graphs.errors import CaptureError, Overflow
from ...graphs.fallback import Fallback
from ...graphs.host_copies import HostCopies
from ...graphs.manager import GraphManager
from ...graphs.program import FAR, NEAR, Call, Eager, Piece, Workload, digest
from ...graphs.proofs.eager_pass import Held
from ...graphs.region import Region
from ...graphs.replays.replay import want_gradients
from ...graphs.replays.slot import SharedInputs
from ...offload.offloading import offloading_of
from ...options import PACKED_FIELDS, OptionError, PackedOptions
from .batch import (
    MOST_SHAPES,
    OFFSETS,
    PADDED_OFFSETS,
    JointShape,
    PackedBatch,
    PackShape,
    real_rows,
)
from .program import SHARED, DecoderPart, PackedProgram, PackLayout


def most_documents(shapes: Iterable[PackShape | JointShape]) -> int:
    """Return the documents of the pack that has most, of the rank that has most; 0 without packs."""
    return max((len(each.lengths) for shape in shapes for each in shape.each), default=0)


EVERY_OFFSET = (*OFFSETS, *PADDED_OFFSETS)
# Of a shape, behind whether there is one.
NUMBERS = 7


def joint_shape(group: distributed.ProcessGroup, shape: PackShape | None, state: float) -> JointShape | None:
    """Return the shapes of all ranks, in an order that is the same on all, or None where one of them runs eager.

    Waits until every rank has come to the same microbatch; all call it equally often.

    Args:
        group: A group of a CPU backend.
        shape: Of this rank's pack; None where it must run eager.
        state: Stands for what else decides how a microbatch runs. Ranks in different states run eager.
    """
    own = torch.tensor([int(state), shape is not None, *_numbers(shape)], dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(found, own, group=group)
    rows = [numbers.tolist() for numbers in found]
    if any(row[0] != rows[0][0] or not row[1] for row in rows):
        return None
    return JointShape(tuple(_shape(row[2:]) for row in rows))


def _numbers(shape: PackShape | None) -> Sequence[int]:
    """Return what `_shape` makes a shape of that the same buckets take."""
    if shape is None:
        return (0,) * NUMBERS
    layout = sum(1 << EVERY_OFFSET.index(name) for name in shape.layout)
    lengths = len(shape.lengths), max(shape.lengths), sum(shape.lengths)
    return shape.tokens, *lengths, layout, shape.rotated, len(shape.additions)


def _shape(numbers: Sequence[int]) -> PackShape:
    tokens, documents, longest, total, layout, rotated, additions = numbers
    names = tuple(name for place, name in enumerate(EVERY_OFFSET) if layout >> place & 1)
    return PackShape(tokens, (longest, *_spread(total - longest, documents - 1)), names, rotated, (None,) * additions)


def _spread(total: int, count: int) -> Sequence[int]:
    """Return as many numbers with this sum, as equal as they can be: none is above the largest that they stand for."""
    return [total // count + (place < total % count) for place in range(count)]


class PackedWorkload(Workload):
    """See `Workload`: all layers as one region, or parts of them.

    With several parts one choice is made for all of them when the decoder is called, so a microbatch replays everywhere
    or nowhere.

    Args:
        options: What the user asked for.
        modules: Names of the parts of layers to record; none are all layers as one region.
        family: The decoder's upstream side.
        host: Host copies of offsets.
        peers: Ranks that have other packs and must replay them in the same bucket; None without any.
        additions: Behind how many layers something is added, seen in warm-up steps or not.

    Attributes:
        shapes: Of the microbatches that were seen.

    Raises:
        OptionError: A bucket that the options name cannot be shared by the ranks.
    """

    manager: GraphManager
    title = "packed-sequence CUDA graphs"
    noun = "decoder"
    group = "packed_cuda_graph"
    out_of_memory_remedy = (
        "Lower the tokens of a pack, cuda_graph_packed_slots or cuda_graph_max_packed_seqs, or give "
        "cuda_graph_packed_buckets a smaller largest bucket."
    )

    def __init__(
        self,
        options: PackedOptions,
        modules: Sequence[str],
        family: Any,
        host: HostCopies,
        peers: distributed.ProcessGroup | None,
        additions: int,
    ) -> None:
        self.options, self.modules, self.family = options, tuple(modules), family
        self.strict = options.strict
        self.host, self._peers = host, peers
        self.shapes: list[PackShape | JointShape] = []
        self._layouts: Counter[PackLayout] = Counter()
        self._additions = additions
        self._adds = not family.parts(self.modules)[0].calls  # parts of layers leave that to eager
        self._parts = 0
        self._check_buckets()
        if not options.enabled:
            self.title, self.group = "language-model CUDA graphs", "language_model_cuda_graph"
            self.out_of_memory_remedy = "Lower the sequence length or the microbatch size."

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """See `Workload`.

        Raises:
            PackedBatchError: The offsets of the pack do not fit each other or its tokens.
        """
        batch = self.family.read(args, kwargs, self.host.values, self._adds and not self._parts)
        if isinstance(batch, PackedBatch):
            call = Call(batch, None, batch.tokens, note=batch.shape)
        else:
            call = Call(None, batch, counts=False)
        return call if self._peers is None else self._together(call, self._peers)

    def _together(self, call: Call, peers: distributed.ProcessGroup) -> Call:
        """Return a call with what it needs to run as on all other ranks, which are at the same microbatch."""
        manager, batch = self.manager, call.batch
        wants = batch is not None and want_gradients((batch.hidden, *batch.additions))
        state = digest(manager.readiness, torch.is_grad_enabled(), wants)
        joint = joint_shape(peers, None if batch is None else batch.own_shape, state)
        if batch is None:
            return call
        if joint is None:
            return Call(None, Fallback.OTHER_RANK, call.tokens)
        return call._replace(batch=replace(batch, joint=joint), note=None if call.note is None else joint)

    def observe(self, call: Call) -> None:
        """See `Workload`."""
        if (batch := call.batch) is not None:
            self.observed += 1
            self.shapes.append(batch.shape)
            first = batch.shape.each[0]
            self._layouts[PackLayout(first.layout, first.rotated, batch.hidden.shape[-1], batch.hidden.dtype)] += 1

    def _buckets_of(self, capacity: int, shapes: Iterable[PackShape | JointShape] = ()) -> list[Bucket]:
        """Return the useful buckets of a capacity, cheapest first; of padded rows, those of shapes that were seen."""
        if not self.options.enabled:
            return list({each.rows for shape in shapes for each in shape.each if each.rows.tokens == capacity})
        chosen = self.options.max_packed_seqs == "auto"
        documents = raised(self.documents, most_documents(shapes)) if chosen else self.documents
        return pack_buckets([capacity], documents)

    @property
    def documents(self) -> int:
        """Most documents of a pack."""
        wanted = self.options.max_packed_seqs
        if wanted != "auto":
            return wanted or 1
        most = most_documents(self.shapes) if self.shapes else 1
        return most + most // 2 + 1

    def _begin(self) -> Demand:
        """Return what packs have asked for, with the buckets to begin with."""
        exact = self.family.shards > 1 or not self.options.enabled
        demand = Demand(
            self._buckets_of,
            self._program(self.family.parts(self.modules)[0]).refuse,
            replay_cost,
            unit=self._unit,
            exact_below=math.inf if exact else EXACT_BELOW * self.family.ranks,
            named=self.options.named_buckets,
            weights=self.family.weights_per_token(),
            most=math.inf if self.options.enabled else MOST_SHAPES,
        )
        for shape in self.shapes[-WINDOW:]:
            demand.saw(shape)
        demand.begin(BEGIN_WITH)
        return demand

    def layout(self) -> PackLayout:
        """Return what the microbatches that were seen most often share.

        Raises:
            ValueError: None was observed.
        """
        if not self._layouts:
            what = "packed microbatch" if self.options.enabled else "microbatch of padded rows"
            raise ValueError(f"no {what} was seen in the warm-up steps, so nothing says how they look")
        return self._layouts.most_common(1)[0][0]

    def additions(self) -> int:
        """Return behind how many layers something is added at most."""
        return max(self._additions, *(len(each.additions) for shape in self.shapes for each in shape.each))

    @property
    def _unit(self) -> int:
        """What a bucket's tokens are a multiple of, so that every rank has as many, and as its kernels take."""
        shards, ranks, rows = self.family.shards, self.family.ranks, self.family.rows
        return math.lcm(shards * ranks * rows, 2 * ranks if ranks > 1 else 1)

    def _check_buckets(self) -> None:
        if wrong := [tokens for tokens in self.options.named_buckets if tokens % self._unit]:
            why = "which ranks share in equal parts" if self.family.rows == 1 else "as fp8 needs on every rank"
            allowed = f"a multiple of {self._unit}, {why}"
            raise OptionError(PACKED_FIELDS["buckets"], wrong[0], allowed, "Round the size up.")

    def capture(self) -> None:
        """See `Workload`. What can fail on one rank alone is inside an agreement."""
        consensus = self.manager.consensus
        if not consensus.agree(self._digest).same:
            raise CaptureError("tensor- or context-parallel ranks planned different buckets: they saw different packs")
        if self.family.exchange is not None:
            self.family.exchange.fit()
        self._connect()
        consensus.agree(self._record)

    def _connect(self) -> None:
        """Let ranks of expert parallelism make the connections that recordings exchange over, all at once."""
        exchange, made = self.family.exchange, list[Callable[[], None]]()
        if exchange is None:
            return

        def take_memory() -> None:
            _, _, width, dtype = self.layout()
            largest = max(self.buckets or (1,))
            tokens = largest // (self.family.shards * self.family.ranks)
            made.append(exchange.rehearsal(tokens, width, dtype, self.manager.executor.device))

        self.manager.consensus.agree(take_memory)
        made.pop()()

    def _digest(self) -> float:
        """Plan; returns a number that stands for the buckets, their order and the slots."""
        layout, self.named = self.layout(), self.options.named_buckets
        if self.options.on_demand and not self.outgrown:
            self.demand = self._begin()
        self.outgrown = False
        needs = getattr(self.family.exchange, "needs", None)
        passes = 0 if needs is None else len(needs)
        return digest(self.manager.slots, layout, passes, *map(str, self._planned()))

    def _planned(self) -> Sequence[Bucket]:
        """Return the buckets to capture now: of the capacities that the options name, or on demand."""
        if self.demand is not None:
            return self.demand.buckets
        return [bucket for capacity in self.options.named_buckets for bucket in self._buckets_of(capacity)]

    def _record(self) -> None:
        demand, buckets = self.demand, self._planned()
        family, parts = self.family, self.family.parts(self.modules)
        runs_later = family.runs_later if parts[0].calls else None
        names = SHARED if runs_later is None else (*SHARED, "hidden")  # each part has all memory in its turn
        shared = SharedInputs(names, self.manager.executor.device)
        offloading = offloading_of(self.options, PACKED_FIELDS, self.manager)
        exact = deterministic() and self.manager.executor.device.type == "cuda"
        regions = self.manager.record(
            [
                Piece(
                    program=self._program(part),
                    buckets=buckets,
                    calls=part.calls,
                    shared=shared if part.calls else None,
                    around=family.statistics_kept,
                    growth=demand,
                    tolerance=FAR if part.counted or part.routes else NEAR,
                    exact=not (part.counted or part.routes) and exact,
                    real_rows=partial(real_rows, ranks=family.ranks, rank=family.rank, shards=family.shards),
                    standing_in=partial(family.standing_in, part),
                    counts=family.statistics,
                    # Eager would move scales and quantize weights, which nothing puts back.
                    incomparable="" if part.changed is None else "it computes in fp8",
                )
                for part in parts
            ],
            demand,
            offloading=offloading,
            runs_later=runs_later,
        )
        self._parts = sum(bool(part.calls) for part in parts)
        regions[0].statistics.static_bytes += shared.nbytes

    def _program(self, part: DecoderPart) -> PackedProgram:
        additions = 0 if part.calls else self.additions()
        kernels = partial(self._kernels, part)
        return PackedProgram(part, self.layout(), self.family, additions, EXACT_BELOW, kernels)

    @contextmanager
    def _kernels(self, part: DecoderPart, modules: Sequence[nn.Module]) -> Iterator[None]:
        if part.calls and self.family.runs_later:
            self.family.refuse_draws(modules)
        with ExitStack() as stack:
            stack.enter_context(self.family.kernels(modules))
            if self.options.gradient_accumulation_fusion:
                stack.enter_context(self.family.fused_accumulation(modules))
            if self.options.moves_activations:
                stack.enter_context(self.family.known_activations((part.owner,)))
            yield

    def captured(self) -> None:
        """See `Workload`."""
        if not self.options.enabled:
            shapes = ", ".join("{} x {}".format(*bucket.limits) for bucket in self._planned())
            what = "attention and routers of all layers" if self._parts else "all layers"
            announce(f"{self.title}: {what}, sequences x tokens {shapes}; {self.manager.slots} slot(s){self._room}")
            return
        parts = f" in {self._parts} parts of layers" if self._parts > 1 else ""
        found, documents = names_of(self.buckets or ()), self.documents
        slots = f"{self.manager.slots} slot(s), up to {documents} documents{self._room}"
        announce(f"{self.title}{parts}: {found}; {slots}")

    @property
    def _room(self) -> str:
        if self._bounds is None:
            return ""
        sent, computed = self._bounds
        return f"; a rank's experts have room for {sent:.0%} of each rank's tokens, {computed:.2f} rows a token"

    def forget(self) -> None:
        """See `Workload`."""
        self._parts = 0

    def replay(self, region: Region, batch: PackedBatch) -> tuple[Tensor, ...] | None:
        """See `Workload`."""
        scales = self.family.scales()
        outputs = region.run(batch, scales) if self._bounds is None else self._bounded(region, batch, scales)
        if scales is not None and outputs is not None:
            scales.after_forward()
        return outputs

    @property
    def _bounds(self) -> tuple[float, float] | None:
        return None if self.family.exchange is None else self.family.exchange.bounds

    def _bounded(self, region: Region, batch: PackedBatch, scales: Any) -> tuple[Tensor, ...] | None:
        """Replay, and leave nothing of it where the batch had too little room on some rank; all find the same."""
        before = Held(self.manager.executor.generators(), self.family.statistics())
        try:
            return region.run(batch, scales)
        except Overflow:
            before.put_back()
        self.outgrown = True
        region.fell_back(Fallback.EXPERTS_OVERFLOW, batch)
        return None

    def run_eager(self, call: Call, eager: Eager) -> Any:
        """See `Workload`."""
        with self.manager.passing(), self.family.needs_noted():
            return eager()

    def notes(self) -> dict[str, str]:
        """See `Workload`."""
        notes = {} if self.buckets is None else {"plan": names_of(self.buckets)}
        if not self.options.enabled:
            return notes
        if self.demand is not None and self.buckets:
            notes["next run"] = next_run(self.buckets, PACKED_FIELDS["buckets"])
        if self.shapes:
            notes["documents"] = f"up to {most_documents(self.shapes)} in the packs of warm-up steps"
        if self.host.device_reads:
            notes["offset reads"] = f"{self.host.device_reads} cu_seqlens were read from the device"
        return notes
