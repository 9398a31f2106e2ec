"""A decoder over packed documents as the graph manager sees it: calls as packs, what is recorded, results, notes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ...announce import announce
from ...graphs.errors import CaptureError
from ...graphs.fallback import Fallback
from ...graphs.host_copies import HostCopies
from ...graphs.piece import Piece
from ...graphs.planning.buckets import EXACT_BELOW, Bucket, names_of, next_run
from ...graphs.planning.demand import BEGIN_WITH, WINDOW, Demand
from ...graphs.rank_consensus import digest
from ...graphs.region import Region
from ...graphs.replays.replay import want_gradients
from ...graphs.replays.slot import SharedInputs
from ...graphs.workload import Call, Workload
from ...offload.offloading import offloading_of
from ...options import PACKED_FIELDS, PackedOptions
from .batch import OFFSETS, PADDED_OFFSETS, JointShape, PackedBatch, PackShape, pack_batch, spread
from .plan import PackPlan
from .program import SHARED, DecoderCall, DecoderFamily, DecoderPart, PackedProgram, PackLayout

EVERY_OFFSET = (*OFFSETS, *PADDED_OFFSETS)
# Of a shape, behind whether there is one.
NUMBERS = 7


class ShapeExchange:
    """Gathers the shapes of all ranks of a process group; every rank calls it equally often.

    Args:
        group: A group of a CPU backend.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def joint(self, shape: PackShape | None, state: float) -> JointShape | None:
        """Return the shapes of all ranks, in an order that is the same on all, or None where one of them runs eager.

        Waits until every rank has come to the same microbatch.

        Args:
            shape: Of this rank's pack; None where it must run eager.
            state: Stands for what else decides how a microbatch runs. Ranks in different states run eager.
        """
        own = torch.tensor([int(state), shape is not None, *_numbers(shape)], dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        distributed.all_gather(found, own, group=self._group)
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
        exchange: Ranks that have other packs and must replay them in the same bucket; None without any.

    Attributes:
        plan: Observes packs and plans buckets.
        buckets: Tokens of the buckets there are; None before.

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
        options: PackedOptions,
        modules: Sequence[str],
        family: DecoderFamily,
        host: HostCopies | None = None,
        exchange: ShapeExchange | None = None,
    ) -> None:
        self.options, self.modules, self.family = options, tuple(modules), family
        self.strict = options.strict
        self.host, self._exchange = host or HostCopies(), exchange
        self.plan = PackPlan(options, family)
        self.buckets: tuple[int, ...] | None = None
        self._demand: Demand | None = None
        self._parts = 0

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """See `Workload`.

        Raises:
            PackedBatchError: The offsets of the pack do not fit each other or its tokens.
        """
        call = self._read(args, kwargs)
        return call if self._exchange is None else self._together(call, self._exchange)

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        call = self.family.read(args, kwargs)
        if not isinstance(call, DecoderCall):
            return Call(None, call, counts=False)
        if want_gradients((call.angles,)):
            return Call(None, Fallback.INPUT_GRADIENTS, counts=False)
        batch = self._batch(call)
        return Call(batch, None, batch.tokens, note=None if self._demand is None else batch.shape)

    def _together(self, call: Call, exchange: ShapeExchange) -> Call:
        """Return a call with what it needs to run as on all other ranks, which are at the same microbatch."""
        manager, batch = self.manager, call.batch
        wants = batch is not None and want_gradients((batch.hidden, *batch.additions))
        state = digest(manager.readiness, torch.is_grad_enabled(), wants)
        joint = exchange.joint(None if batch is None else batch.own_shape, state)
        if batch is None:
            return call
        if joint is None:
            return Call(None, Fallback.OTHER_RANK, call.tokens)
        return call._replace(batch=replace(batch, joint=joint), note=None if call.note is None else joint)

    def _batch(self, call: DecoderCall) -> PackedBatch:
        family = self.family
        batch = pack_batch(
            call.hidden, call.angles, call.offsets, call.max_seqlens, self.host.values, family.shards, family.ranks
        )
        if call.visual is None or self._parts:
            return batch
        mask, embeddings = call.visual
        return replace(batch, additions=tuple(spread(mask, rows) for rows in embeddings))

    def observe(self, call: Call) -> None:
        """See `Workload`."""
        if call.batch is not None:
            self.plan.observe(call.batch)

    def capture(self) -> None:
        """See `Workload`. What can fail on one rank alone is inside an agreement."""
        consensus = self.manager.consensus
        if not consensus.agree(self._digest).same:
            raise CaptureError("tensor- or context-parallel ranks planned different buckets: they saw different packs")
        self._connect()
        consensus.agree(self._record)

    def _connect(self) -> None:
        """Let ranks of expert parallelism make the connections that recordings exchange over, all at once."""
        exchange, made = self.family.exchange, list[Callable[[], None]]()
        if exchange is None:
            return

        def take_memory() -> float:
            _, _, width, dtype = self.plan.kind()
            largest = max(self.buckets or (1,))
            tokens = largest // (self.family.shards * self.family.ranks)
            made.append(exchange.rehearsal(tokens, width, dtype, self.manager.executor.device))
            return 0.0

        self.manager.consensus.agree(take_memory)
        made.pop()()

    def _digest(self) -> float:
        """Plan; returns a number that stands for the buckets, their order and the slots."""
        kind, self.buckets = self.plan.kind(), self.options.named_buckets
        if self.options.on_demand:
            self._demand = self._begin()
            self._note_buckets(self._demand)
        return digest(self.manager.slots, kind, *map(str, self._planned()))

    def _planned(self) -> Sequence[Bucket]:
        """Return the buckets to capture now."""
        return self.plan.buckets() if self._demand is None else self._demand.buckets

    def _begin(self) -> Demand:
        """Return what packs have asked for, with the buckets to begin with."""
        demand = Demand(self.plan.menu(self._program(self.family.parts(self.modules)[0])))
        for seen in self.plan.observed[-WINDOW:]:
            demand.saw(seen.shape)
        demand.begin(BEGIN_WITH)
        return demand

    def _note_buckets(self, demand: Demand) -> None:
        self.buckets = demand.capacities

    def grown(self) -> None:
        """See `Workload`."""
        if self._demand is not None:
            self._note_buckets(self._demand)

    def _record(self) -> float:
        demand, buckets = self._demand, self._planned()
        shared = SharedInputs(SHARED, self.manager.executor.device)
        parts = self.family.parts(self.modules)
        offloading = offloading_of(self.options, PACKED_FIELDS, self.manager)
        regions = self.manager.record(
            [
                Piece(
                    program=self._program(part),
                    buckets=buckets,
                    site=part.site,
                    shared=None if part.site is None else shared,
                    around=self.family.statistics_kept,
                    growth=demand,
                )
                for part in parts
            ],
            demand,
            offloading=offloading,
        )
        self._parts = sum(part.site is not None for part in parts)
        regions[0].statistics.static_bytes += shared.nbytes
        return 0.0

    def _program(self, part: DecoderPart) -> PackedProgram:
        family = self.family
        layout = PackLayout(
            *self.plan.kind(),
            per_position=family.per_position,
            absolute=family.absolute,
            shards=family.shards,
            ranks=family.ranks,
            rank=family.rank,
            additions=self.plan.additions() if part.site is None else 0,
        )
        return PackedProgram(part, layout, EXACT_BELOW, partial(self._kernels, part))

    @contextmanager
    def _kernels(self, part: DecoderPart, modules: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.family.kernels(modules))
            if self.options.gradient_accumulation_fusion:
                stack.enter_context(self.family.fused_accumulation(modules))
            if self.options.moves_activations:
                stack.enter_context(self.family.known_activations((part.owner,)))
            yield

    def captured(self) -> None:
        """See `Workload`."""
        self.manager.consensus.agree(self._tell)

    def _tell(self) -> float:
        parts = f" in {self._parts} parts of layers" if self._parts > 1 else ""
        found, documents = names_of(self.buckets or ()), self.plan.documents
        announce(f"{self.title}{parts}: {found}; {self.manager.slots} slot(s), up to {documents} documents")
        return 0.0

    def forget(self) -> None:
        """See `Workload`."""
        self._parts, self._demand = 0, None

    def replay(self, region: Region, batch: PackedBatch) -> tuple[Tensor, ...] | None:
        """See `Workload`."""
        scales = self.family.scales()
        outputs = region.run(batch, scales)
        if scales is not None and outputs is not None:
            scales.after_forward()
        return outputs

    def returned(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """See `Workload`: the hidden states."""
        return outputs[0]

    def warmup_microbatches(self) -> int:
        """See `Workload`."""
        return len(self.plan.observed)

    def notes(self) -> dict[str, str]:
        """See `Workload`."""
        notes = {} if self.buckets is None else {"plan": names_of(self.buckets)}
        if self._demand is not None and self.buckets:
            notes["next run"] = next_run(self.buckets, PACKED_FIELDS["buckets"])
        if self.plan.observed:
            most = max(seen.documents for seen in self.plan.observed)
            notes["documents"] = f"up to {most} in the packs of warm-up steps"
        if self.host.device_reads:
            notes["offset reads"] = f"{self.host.device_reads} cu_seqlens were read from the device"
        return notes
