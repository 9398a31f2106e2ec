"""What is recorded together: a whole region alone; parts of a module in their order, in memory that they share.

What a part's forward no longer needs when it ends, such as activations that were copied to the host, is memory of the
next part. So all forwards of parts are recorded in their order, then all backwards behind.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ...announce import LOGGER
from ..buckets import Bucket
from ..changes.model_watch import ModelWatch
from ..changes.source import Recorded, Source
from ..changes.sources import Sources
from ..changes.state import listed
from ..errors import CaptureError, OutOfMemoryInCapture, Refused, first_line, reason_of, release_frames
from ..fallback import Fallback
from ..instance import asked_once, every_module
from ..program import Piece
from ..ranges import named_range
from ..replays.gradients import static_bytes_of
from ..replays.slot import ChainSlot, Slot
from ..reports import BucketStatistics, RegionStatistics
from .capture import collected_later, put_back
from .executor import Executor, Recording
from .recording import ONE_THREAD, STAY, Activations, Mode, RegionBody
from .warm_up import copies_of, tensors_put_back, watched_pass

# What is recorded in a slot.
Place = tuple[Bucket, Mode]
Copies = list[tuple[Tensor, Tensor]]


class Part:
    """A region as it is recorded, with others or alone; see `Chain`.

    Args:
        piece: What is recorded.
        executor: Makes the recordings.
        watch: What follows the model; everything that is recorded is a pass of it.

    Attributes:
        executor, watch: See above.
        program: The piece of the model.
        name: Of the program.
        statistics: Memory and time are counted there, too.
        buckets: What batches use, in the order in which they are tried.
        slots: Those of its recordings; none before a capture.
        planned: What a capture records in each slot, largest first.
        disproved: Whether a recording was wrong, so that the region stays eager.
        sources: What recordings are made from; missing before a capture.
    """

    sources: Sources

    def __init__(self, piece: Piece, executor: Executor, watch: ModelWatch) -> None:
        self.watch = watch
        self.program, self.name, self._piece, self.executor = piece.program, piece.program.name, piece, executor
        self.statistics, self._growth = RegionStatistics(), piece.growth
        self.buckets = self._ordered(piece.buckets)
        self.planned: Sequence[Sequence[Place]] = ()
        self.slots: list[Slot] = []
        self.disproved = False
        self._always_changed: set[str] = set()

    def source(self, gradients: bool = True, asks: bool = True) -> Source | Fallback:
        """Return what the model is now, or why it cannot be recorded; arguments as of `Sources.find`."""
        raise NotImplementedError

    def _planned(self, index: int) -> list[Place]:
        """Return what a capture records in a slot, largest first.

        That is what training runs, and without gradients, too, where it trains nothing.
        """
        source, found = self.sources.current, list[Place]()
        for bucket in sorted(self.buckets, reverse=True):
            mode = self._training_mode(bucket)
            if self._growth is not None:
                # Passes of a model that is not trained say by themselves what they need.
                if mode.training is not False and not source.gradients_left():
                    found.append((bucket, mode))
                continue
            if mode.gradients and not source.gradients_left():
                found.append((bucket, mode))
            if index == 0 and not source.sinks.parameters and bucket in self._forward_only_buckets():
                found.append((bucket, mode._replace(gradients=False)))
        return found

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

    def add_inputs(self, buckets: Iterable[Bucket]) -> None:
        """Make further buckets' static inputs in every slot, those of the largest first: others lie in them.

        Raises:
            CaptureError: There is no memory for them.
        """
        for bucket in sorted(set(buckets), reverse=True):
            self.statistics.buckets.setdefault(bucket, BucketStatistics())
            for slot in self.slots:
                if bucket not in slot.buffers:
                    with as_capture_error("static inputs"):
                        slot.buffers[bucket] = slot.input_buffers(self.program.input_specs(bucket))

    @contextmanager
    def recording(self, bucket: Bucket) -> Iterator[Copies]:
        """Be around all that is done for recordings of a bucket, of all parts of the chain.

        Yields the model's tensors with copies from before.

        Raises:
            CaptureError: Anything inside went wrong.
        """
        with (
            ONE_THREAD,
            asked_once(),
            self._piece.around(),
            as_capture_error(f"bucket {bucket}"),
            put_back(self.executor.generators()),  # ranks draw alike, and one of them may record alone
            self.watch.undone(unless_it_ends=True),
        ):
            yield copies_of(self.watch.tensors_of(every_module(self.watch.roots)))

    def warmed_up(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, briefly: bool) -> RegionBody:
        """Return work that ran outside a capture and can be recorded.

        Modules that are in another mode than is recorded are switched while it runs.
        """
        if mode.gradients:
            source.sinks.prepare()
        switched = mode.training if isinstance(mode.training, bool) else None
        body = RegionBody(
            self.program,
            slot.buffers[bucket],
            bucket,
            source.aliases,
            source.sinks if mode.gradients else None,
            self.executor.side_stream() if self._piece.has_side_stream(bucket) else None,
            partial(self.watch.passing, switched),
            slot.common.border,
        )
        body.state, body.kinds = source.number, source.kinds.setdefault(mode, {})
        body.looked_at = partial(watched_pass, self.watch, self.executor.generators())
        for_gradients = slot.common.border or slot.static

        def output_gradients(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            shapes = ((f"output_gradient:{i}", tuple(o.shape), o.dtype) for i, o in enumerate(outputs))
            return tuple(for_gradients.view(*shape).zero_() for shape in shapes)

        self.program.load_example(slot.buffers[bucket], bucket)
        with self.watch.passing():
            self.executor.warm_up(body, output_gradients, briefly)
        return body

    @contextmanager
    def checked(self, kept: Copies, briefly: bool) -> Iterator[None]:
        """Record inside; modules and their tensors hold what they held before: what a capture makes is not for them.

        Raises:
            CaptureError: Passes change what a replay would not.
        """
        with tensors_put_back(kept):
            with self.watch.passing():
                held = self.watch.contents()
                yield
            changed = held.changed()
            if briefly and (first := [place for place in changed if place not in self._always_changed]):
                raise CaptureError(f"layers' first passes change attributes: {listed(first)}")
            self._always_changed.update(changed)
            if changed:
                LOGGER.info("%s: replays do not set what a forward does: %s", self.name, listed(list(changed)))
            if left := [place for place, leaves in changed.items() if leaves]:
                what = f"each forward changes an attribute, which a graph does not: {listed(left)}"
                raise Refused(Fallback.LEAVES_TENSORS, what)
            held.put_back()


@contextmanager
def as_capture_error(what: str) -> Iterator[None]:
    """Raise what goes wrong inside as a `CaptureError` that names what was captured."""
    try:
        yield
    except CaptureError:
        raise
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryInCapture(first_line(error)) from error
    except Exception as error:
        raise CaptureError(f"{type(error).__name__} in {what}: {error}") from error


class Offloading:
    """Makes the activations of a region, or of parts that run one after the other and share a slot's memory.

    Here all stay in the graphs' memory.
    """

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory held, in bytes."""
        return 0

    def prepare(self, executor: Executor, bodies: Sequence[RegionBody], slot: int) -> Sequence[Activations]:
        """Return what keeps each body's activations in a slot.

        Their warm-up is over.

        Raises:
            CaptureError: They cannot be kept as asked for.
        """
        return [STAY] * len(bodies)

    def accepts(self, nbytes: int) -> bool:
        """Whether a slot, all buckets recorded, may take so many bytes; if not, `prepare` is asked again for less.

        Raises:
            CaptureError: It takes too much and cannot take less.
        """
        return True

    def release(self) -> None:
        """Give back all host memory."""


