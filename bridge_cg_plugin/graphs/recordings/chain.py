"""Parts of a module whose graphs share memory: all forwards are recorded in their order, then all backwards behind."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch

from ..changes.source import Recorded, Source
from ..errors import reason_of
from ..fallback import Fallback
from ..memory.pools import Pool, SlotMemory
from ..planning.buckets import Bucket
from ..replays.gradients import static_bytes_of
from ..replays.slot import ChainSlot, Slot, Turn
from ..reports.ranges import named_range
from .executor import Executor
from .layer_kinds import record_warmed_up
from .offloading import Offloading
from .recording import Mode, Recording, RegionBody

# What is recorded in a slot.
Place = tuple[Bucket, Mode]


class Part(Protocol):
    """A part as its chain sees it."""

    name: str
    planned: Sequence[Sequence[Place]]

    def slot(self, index: int) -> Slot:
        """Return the part's slot with a number."""

    def every_source(self) -> Iterable[Source]:
        """Return all that recordings were made from."""

    def source(self) -> Source | Fallback:
        """Return what the model is now, or why it cannot be recorded."""

    def expect(self, bucket: Bucket) -> None:
        """Have a bucket's static inputs in every slot."""

    def recording(self, bucket: Bucket) -> AbstractContextManager[None]:
        """See `Recorder`."""

    def warmed_up(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, briefly: bool) -> RegionBody:
        """See `Recorder`."""

    def checked(self, briefly: bool) -> AbstractContextManager[None]:
        """See `Recorder`."""

    def keep(
        self, source: Source, slot: Slot, mode: Mode, body: RegionBody, recording: Recording, nbytes: int
    ) -> Recorded:
        """See `Recorder`."""

    def count_memory(self) -> None:
        """Note in the part's statistics what it takes."""


