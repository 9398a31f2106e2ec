"""What is recorded together: a whole region alone; parts of a module in their order, in memory that they share.

What a part's forward no longer needs when it ends, such as activations that were copied to the host, is memory of the
next part. So all forwards of parts are recorded in their order, then all backwards behind.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from ..changes.source import Recorded, Source
from ..errors import reason_of
from ..memory.pools import Pool
from ..planning.buckets import Bucket
from ..replays.gradients import static_bytes_of
from ..replays.slot import ChainSlot, Slot, Turn
from ..reports.ranges import named_range
from .activations import Activations
from .executor import Executor
from .layer_kinds import record_warmed_up
from .part import Part, Place
from .recording import Mode, Recording, RegionBody


class Offloading(Protocol):
    """Makes the activations of a region, or of parts that run one after the other and share a slot's memory."""

    def prepare(self, executor: Executor, bodies: Sequence[RegionBody], slot: int) -> Sequence[Activations | None]:
        """Return what keeps each body's activations in a slot, None where they stay in the graph's memory.

        Their warm-up is over.

        Raises:
            CaptureError: They cannot be kept as asked for.
        """

    def accepts(self, nbytes: int) -> bool:
        """Whether a slot, all buckets recorded, may take so many bytes; if not, `prepare` is asked again for less.

        Raises:
            CaptureError: It takes too much and cannot take less.
        """

    def release(self) -> None:
        """Give back all host memory."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory held, in bytes."""


type _Now = Sequence[tuple[Part, Source]]