NOTHING_LEAVES = Offloading()


class Chain:
    """Regions that are recorded together: a whole one alone, or parts that replay every microbatch in one slot.

    Recordings of parts with a backward hold only with those of the same capture: one that is missing has all of them
    recorded again. Recordings without a backward leave nothing behind; each part has its own, in memory of their own.
    Parts that run again in the backward, each behind its own forward, have the same memory in turn.

    Args:
        executor: Makes recordings.
        offloading: Decides where the activations of all parts are.
        in_parts: Whether it is made of parts of a module, though it may be one.
        in_turn: Whether each part runs its backward right behind its forward.

    Attributes:
        executor, offloading, in_parts, in_turn: See above.
        parts: In the order in which they run.
        captures: How often what has a backward was recorded.
    """

    def __init__(
        self,
        executor: Executor,
        offloading: Offloading = NOTHING_LEAVES,
        in_parts: bool = False,
        in_turn: bool = False,
    ) -> None:
        self.executor, self.offloading, self.in_parts, self.in_turn = executor, offloading, in_parts, in_turn
        self._slots: dict[int, ChainSlot] = {}
        self.parts: list[Part] = []
        self.captures = 0

    def leave(self, part: Part) -> None:
        """Remove a part; behind the last one, host memory is given back."""
        self.parts = [each for each in self.parts if each is not part]
        if not self.parts:
            self._slots = {}
            self.offloading.release()

    def common(self, index: int) -> ChainSlot:
        """Return what all parts have in common in a slot."""
        if index not in self._slots:
            self._slots[index] = ChainSlot(self.executor.device, self.executor.new_memory, self.in_parts, self.in_turn)
        return self._slots[index]

    def tidy(self, part: Part) -> None:
        """Give back what no recording of a part uses any more, and count the rest."""
        for slot in part.slots:
            inputs = [tensor for buffers in slot.buffers.values() for tensor in buffers.values()]
            gradients = (made.output_gradients for made in _recorded(slot.index, part.sources))
            slot.static.keep([*inputs, *itertools.chain(*gradients)])
            self._trim(slot.index)
        self.count(part)

    def count(self, part: Part) -> None:
        """Note in a part's statistics what it takes; the first part counts what no part has alone."""
        statistics, slots, first = part.statistics, part.slots, part in self.parts[:1]
        shared = [slot.common for slot in slots] if first else []
        borders = (each.border.nbytes for each in shared if each.border is not None)
        statistics.graph_bytes = sum(each.nbytes for each in shared)
        statistics.static_bytes = sum(borders) + sum(slot.static.nbytes for slot in slots)
        statistics.gradient_bytes = static_bytes_of(source.sinks for source in part.sources)
        statistics.pinned_bytes = self.offloading.pinned_bytes if first else 0

    def _trim(self, index: int) -> None:
        """Give memory of a slot back that no recording uses any more, unless a microbatch holds it."""
        if self.is_free(index):
            held = _recorded(index, self._sources(None))
            self.common(index).keep((made.place[2].gradients, made.nbytes) for made in held)
            self.count(self.parts[0])

    def is_free(self, index: int) -> bool:
        """Whether no microbatch holds the slot in any part."""
        return all(slot.free for slot in self._slots_of(index))

    def _slots_of(self, index: int) -> list[Slot]:
        return [slot for part in self.parts for slot in part.slots if slot.index == index]

    def capture(self) -> None:
        """Record what the parts planned, in every slot.

        Raises:
            CaptureError: It failed.
        """
        for index in range(max(len(part.planned) for part in self.parts)):
            for part in (None, *self.parts):
                planned = ((each, place) for each in self.parts for place in each.planned[index])
                places = dict.fromkeys(place for each, place in planned if self.asking(each, place[1]) is part)
                if places:
                    self.record(index, list(places), part)

    def asking(self, part: Part, mode: Mode) -> Part | None:
        """Return the part that is recorded alone where it asks for a mode; None where all are."""
        return None if self.in_parts and not self.in_turn and mode.gradients else part

    def record(self, index: int, places: Sequence[Place], part: Part | None, only_here: bool = False) -> None:
        """Record all parts that can be, in a slot that is free in all; what they had for the same places is dropped.

        It is repeated while activations exceed their limit: what is lost between blocks is known only once they are
        there.

        Args:
            index: Number of the slot.
            places: What to record, largest first.
            part: The only part to record; None records all, with a backward each.
            only_here: Whether this rank's memory moved: others keep what they have, and it records no more than that.

        Raises:
            CaptureError: It failed.
        """
        now, sources = self._now(part), self._sources(part)
        limited = self.offloading if part is None or not self.in_parts else NOTHING_LEAVES
        try:
            with torch.inference_mode(False):
                while now:
                    self._drop(index, places, sources, only_here)
                    for bucket, mode in places:
                        wish = index, bucket, mode
                        wanted = [each for each in now if not only_here or wish in each[1].recorded_by_other_ranks]
                        if wanted:  # else only other states of the model had it
                            self._record(index, wanted, bucket, mode)
                    if limited is NOTHING_LEAVES or limited.accepts(self.slot_bytes(index)):
                        return
                    held = {place[1:] for source in sources for place in source.recordings if place[0] == index}
                    again = (place for place in held if place[1].gradients or not self.in_parts)
                    places = sorted(again, key=lambda place: (place[0], place[1].gradients), reverse=True)
                    self._drop(index, places, sources)
                    self._trim(index)
        except BaseException as error:
            self.refuse(index, places, error, part)
            raise
        finally:
            for each in self.parts:
                self.count(each)

    def _sources(self, part: Part | None) -> list[Source]:
        """Return what recordings are replaced of: where all parts are recorded, earlier ones are of no use."""
        return [source for each in self.parts for source in each.sources] if part is None else [part.sources.current]

    def _now(self, part: Part | None) -> list[tuple[Part, Source]]:
        """Return the parts that can be recorded, with what they are now."""
        if part is not None:
            return [(part, part.sources.current)]
        found = [(each, each.source(asks=False)) for each in self.parts]
        return [(each, source) for each, source in found if isinstance(source, Source)]

    def refuse(self, index: int, places: Sequence[Place], error: BaseException, part: Part | None) -> None:
        """Drop what parts, or one of them, have for some places, and note why these cannot be recorded."""
        self._drop(index, places, self._sources(part))
        for _, source in self._now(part):
            for place in places:
                source.refuse(place, reason_of(error))

    def _record(self, index: int, wanted: Sequence[tuple[Part, Source]], bucket: Bucket, mode: Mode) -> None:
        """Record some parts, warmed up briefly where only shapes should be new, and fully where that proves wrong."""
        first = wanted[0][0]
        briefly = all(mode in source.warm for _, source in wanted)
        with named_range(f"capture {first.name if len(wanted) == 1 else f'{len(wanted)} parts'}, bucket {bucket}"):
            for part, _ in wanted:
                part.add_inputs([bucket])
            if briefly:
                try:
                    return self._record_parts(index, wanted, bucket, mode, briefly=True)
                except CaptureError as error:
                    briefly = isinstance(error, OutOfMemoryInCapture)
                    need = "what PyTorch has left over" if briefly else "whole warm-up passes"
                    LOGGER.info("%s: bucket %s needs %s: %s", first.name, bucket, need, error)
                    release_frames(error)  # which hold the recording that is thrown away; the next one takes its memory
                self.executor.tidy()
            self._record_parts(index, wanted, bucket, mode, briefly)

    def _record_parts(
        self, index: int, wanted: Sequence[tuple[Part, Source]], bucket: Bucket, mode: Mode, briefly: bool
    ) -> None:
        """Warm up, capture and keep.

        Raises:
            CaptureError: It failed, or memory is not where the sources found it.
        """
        first, made = wanted[0][0], list[Recording]()
        slots = {part: slot for part, _ in wanted for slot in part.slots if slot.index == index}
        memory = self.common(index).memory(mode.gradients)
        mapped = memory.nbytes
        with first.recording(bucket) as kept, collected_later():
            pool = memory.begin()
            bodies = [part.warmed_up(source, slots[part], bucket, mode, briefly) for part, source in wanted]
            if mode.gradients:
                prepared = self.offloading.prepare(self.executor, bodies, index)
                for body, activations in zip(bodies, prepared, strict=True):
                    body.activations = activations
            with first.checked(kept, briefly):
                try:
                    for body in bodies:
                        made.append(self.executor.record_forward(body, pool))
                    for recording in reversed(made):
                        recording.record_backward()
                finally:
                    for body in bodies:
                        body.forget()
            nbytes = pool.settle()
        if memory.nbytes > mapped:
            self.executor.tidy()  # PyTorch still holds what eager passes needed
        self.captures += mode.gradients
        place = index, bucket, mode
        for (_, source), body, recording in zip(wanted, bodies, made, strict=True):
            if source.moved(mode.gradients):
                raise CaptureError("memory of parameters or of their main_grad was moved inside a step")
            source.recordings[place] = Recorded(recording, body.output_gradients, place, nbytes)
            if place not in source.recorded_by_other_ranks:
                source.unproven.add(place)
            source.warm.add(mode)

    def _drop(self, index: int, places: Sequence[Place], sources: Sequence[Source], only_here: bool = False) -> None:
        """Drop recordings, whose last replays have ended by then: their memory is to be used again.

        Other ranks drop theirs as well, or keep them where that happens `only_here`.
        """
        gone = {(index, *place) for place in places}
        if any(not gone.isdisjoint(source.recordings) for source in sources):
            self.executor.tidy()
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


def _recorded(index: int, sources: Iterable[Source]) -> list[Recorded]:
    """Return the recordings of sources in a slot."""
    return [made for source in sources for made in source.recordings.values() if made.place[0] == index]
