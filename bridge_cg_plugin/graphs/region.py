"""A region: a piece of a model that runs as a graph whenever it can, and reports why when it cannot."""

import time
from collections.abc import Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..announce import warn
from .changes.model_watch import ModelWatch
from .changes.source import Source
from .changes.sources import Sources
from .errors import CaptureError, named, reason_of
from .fallback import Fallback
from .piece import Piece, Surroundings
from .planning.buckets import Bucket, choose
from .rank_consensus import SingleRank
from .recordings.chain import Chain
from .recordings.executor import Executor
from .recordings.recorder import Recordings, Wish
from .recordings.recording import TRAINING, Mode
from .replays.replay import BackwardObserver, Replay
from .replays.slot import Slot
from .reports.statistics import BucketStatistics, Progress, RegionStatistics
from .seen_operations import in_checkpoint, is_one_graph, operations_are_seen

LEAST = Bucket(1)


class Region:
    """Captures a program for several buckets and replays the first that accepts a batch.

    A recording is replayed only while what it was made from holds (`Sources`). A model that changed runs eager; a state
    that lasts, or memory that was moved, gets recordings when the next batch asks for them.

    Args:
        piece: What is recorded. A batch takes the first bucket that accepts it, so cheaper ones come first. A piece
            that grows gets buckets from `add`; what training steps miss are its `wishes`.
        executor: Makes the recordings.
        surroundings: What is around the model in this run.
        watch: Follows the model that the program is a piece of; None follows the program's modules alone.
        strict: Whether a recording that fails raises once graphs exist.
        chain: What it is recorded with, and where activations are; None records it alone.

    Raises:
        ValueError: No bucket of a piece that does not grow, a bucket or `slots` below 1.
    """

    def __init__(
        self,
        piece: Piece,
        executor: Executor,
        surroundings: Surroundings | None = None,
        watch: ModelWatch | None = None,
        strict: bool = False,
        chain: Chain | None = None,
    ) -> None:
        self._around = surroundings or Surroundings()
        if min(piece.buckets, default=LEAST).tokens < 1 or not (piece.buckets or piece.growth):
            raise ValueError(f"a region needs buckets of at least 1 token, got {[str(b) for b in piece.buckets]}")
        if self._around.slots < 1:
            raise ValueError(f"slots must be at least 1, got {self._around.slots}")
        self.program, self._piece, self._growth = piece.program, piece, piece.growth
        self.executor, self.chain = executor, chain or Chain(executor)
        self.buckets = self._ordered(piece.buckets)
        self.slot_count = self._around.slots
        self.statistics = RegionStatistics()
        self._consensus, self._strict = self._around.consensus, strict
        self._watch, self._given_watch = watch, watch
        self._sources: Sources | None = None
        self._recordings: Recordings | None = None
        self._slots: list[Slot] = []
        self._warned: set[str] = set()

    @property
    def captured(self) -> bool:
        """Whether recordings exist."""
        return bool(self._slots)

    @property
    def sources(self) -> Sources:
        """What recordings were made from.

        Raises:
            RuntimeError: Nothing is captured.
        """
        if self._sources is None:
            raise RuntimeError(f"{self.program.name} is not captured")
        return self._sources

    @property
    def recordings(self) -> Recordings:
        """The slots and recordings.

        Raises:
            RuntimeError: Nothing is captured.
        """
        if self._recordings is None:
            raise RuntimeError(f"{self.program.name} is not captured")
        return self._recordings

    @property
    def readiness(self) -> tuple[int, list[int]]:
        """Which recorded state the model is in, 0 for none, and the slots that microbatches hold."""
        state = 0 if self._sources is None else self._sources.recorded_state(torch.is_grad_enabled())
        return state, [slot.index for slot in self._slots if not slot.free]

    def capture(self, progress: Progress | None = None) -> None:
        """Record every bucket in every slot, largest first; of a piece that grows in the first, as training asks for.

        What a part of a chain records with a backward, its chain records behind the last part's capture.

        Args:
            progress: Counts the recordings, of other regions too; None counts this region's.

        Raises:
            CaptureError: Recording failed; nothing of it is kept and the process can go on.
        """
        started = time.perf_counter()
        progress = progress or Progress(self.program.name, 1)
        self.reset()
        self.statistics.buckets = {bucket: BucketStatistics() for bucket in self.buckets}
        executor, chain = self.executor, self.chain
        try:
            watch = self._watch = self._given_watch or ModelWatch(self.program.modules())
            returning = executor.returning_tensors()
            sources = self._sources = Sources(self.program, watch, executor.device, self._around.reduction, returning)
            made = self._recordings = Recordings(
                chain,
                self._around,
                self._strict,
                piece=self._piece,
                executor=executor,
                watch=watch,
                sources=sources,
                statistics=self.statistics,
                source=partial(self._source, sources, gradients=True, asks=False),
            )
            made.planned = [self._planned(index) for index in range(self.slot_count)]
            progress.starts(sum(map(len, made.planned)), self.buckets, self.slot_count)
            made.add_slots(self.slot_count, self.buckets)
            if not chain.in_parts:
                chain.capture(progress.recorded)
        except BaseException:
            self.reset()
            raise
        self._slots = made.slots
        chain.count(made)
        self.statistics.capture_seconds += time.perf_counter() - started

    def _planned(self, index: int) -> list[tuple[Bucket, Mode]]:
        """Return what a capture records in a slot, largest first."""
        ordered = sorted(self.buckets, reverse=True)
        if self._growth is not None:
            # Passes of a model that is not trained say by themselves what they need.
            now = index == 0 and self.sources.training is not False and not self.sources.current.gradients_left()
            return [(bucket, self._training_mode(bucket)) for bucket in ordered] if now else []
        return [(bucket, mode) for bucket in ordered for mode in self._planned_modes(index == 0, bucket)]

    def _planned_modes(self, first_slot: bool, bucket: Bucket) -> list[Mode]:
        """Return what to record for a bucket: what training runs, without gradients, too, where it trains nothing."""
        source, mode = self.sources.current, self._training_mode(bucket)
        modes = [mode] if mode.gradients and not source.gradients_left() else []
        if first_slot and not source.sinks.parameters and bucket in self._forward_only_buckets():
            modes.append(Mode(gradients=False, training=mode.training))
        return modes

    def _training_mode(self, bucket: Bucket) -> Mode:
        """Return the mode of a training step's microbatches."""
        differentiable = any(spec.differentiable for spec in self.program.input_specs(bucket).values())
        return Mode(bool(self.sources.current.sinks.parameters) or differentiable, self.sources.training)

    def _ordered(self, buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
        found, growth = tuple(dict.fromkeys(buckets)), self._growth
        return found if growth is None else tuple(sorted(found, key=lambda bucket: (growth.cost(bucket), bucket)))

    def _forward_only_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that no other of the same capacity contains: limits cost a forward little."""
        return tuple(b for b in self.buckets if not any(o.contains(b) for o in self.buckets if o != b))

    def add(self, bucket: Bucket, record: bool) -> None:
        """Let batches use one more bucket of a piece that grows.

        Args:
            bucket: The bucket.
            record: Whether to record it now, as training steps ask for it; else it is recorded when it is asked for.

        Raises:
            CaptureError: It could not be recorded; `drop` it then.
        """
        self.statistics.buckets.setdefault(bucket, BucketStatistics())
        self.recordings.add_inputs(bucket)
        source = self._source(self.sources, gradients=True) if record else None
        if isinstance(source, Source):
            self.recordings.add(source, 0, bucket, self._training_mode(bucket))
        self.buckets = self._ordered((*self.buckets, bucket))

    def drop(self, bucket: Bucket) -> None:
        """Forget a bucket: it could not be recorded, or its memory is wanted for others."""
        self.buckets = tuple(each for each in self.buckets if each != bucket)
        self.recordings.drop(bucket)

    def slot_bytes(self) -> float:
        """Return the device memory of the slot that takes most, in bytes, with its share of gradients."""
        return max(map(self.chain.slot_bytes, range(self.slot_count)))

    @property
    def shrinks(self) -> bool:
        """Whether a dropped bucket gives its memory back."""
        return all(slot.common.shrinks for slot in self._slots)

    @property
    def wishes(self) -> list[Wish]:
        """What training steps missed and can be recorded now, oldest first."""
        if not self.recordings.wishes:
            return []
        source = self._source(self.sources, gradients=True)
        number = source.number if isinstance(source, Source) else None
        return [wish for wish, asked in self.recordings.wishes.items() if asked == number]

    def reset(self) -> None:
        """Drop all recordings and their memory."""
        if self._recordings is not None:
            self._recordings.leave()
        if self._sources is not None:
            self._sources.release()
        if self._watch is not None and self._given_watch is None:
            self._watch.close()
            self._watch = None
        self._slots, self._sources, self._recordings = [], None, None

    def run(self, batch: Any, observer: BackwardObserver | None = None) -> tuple[Tensor, ...] | None:
        """Replay the batch; returns its real outputs, or None with the reason counted: then run it eager.

        Args:
            batch: The microbatch.
            observer: Watches its backward.

        Raises:
            CaptureError: A recording that the batch asked for failed, and the region is strict.
        """
        decision = self.decide(batch)
        if isinstance(decision, Fallback):
            self.fell_back(decision, batch)
            return None
        if self._around.before_replay is not None:
            self._around.before_replay()
        return decision.run(batch, observer)

    def fell_back(self, reason: Fallback, batch: Any) -> None:
        """Count a batch that runs eager."""
        self.statistics.fell_back(self.program.name, reason, self.program.size(batch))

    def choose(self, batch: Any, mode: Mode = TRAINING) -> Bucket | Fallback:
        """Return the first bucket that accepts the batch, or the reason why none does."""
        buckets = self.buckets if mode.gradients else self._forward_only_buckets()
        found = choose(self.program.size(batch), buckets, partial(self.program.refuse, batch))
        return found if isinstance(found, Bucket) or self._growth is None else self._growth.missed(batch)

    def decide(self, batch: Any, index: int | None = None, records: bool = True) -> Replay | Fallback:
        """Return how a batch is replayed, or why it cannot be; nothing is counted.

        Args:
            batch: The microbatch.
            index: The slot that it must use; None is the first free one.
            records: Whether a missing recording is made.

        Raises:
            CaptureError: A recording that the batch asked for failed, and the region is strict.
        """
        if self._recordings is None or self._sources is None or not self._slots:
            return Fallback.NOT_CAPTURED
        recordings, sources = self._recordings, self._sources
        sources.clear()
        gradients = torch.is_grad_enabled()
        source = self._source(sources, gradients, asks=records)
        if not isinstance(source, Source):
            return source
        mode = Mode(gradients and self._wants_gradients(source, batch), sources.training)
        if mode.gradients and in_checkpoint():
            return Fallback.IN_CHECKPOINT
        bucket = self.choose(batch, mode)
        if not isinstance(bucket, Bucket):
            return bucket
        found = recordings.find(source, bucket, mode, index, records)
        if isinstance(found, Fallback):
            larger = None
            if self._growth is not None and index is None:  # parts in one slot share a bucket
                larger = self._larger(source, batch, bucket, mode)
            if larger is None:
                return found
            bucket, found = larger
        slot, recorded = found
        if not slot.common.admits(recorded.turn):
            return Fallback.PARTS_IN_ANOTHER_ORDER
        return Replay(self.program, source, recorded, slot, bucket, mode.gradients, sources.holds, self.statistics)

    def still_holds(self, decided: Replay, batch: Any) -> bool:
        """Whether a batch of the decided shape, which comes a moment later, is replayed as was decided."""
        gradients, device = (
            torch.is_grad_enabled() and self._wants_gradients(decided.source, batch),
            self.executor.device,
        )
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return (
            decided.slot.free
            and decided.slot.common.admits(decided.recorded.turn)
            and gradients == decided.gradients
            and autocast == decided.source.numerics.autocast
            and not (gradients and in_checkpoint())
        )

    def _larger(self, source: Source, batch: Any, bucket: Bucket, mode: Mode) -> tuple[Bucket, Any] | None:
        """Return a bucket after this one that accepts the batch and has a recording in a free slot, with that."""
        size = self.program.size(batch)
        for other in self.buckets[self.buckets.index(bucket) + 1 :]:
            if size <= other.tokens and self.program.refuse(batch, other) is None:
                found = self.recordings.recorded(source, other, mode)
                if found is not None:
                    return other, found
        return None

    def _source(self, sources: Sources, gradients: bool, asks: bool = True) -> Source | Fallback:
        """Return the source that the model is now, or why there is none."""
        if operations_are_seen():
            return Fallback.OPERATIONS_SEEN
        try:
            source = sources.find(gradients, self.is_idle, asks)
        except Exception as error:
            # What the model is, all ranks find alike; what happens to this rank's memory, this one alone.
            if self._strict or not (self._is_single_rank() or isinstance(error, CaptureError)):
                raise CaptureError(f"{self.program.name}: {named(error)}") from error
            self._warn_once(f"{self.program.name} cannot be captured as it is now, it runs eager: {named(error)}")
            return reason_of(error)
        if source is Fallback.MEMORY_MOVED and not self._is_single_rank():
            raise CaptureError(
                f"{self.program.name}: memory of parameters or of their main_grad was moved while a microbatch is "
                "between its forward and its backward. Ranks that share these layers cannot know; move it between steps"
            )
        return source

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text)

    def _is_single_rank(self) -> bool:
        return isinstance(self._consensus, SingleRank)

    def _wants_gradients(self, source: Source, batch: Any) -> bool:
        return bool(source.sinks.parameters) or any(t.requires_grad for t in self.program.differentiable_inputs(batch))

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def is_in_one_graph(self) -> bool:
        """Whether torch.compile traces a graph now that has no place for a replay; counted."""
        found = is_one_graph()
        if found:
            self.statistics.fell_back(self.program.name, Fallback.ONE_GRAPH)
        return found

    def is_free(self, index: int) -> bool:
        """Whether no microbatch holds the slot with this number."""
        return self._slots[index].free

    def free_slots(self) -> int:
        """Return how many slots no microbatch holds."""
        return sum(slot.free for slot in self._slots)

    def is_idle(self) -> bool:
        """Whether no microbatch is between its forward and its backward."""
        return self.free_slots() == len(self._slots)

    def memory_kept(self) -> AbstractContextManager[None]:
        """Return what a training step runs in: memory stays where its first replay finds it, only that one looks."""
        return nullcontext() if self._sources is None else self._sources.memory_kept()

    def clear(self) -> None:
        """Let gradients of an eager pass reach `main_grad` after replays."""
        if self._sources is not None:
            self._sources.clear()

    def adds_later(self, parameters: Set[nn.Parameter]) -> bool:
        """Whether the backward under way will yet replay what adds to the gradient of one of these parameters."""
        return self._sources is not None and self._sources.adds_later(parameters)