class Chain:
    """Regions that are recorded together: a whole one alone, or parts that replay every microbatch in one slot.

    Recordings of parts with a backward hold only with those of the same capture: one that is missing has all of them
    recorded again. Recordings without a backward leave nothing behind; each part has its own, in memory of their own.

    Args:
        executor: Makes recordings.
        offloading: Decides where the activations of all parts are; None leaves them in the graphs' memory.
        in_parts: Whether it is made of parts of a module, though it may be one.

    Attributes:
        offloading, in_parts: See above.
        captures: How often what has a backward was recorded.
    """

    def __init__(self, executor: Executor, offloading: Offloading | None = None, in_parts: bool = False) -> None:
        self._executor, self.offloading, self.in_parts = executor, offloading, in_parts
        self._slots: dict[int, ChainSlot] = {}
        self._parts: list[Part] = []
        self.captures = 0

    def join(self, part: Part) -> None:
        """Add the part that runs after those that are there."""
        self._parts.append(part)

    def leave(self, part: Part) -> None:
        """Remove a part; behind the last one, host memory is given back."""
        self._parts = [each for each in self._parts if each is not part]
        if not self._parts:
            self._slots = {}
            if self.offloading is not None:
                self.offloading.release()

    def common(self, index: int) -> ChainSlot:
        """Return what all parts have in common in a slot."""
        if index not in self._slots:
            self._slots[index] = ChainSlot(self._executor.device, self._executor.new_memory, self.in_parts)
        return self._slots[index]

    def tidy(self, part: Part) -> None:
        """Give back what no recording of a part uses any more, and count the rest."""
        part.keep_static()
        for slot in part.every_slot():
            self.trim(slot.index)
        self.count(part)

    def count(self, part: Part) -> None:
        """Note in a part's statistics what it takes; the first part counts what no part has alone."""
        statistics, slots, first = part.statistics, part.every_slot(), part in self._parts[:1]
        shared = [slot.common for slot in slots] if first else []
        borders = (each.border.nbytes for each in shared if each.border is not None)
        statistics.graph_bytes = sum(each.nbytes for each in shared)
        statistics.static_bytes = sum(borders) + sum(slot.static.nbytes for slot in slots)
        statistics.gradient_bytes = static_bytes_of(source.sinks for source in part.sources)
        statistics.pinned_bytes = self.offloading.pinned_bytes if first and self.offloading else 0

    def trim(self, index: int) -> None:
        """Give memory of a slot back that no recording uses any more, unless a microbatch holds it."""
        if self.is_free(index):
            self.common(index).keep((place[2].gradients, made.nbytes) for place, made in self._held(index))
            self.count(self._parts[0])

    @property
    def shrinks(self) -> bool:
        """Whether a dropped bucket gives its memory back."""
        return all(common.memory(gradients=True).shrinks for common in self._slots.values())

    def is_free(self, index: int) -> bool:
        """Whether no microbatch holds the slot in any part."""
        return all(slot.free for slot in self._slots_of(index))

    def _slots_of(self, index: int) -> list[Slot]:
        return [slot for part in self._parts for slot in part.every_slot() if slot.index == index]

    def capture(self, recorded: Callable[[], None]) -> None:
        """Record what the parts planned, in every slot.

        Args:
            recorded: Called after each recording.

        Raises:
            CaptureError: It failed.
        """
        for index in range(max(len(part.planned) for part in self._parts)):
            for part in (None, *self._parts):
                planned = ((each, place) for each in self._parts for place in each.planned[index])
                places = dict.fromkeys(place for each, place in planned if self.asking(each, place[1]) is part)
                if places:
                    self.record(index, list(places), recorded, part)

    def asking(self, part: Part, mode: Mode) -> Part | None:
        """Return the part that is recorded alone where it asks for a mode; None where all are."""
        return None if self.in_parts and mode.gradients else part

    def record(
        self,
        index: int,
        places: Sequence[Place],
        recorded: Callable[[], None] = lambda: None,
        part: Part | None = None,
        only_here: bool = False,
    ) -> None:
        """Record all parts that can be, in a slot that is free in all; what they had for the same places is dropped.

        It is repeated while activations exceed their limit: what is lost between blocks is known only once they are
        there.

        Args:
            index: Number of the slot.
            places: What to record, largest first.
            recorded: Called after each recording.
            part: The only part to record; None records all, with a backward each.
            only_here: Whether this rank's memory moved: others keep what they have, and it records no more than that.

        Raises:
            CaptureError: It failed.
        """
        now = self._now(part)
        try:
            if now:
                with torch.inference_mode(False):
                    self._record(index, now, places, recorded, part, only_here)
        except BaseException as error:
            self.refuse(index, places, error, part)
            raise
        finally:
            for each in self._parts:
                self.count(each)

    def _sources(self, part: Part | None) -> list[Source]:
        """Return what recordings are replaced of: where all parts are recorded, earlier ones are of no use."""
        if part is not None:
            return [part.sources.current]
        return [source for each in self._parts for source in each.sources]

    def _now(self, part: Part | None) -> _Now:
        """Return the parts that can be recorded, with what they are now."""
        if part is not None:
            return [(part, part.sources.current)]
        found = [(each, each.source()) for each in self._parts]
        return [(each, source) for each, source in found if isinstance(source, Source)]

    def refuse(self, index: int, places: Sequence[Place], error: BaseException, part: Part | None) -> None:
        """Drop what parts, or one of them, have for some places, and note why these cannot be recorded."""
        self._drop(index, places, self._sources(part))
        for _, source in self._now(part):
            for place in places:
                source.failed.note(place, reason_of(error))

    def _record(
        self,
        index: int,
        now: _Now,
        places: Sequence[Place],
        recorded: Callable[[], None],
        part: Part | None,
        only_here: bool,
    ) -> None:
        limited, sources = self.offloading if part is None or not self.in_parts else None, self._sources(part)
        while True:
            self._drop(index, places, sources, only_here)
            for bucket, mode in places:
                wish = index, bucket, mode
                wanted = [each for each in now if not only_here or wish in each[1].recorded_by_other_ranks]
                if not wanted:  # what only other states of the model had
                    continue
                what = wanted[0][0].name if len(wanted) == 1 else f"{len(wanted)} parts"
                with named_range(f"capture {what}, bucket {bucket}"):
                    for each, _ in wanted:
                        each.add_inputs(bucket)
                    warm = all(mode in source.warm for _, source in wanted)
                    record = partial(self._record_parts, index, wanted, bucket, mode)
                    record_warmed_up(record, warm, wanted[0][0].name, bucket)
                for _ in wanted:
                    recorded()
            if limited is None or limited.accepts(self.slot_bytes(index)):
                return
            held = {place[1:] for source in sources for place in source.recordings if place[0] == index}
            again = (place for place in held if place[1].gradients or not self.in_parts)
            places = sorted(again, key=lambda place: (place[0], place[1].gradients), reverse=True)
            self._drop(index, places, sources)
            self.trim(index)

    def _record_parts(self, index: int, now: _Now, bucket: Bucket, mode: Mode, briefly: bool) -> None:
        """Warm up, capture and keep."""
        first = now[0][0]
        slots = {part: slot for part, _ in now for slot in part.every_slot() if slot.index == index}
        with first.recording(bucket):
            pool = self.common(index).memory(mode.gradients).begin()
            bodies = [part.warmed_up(source, slots[part], bucket, mode, briefly) for part, source in now]
            if self.offloading is not None and mode.gradients:
                for body, kept in zip(bodies, self.offloading.prepare(self._executor, bodies, index), strict=True):
                    body.activations = kept
            with first.checked(briefly):
                made = self._recorded(bodies, pool)
            nbytes = pool.settle()
        self.captures += mode.gradients
        for place, ((part, source), body, recording) in enumerate(zip(now, bodies, made, strict=True)):
            recorded = part.keep(source, slots[part], mode, body, recording, nbytes)
            recorded.turn = Turn(self.captures, place) if mode.gradients else None

    def _recorded(self, bodies: Sequence[RegionBody], pool: Pool) -> list[Recording]:
        made: list[Recording] = []
        try:
            for body in bodies:
                made.append(self._executor.record_forward(body, pool))
            for recording in reversed(made):
                recording.record_backward()
        finally:
            for body in bodies:
                body.forget()
        return made

    def _held(self, index: int) -> list[tuple[tuple[int, Bucket, Mode], Recorded]]:
        """Return the recordings in a slot."""
        return [
            (place, made)
            for source in self._sources(None)
            for place, made in source.recordings.items()
            if place[0] == index
        ]

    def _drop(self, index: int, places: Sequence[Place], sources: Sequence[Source], only_here: bool = False) -> None:
        """Drop recordings, whose last replays have ended by then: their memory is to be used again.

        Other ranks drop theirs as well, or keep them where that happens `only_here`.
        """
        gone = {(index, *place) for place in places}
        if any(not gone.isdisjoint(source.recordings) for source in sources):
            self._executor.tidy()
        for source in sources:
            others, dropped = source.recorded_by_other_ranks, gone.intersection(source.recordings)
            source.recorded_by_other_ranks = others.union(dropped) if only_here else others.difference(gone)
            source.recordings = {place: made for place, made in source.recordings.items() if place not in gone}

    def slot_bytes(self, index: int) -> int:
        """Return all device memory of a slot, with the gradients that parts return, in bytes."""
        slots, common = self._slots_of(index), self.common(index)
        shared = {id(slot.shared): slot.shared.tensors(index) for slot in slots if slot.shared is not None}
        tensors = [*filter(None, [common.border]), *shared.values(), *(slot.static for slot in slots)]
        returned = static_bytes_of(source.sinks for source in self._sources(None))
        return common.nbytes + sum(each.nbytes for each in tensors) + returned