class Chain:
    """Parts that replay every microbatch in one slot, in their order, and share that slot's memory.

    What a part's forward no longer needs when it ends, such as activations that were copied to the host, is memory of
    the next part. So recordings with a backward hold only with those of the same capture: one that is missing has all
    of them recorded again. Recordings without a backward leave nothing behind; they are in memory of their own.

    Args:
        executor: Makes recordings.
        offloading: Decides where the activations of all parts are.

    Attributes:
        offloading: See above.
        captures: How often all parts were recorded.
    """

    def __init__(self, executor: Executor, offloading: Offloading) -> None:
        self._executor, self.offloading = executor, offloading
        self._slots: dict[int, ChainSlot] = {}
        self._parts: list[Part] = []
        self.captures = 0
        self._forward_memory: dict[int, SlotMemory] = {}

    def join(self, part: Part) -> None:
        """Add the part that runs after those that are there."""
        self._parts.append(part)

    def leave(self, part: Part) -> None:
        """Remove a part; behind the last one, host memory is given back."""
        self._parts = [each for each in self._parts if each is not part]
        if not self._parts:
            self.offloading.release()
            self._slots, self._forward_memory = {}, {}

    def common(self, index: int) -> ChainSlot:
        """Return what all parts have in common in a slot."""
        if index not in self._slots:
            self._slots[index] = ChainSlot(self._executor.device, self._executor.new_memory())
        return self._slots[index]

    def forward_memory(self, index: int) -> SlotMemory:
        """Return the memory of recordings without a backward in a slot."""
        if index not in self._forward_memory:
            self._forward_memory[index] = self._executor.new_memory()
        return self._forward_memory[index]

    def is_first(self, part: Part) -> bool:
        """Whether a part counts what no part has alone."""
        return part in self._parts[:1]

    def graph_bytes(self, index: int) -> int:
        """Return the device memory of the recordings in a slot."""
        forward = self._forward_memory.get(index)
        return self.common(index).memory.nbytes + (0 if forward is None else forward.nbytes)

    def trim(self, index: int) -> None:
        """Give memory of a slot back that no recording uses any more, unless a microbatch holds it."""
        if not self.is_free(index):
            return
        for gradients, memory in ((True, self.common(index).memory), (False, self._forward_memory.get(index))):
            if memory is not None:
                memory.keep(max((made.nbytes for _, made in self._held(index, gradients)), default=0))
        for part in self._parts[:1]:
            part.count_memory()

    def is_free(self, index: int) -> bool:
        """Whether no microbatch holds the slot in any part."""
        return all(part.slot(index).free for part in self._parts)

    def shared_bytes(self, part: Part) -> tuple[int, int]:
        """Return the memory that no part has alone, on the device and page-locked; the first part counts it."""
        if not self.is_first(part):
            return 0, 0
        return sum(common.border.nbytes for common in self._slots.values()), self.offloading.pinned_bytes

    def capture(self, recorded: Callable[[], None]) -> None:
        """Record what the parts planned, in every slot.

        Args:
            recorded: Called after each recording.

        Raises:
            CaptureError: It failed.
        """
        for index in range(max(len(part.planned) for part in self._parts)):
            places = list(dict.fromkeys(place for part in self._parts for place in part.planned[index]))
            if places:
                self.record(index, places, recorded)

    def record(
        self,
        index: int,
        places: Sequence[Place],
        recorded: Callable[[], None] = lambda: None,
        only_here: bool = False,
    ) -> None:
        """Record all parts that can be, in a slot that is free in all; what they had for the same places is dropped.

        Args:
            index: Number of the slot.
            places: What to record, with a backward each, largest first.
            recorded: Called after each recording.
            only_here: Whether this rank's memory moved: others keep what they have, and it records no more than that.

        Raises:
            CaptureError: It failed.
        """
        now = [(part, part.source()) for part in self._parts]
        parts = [(part, source) for part, source in now if isinstance(source, Source)]
        try:
            if parts:
                with torch.inference_mode(False):
                    self._record(index, parts, places, recorded, only_here)
        except BaseException as error:
            self.refuse(index, places, error)
            raise
        finally:
            for part in self._parts:
                part.count_memory()

    def refuse(self, index: int, places: Sequence[Place], error: BaseException) -> None:
        """Drop what parts have for some places, and note why these cannot be recorded."""
        self._drop(index, places)
        for source in (part.source() for part in self._parts):
            if isinstance(source, Source):
                for place in places:
                    source.failed.note(place, reason_of(error))

    def _record(
        self,
        index: int,
        parts: Sequence[tuple[Part, Source]],
        places: Sequence[Place],
        recorded: Callable[[], None],
        only_here: bool,
    ) -> None:
        while True:
            self._drop(index, places, only_here)
            for bucket, mode in places:
                wish = index, bucket, mode
                wanted = [each for each in parts if not only_here or wish in each[1].recorded_by_other_ranks]
                if not wanted:  # what only other states of the model had
                    continue
                with named_range(f"capture {len(wanted)} parts, bucket {bucket}"):
                    self._record_place(index, wanted, bucket, mode)
                for _ in wanted:
                    recorded()
            if self.offloading.accepts(self.slot_bytes(index)):
                return
            held = dict.fromkeys((bucket, mode) for (_, bucket, mode), _ in self._held(index, True))
            places = sorted(held, key=lambda place: place[0], reverse=True)
            self._drop(index, places)
            self.trim(index)

    def _record_place(self, index: int, parts: Sequence[tuple[Part, Source]], bucket: Bucket, mode: Mode) -> None:
        for part, _ in parts:
            part.expect(bucket)
        warm = all(mode in source.warm for _, source in parts)
        record_warmed_up(partial(self._record_parts, index, parts, bucket, mode), warm, parts[0][0].name, bucket)

    def _record_parts(
        self, index: int, parts: Sequence[tuple[Part, Source]], bucket: Bucket, mode: Mode, briefly: bool
    ) -> None:
        first = parts[0][0]
        with first.recording(bucket):
            pool = self.common(index).memory.begin()
            bodies = [part.warmed_up(source, part.slot(index), bucket, mode, briefly=briefly) for part, source in parts]
            kept = self.offloading.prepare(self._executor, bodies, index)
            for body, activations in zip(bodies, kept, strict=True):
                body.activations = activations
            with first.checked(briefly):
                made = self._recorded(bodies, pool)
            nbytes = pool.settle()
        self.captures += 1
        for place, ((part, source), body, recording) in enumerate(zip(parts, bodies, made, strict=True)):
            recorded = part.keep(source, part.slot(index), mode, body, recording, nbytes)
            recorded.turn = Turn(self.captures, place)

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

    def _held(self, index: int, gradients: bool) -> list[tuple[tuple[int, Bucket, Mode], Recorded]]:
        """Return the recordings in a slot that have a backward, or those that have none."""
        return [
            (place, source.recordings[place])
            for part, source in self._every_source()
            for place in source.in_slot(part.slot(index))
            if place[2].gradients == gradients
        ]

    def _every_source(self) -> Iterator[tuple[Part, Source]]:
        for part in self._parts:
            for source in part.every_source():
                yield part, source

    def _drop(self, index: int, places: Sequence[Place], only_here: bool = False) -> None:
        """Drop recordings of all parts, whose last replays have ended by then: their memory is to be used again.

        Other ranks drop theirs as well, or keep them where that happens `only_here`.
        """
        gone = {(index, *place) for place in places}
        if any(not gone.isdisjoint(source.recordings) for _, source in self._every_source()):
            self._executor.tidy()
        for _, source in self._every_source():
            others, dropped = source.recorded_by_other_ranks, gone.intersection(source.recordings)
            source.recorded_by_other_ranks = others.union(dropped) if only_here else others.difference(gone)
            source.recordings = {place: made for place, made in source.recordings.items() if place not in gone}

    def slot_bytes(self, index: int) -> int:
        """Return all device memory of a slot, with the gradients that parts return, in bytes."""
        slots = [part.slot(index) for part in self._parts]
        shared = {id(slot.shared): slot.shared.tensors(index) for slot in slots if slot.shared is not None}
        tensors = [self.common(index).border, *shared.values(), *(slot.static for slot in slots)]
        returned = static_bytes_of(source.sinks for _, source in self._every_source())
        return self.graph_bytes(index) + sum(each.nbytes for each in tensors) + returned
