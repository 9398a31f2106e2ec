"""A region's recordings: what a capture makes, and what microbatches ask for later."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ...announce import LOGGER, warn
from ..changes.model_watch import ModelWatch
from ..changes.source import TRIED_AGAIN, Recorded, Source
from ..changes.sources import LASTING, Sources
from ..changes.state import listed
from ..errors import CaptureError, OtherRankFailed, OutOfMemoryInCapture, Refused, first_line, named, reason_of
from ..fallback import Fallback
from ..instance import every_module
from ..piece import SINGLE_RANK, Piece, Surroundings
from ..planning.buckets import Bucket
from ..rank_consensus import SingleRank
from ..replays.gradients import static_bytes_of
from ..replays.pending import NO_BACKWARD
from ..replays.slot import Slot
from ..reports.ranges import named_range
from ..reports.statistics import RegionStatistics
from ..retries import Retry
from .capture import is_capturing, put_back
from .compiling import TURNS
from .executor import Executor, give_back_after
from .layer_kinds import record_warmed_up
from .recording import EVALUATION, ONE_THREAD, Mode, Recording, RegionBody
from .watched_pass import KeptTensors, watched_pass

# A recording of a region: the slot's number, bucket and mode.
Wish = tuple[int, Bucket, Mode]

NOTHING = KeptTensors(())
FAILED_HERE = "had to be recaptured because memory was moved on this rank, and could not be captured"


class Recordings:
    """The slots and recordings of a region, from one capture to the next.

    Args:
        piece: What is recorded.
        executor: Makes the recordings.
        watch: Follows the model; everything that is recorded is a pass of it.
        sources: What recordings are made from.
        statistics: Of the region; memory and time are counted there.
        around: What is around the model in this run.
        strict: Whether a recording that fails raises.

    Attributes:
        name: Of the program.
        slots: The region's.
        forward_slot: For passes without a backward while another microbatch holds the first slot; None without one.
        wishes: What training steps missed, oldest first, with the number of the source that it is to be recorded from.
    """

    def __init__(
        self,
        piece: Piece,
        executor: Executor,
        watch: ModelWatch,
        sources: Sources,
        statistics: RegionStatistics,
        around: Surroundings,
        strict: bool,
    ) -> None:
        self.name = piece.program.name
        self._program, self._piece, self._executor, self._watch = piece.program, piece, executor, watch
        self._sources, self._statistics, self._strict = sources, statistics, strict
        self._consensus, self._before_replay = around.consensus, around.before_replay
        self.slots: list[Slot] = []
        self.forward_slot: Slot | None = None
        self.wishes: dict[Wish, int] = {}
        self._forward_slot_failed = Retry(TRIED_AGAIN)
        self._asked: Counter[Hashable] = Counter()
        self._kept = NOTHING
        self._always_changed: set[str] = set()

    def find(
        self, source: Source, bucket: Bucket, mode: Mode, index: int | None, records: bool
    ) -> tuple[Slot, Recorded] | Fallback:
        """Return a free slot with the recording, made now if it is missing, or why there is none.

        Args:
            source: What the model is.
            bucket: The bucket.
            mode: The mode.
            index: The slot to use; None is the first free one.
            records: Whether a missing recording may be made.

        Raises:
            CaptureError: A recording failed, and the region is strict.
        """
        try:
            slot = self._free_slot(source, bucket, mode, index)
        except Exception as error:  # no memory for one more slot
            self.forward_slot = None
            self._forward_slot_failed.failed()
            return self._failed(source, bucket, mode, error)
        if slot is None:
            return Fallback.NO_FREE_SLOT
        wish = slot.index, bucket, mode
        if wish not in source.recordings:
            reason = self._record_missing(source, slot, wish, records or self._may_always_record(slot, mode))
            if reason is not None:
                return reason
        return slot, source.recordings[wish]

    def recorded(self, source: Source, bucket: Bucket, mode: Mode) -> tuple[Slot, Recorded] | None:
        """Return a recording in a free slot, None without one."""
        for slot in self.slots:
            if slot.free and (slot.index, bucket, mode) in source.recordings:
                return slot, source.recordings[slot.index, bucket, mode]
        return None

    def _free_slot(self, source: Source, bucket: Bucket, mode: Mode, index: int | None) -> Slot | None:
        """Return a slot that no microbatch holds, one with the recording where there is one."""
        if index is None and not mode.gradients:
            return self.slots[0] if self.slots[0].free else self._forward_only_slot(self._is_lasting(source))
        first = None
        for slot in self.slots if index is None else self.slots[index : index + 1]:
            if slot.lease is None:
                if (slot.index, bucket, mode) in source.recordings:
                    return slot
                first = first or slot
        return first

    def _forward_only_slot(self, lasting: bool) -> Slot | None:
        """Return a slot for passes without a backward while another microbatch holds the first one.

        It is made once such passes come again: a reference pass between a policy's forward and its backward.
        """
        self._forward_slot_failed.turn()
        missing = self.forward_slot is None and self._forward_slot_failed.due
        if missing and (lasting or self._asked_before("forward-only slot")):
            self._consensus.agree(self._add_forward_only_slot)
        return self.forward_slot

    def _add_forward_only_slot(self) -> float:
        self.forward_slot = self.new_slot(len(self.slots), list(self.slots[0].buffers))
        return 0.0

    def _record_missing(self, source: Source, slot: Slot, wish: Wish, records: bool) -> Fallback | None:
        """Record what a batch asks for; returns why it cannot be or is not yet."""
        _, bucket, mode = wish
        source.failed.ask((bucket, mode))
        # What others have, as in another slot or before, is tried on.
        others_have_it = wish in source.recorded_by_other_ranks
        if not others_have_it and (failed := source.failed.reason((bucket, mode))) is not None:
            return failed
        at_once = others_have_it or self._is_lasting(source)
        if self._piece.growth and not at_once and (mode.gradients or mode.training is not False):
            self.wishes[wish] = source.number  # between two steps: other ranks wait for one recording a step
            return Fallback.NOT_CAPTURED_YET
        if not records:
            return Fallback.NOT_CAPTURED_YET
        evaluates = mode == EVALUATION and slot is not self.forward_slot
        if not (evaluates or at_once) and not self._asked_before((mode, slot is self.forward_slot)):
            return Fallback.MODE_NOT_CAPTURED
        if torch._C._current_graph_task_id() != NO_BACKWARD or is_capturing():
            return Fallback.NOT_CAPTURED_YET
        if not self._is_free(slot, mode):
            return Fallback.NO_FREE_SLOT
        if self._before_replay is not None:
            self._before_replay()
        only_here = others_have_it and not isinstance(self._consensus, SingleRank)
        try:
            record = partial(self._add, source, slot, bucket, mode, only_here)
            (SINGLE_RANK if only_here else self._consensus).agree(record)
        except Exception as error:
            if only_here:  # the others replay it now
                raise CaptureError(f"{self.name}: bucket {bucket} {FAILED_HERE}: {named(error)}") from error
            self._take_back(source, slot, bucket, mode, error)
            return self._failed(source, bucket, mode, error)
        return None

    def _may_always_record(self, slot: Slot, mode: Mode) -> bool:
        """Whether recordings of a mode overwrite nothing that was loaded for other parts."""
        return False

    def _is_free(self, slot: Slot, mode: Mode) -> bool:
        """Whether recordings of a mode may be made in a slot that no microbatch holds here."""
        return True

    def _is_lasting(self, source: Source) -> bool:
        """Whether the model was in this state before; ranks that must ask alike do not count memory that moved."""
        return source.lasting or (source.moved_here and isinstance(self._consensus, SingleRank))

    def _asked_before(self, what: Hashable) -> bool:
        self._asked[what] += 1
        return self._asked[what] >= LASTING

    def _failed(self, source: Source, bucket: Bucket, mode: Mode, error: Exception) -> Fallback:
        """Note that a bucket cannot be captured; returns the reason for running eager.

        Raises:
            CaptureError: The region is strict.
        """
        source.failed.note((bucket, mode), reason := reason_of(error))
        said = f"{self.name}: bucket {bucket} could not be captured"
        if self._strict:
            raise CaptureError(f"{said}: {named(error)}") from error
        if not isinstance(error, OtherRankFailed):  # the rank that failed reports it
            warn(f"{said}, it runs eager: {named(error)}")
        give_back_after(error, self._executor)
        return reason

    def record(self, source: Source, bucket: Bucket, mode: Mode) -> None:
        """Record one more bucket in the first slot.

        Raises:
            CaptureError: It failed; the slot's other recordings stay.
        """
        self._add(source, self.slots[0], bucket, mode)

    def record_wish(self, wish: Wish) -> None:
        """Record what a training step missed.

        Raises:
            CaptureError: It failed.
        """
        source, (index, bucket, mode) = self._sources.current, wish
        del self.wishes[wish]
        if wish in source.recordings:
            return
        try:
            self._add(source, self._every_slot()[index], bucket, mode)
        except CaptureError as error:
            source.failed.note((bucket, mode), reason_of(error))
            raise

    def take_back(self, wish: Wish) -> None:
        """Forget what was recorded for a wish that not all ranks could record."""
        source, (index, bucket, mode) = self._sources.current, wish
        self.wishes.pop(wish, None)  # where the recording of an earlier part failed, this one's was not begun
        error = CaptureError("not all ranks could record it")
        source.failed.note((bucket, mode), reason_of(error))
        self._take_back(source, self._every_slot()[index], bucket, mode, error)
        self._tidy()

    def _take_back(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, error: Exception) -> None:
        """Forget what this rank recorded and another one could not."""
        source.recordings.pop((slot.index, bucket, mode), None)

    def drop(self, bucket: Bucket) -> None:
        """Forget a bucket with what was recorded for it, and give its memory back."""
        self._executor.tidy()  # last replays of it have ended by then
        for source in self._sources:
            source.recordings = {place: made for place, made in source.recordings.items() if place[1] != bucket}
            source.recorded_by_other_ranks = frozenset(p for p in source.recorded_by_other_ranks if p[1] != bucket)
        for slot in self._every_slot():
            slot.buffers.pop(bucket, None)
        self.wishes = {wish: number for wish, number in self.wishes.items() if wish[1] != bucket}
        self._executor.tidy()
        self._tidy()

    def _every_slot(self) -> list[Slot]:
        return [*self.slots, *([] if self.forward_slot is None else [self.forward_slot])]

    def leave(self) -> None:
        """Let go of what others hold of these recordings."""

    def new_slot(self, index: int, buckets: Sequence[Bucket]) -> Slot:
        """Return a slot with static inputs for some buckets and no recordings."""
        executor, chain = self._executor, self._piece.chain
        common = None if chain is None else chain.common(index)
        memory = executor.new_memory() if common is None else common.memory
        slot = Slot(index, executor.device, memory, self._piece.shared, executor.static_memory())
        slot.common = common
        for bucket in sorted(set(buckets), reverse=True):
            self._add_inputs(slot, bucket)
        return slot

    def add_inputs(self, bucket: Bucket) -> None:
        """Make one more bucket's static inputs in every slot.

        Raises:
            CaptureError: There is no memory for them.
        """
        for slot in self._every_slot():
            self._add_inputs(slot, bucket)

    def _add_inputs(self, slot: Slot, bucket: Bucket) -> None:
        if bucket not in slot.buffers:
            with as_capture_error("static inputs"):
                slot.buffers[bucket] = slot.input_buffers(self._program.input_specs(bucket))

    def _add(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, only_here: bool = False) -> float:
        try:
            with self._statistics.recording():
                self.fill(source, slot, [(bucket, mode)])
        finally:
            self._tidy()
        return 0.0

    def fill(
        self,
        source: Source,
        slot: Slot,
        places: Sequence[tuple[Bucket, Mode]],
        recorded: Callable[[], None] = lambda: None,
    ) -> None:
        """Record in a slot that no microbatch holds; repeat it while its activations exceed their limit.

        What is lost between blocks is known only once they are there.

        Args:
            source: What the model is.
            slot: The slot.
            places: What to record.
            recorded: Called after each recording.

        Raises:
            CaptureError: It failed; what the slot held before stays unless activations took too much.
        """
        offloading = self._piece.offloading
        while True:
            with torch.inference_mode(False):
                for bucket, mode in places:
                    with named_range(f"capture {self.name}, bucket {bucket}"):
                        record = partial(self._record, source, slot, bucket, mode)
                        record_warmed_up(record, mode in source.warm, self.name, bucket)
                    recorded()
            total = slot.memory.nbytes + slot.static.nbytes + source.sinks.static_bytes
            if offloading is None or offloading.accepts(total):
                return
            held = [(bucket, mode) for _, bucket, mode in source.in_slot(slot)]
            places = sorted(held, key=lambda place: (place[0], place[1].gradients), reverse=True)
            source.forget(slot)
            self._executor.tidy()
            self._trim(slot)

    def _record(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, briefly: bool) -> None:
        """Warm up, capture and keep."""
        offloading = self._piece.offloading
        with self.recording(bucket):
            pool = slot.memory_of(mode.gradients).begin()
            body = self.warmed_up(source, slot, bucket, mode, briefly)
            if offloading is not None and mode.gradients:
                (body.activations,) = offloading.prepare(self._executor, [body], slot.index)
            with self.checked(briefly):
                recording = self._executor.record(body, pool)
            nbytes = pool.settle()
        self.keep(source, slot, mode, body, recording, nbytes)

    @contextmanager
    def recording(self, bucket: Bucket) -> Iterator[None]:
        """Be around all that is done for recordings of a bucket.

        Raises:
            CaptureError: Anything inside went wrong.
        """
        with (
            ONE_THREAD,
            TURNS.recording(),
            self._piece.around(),
            as_capture_error(f"bucket {bucket}"),
            put_back(self._executor.generators()),  # ranks draw alike, and one of them may record alone
            self._watch.undone(unless_it_ends=True),
        ):
            # All parts of a chain are recorded inside.
            self._kept = KeptTensors(self._watch.tensors_of(every_module(self._watch.roots)))
            try:
                yield
            finally:
                self._kept = NOTHING

    def warmed_up(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, briefly: bool) -> RegionBody:
        """Return work that ran outside a capture and can be recorded.

        Modules that are in another mode than is recorded are switched while it runs.
        """
        if mode.gradients:
            source.sinks.prepare()
        switched = mode.training if isinstance(mode.training, bool) else None
        body = RegionBody(
            self._program,
            slot.buffers[bucket],
            bucket,
            source.aliases,
            source.sinks if mode.gradients else None,
            self._executor.side_stream() if self._piece.has_side_stream(bucket) else None,
            partial(self._watch.passing, switched),
            slot.border,
        )
        body.state = source.number
        body.looked_at = partial(watched_pass, self._watch, self._executor.generators())

        def output_gradients(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            shapes = ((f"output_gradient:{i}", tuple(o.shape), o.dtype) for i, o in enumerate(outputs))
            return tuple(slot.for_gradients.view(*shape).zero_() for shape in shapes)

        self._piece.compile(bucket.tokens)
        self._program.load_example(slot.buffers[bucket], bucket)
        self._executor.warm_up(body, output_gradients, briefly)
        return body

    @contextmanager
    def checked(self, briefly: bool) -> Iterator[None]:
        """Record inside; modules and their tensors hold what they held before: what a capture makes is not for them.

        Raises:
            CaptureError: Passes change what a replay would not.
        """
        held = self._watch.contents()
        with self._kept.put_back():
            with self._watch.passing():
                yield
            changed = held.changed()
            if briefly and (first := [each.text for each in changed if each.place not in self._always_changed]):
                raise CaptureError(f"layers' first passes change attributes: {listed(first)}")
            self._always_changed.update(each.place for each in changed)
            if changed:
                texts = listed([each.text for each in changed])
                LOGGER.info("%s: replays do not set what a forward does: %s", self.name, texts)
            if left := [each.text for each in changed if each.leaves]:
                what = f"each forward changes an attribute, which a graph does not: {listed(left)}"
                raise Refused(Fallback.LEAVES_TENSORS, what)
            held.put_back()

    def keep(
        self, source: Source, slot: Slot, mode: Mode, body: RegionBody, recording: Recording, nbytes: int
    ) -> Recorded:
        """Note a recording in its source, and return it with what is to be known of it.

        Args:
            source: What the model is.
            slot: Where it was recorded.
            mode: What it was recorded as.
            body: What was recorded.
            recording: The recording.
            nbytes: What it needs of the slot's memory.

        Raises:
            CaptureError: Memory is not where the source found it.
        """
        if source.moved(mode.gradients):
            raise CaptureError("memory of parameters or of their main_grad was moved inside a step")
        recorded = Recorded(recording, body.output_gradients, nbytes)
        source.recordings[slot.index, body.bucket, mode] = recorded
        source.warm.add(mode)
        return recorded

    def _tidy(self) -> None:
        """Give back what no recording uses any more, and count the rest."""
        for slot in self._every_slot():
            slot.static.keep(self._used_in(slot))
            self._trim(slot)
        self.count_memory()

    def _trim(self, slot: Slot) -> None:
        """Give memory of recordings back that those which are left do without; a microbatch may hold a dropped one."""
        if slot.free:
            held = (source.recordings[place].nbytes for source in self._sources for place in source.in_slot(slot))
            slot.memory.keep(max(held, default=0))

    def _used_in(self, slot: Slot) -> Iterator[Tensor]:
        """Yield the static inputs and output gradients of what is recorded in a slot."""
        for buffers in slot.buffers.values():
            yield from buffers.values()
        for source in self._sources:
            for place in source.in_slot(slot):
                yield from source.recordings[place].output_gradients

    def count_memory(self) -> None:
        """Note what slots, gradients and offloaded activations take now in the region's statistics."""
        statistics, offloading = self._statistics, self._piece.offloading
        shared, pinned = self._shared_bytes()
        statistics.graph_bytes = sum(map(self._graph_bytes, self._every_slot()))
        statistics.static_bytes = shared + sum(slot.static.nbytes for slot in self._every_slot())
        statistics.gradient_bytes = static_bytes_of(source.sinks for source in self._sources)
        statistics.pinned_bytes = pinned if offloading is None else offloading.pinned_bytes

    def slot_bytes(self) -> int:
        """Return the device memory of the slot that takes most, in bytes."""
        shared = self._shared_bytes()[0] // max(len(self.slots), 1)
        taken = (self._graph_bytes(slot) + slot.static.nbytes for slot in self._every_slot())
        return shared + max(taken, default=0)

    def _graph_bytes(self, slot: Slot) -> int:
        """Return the device memory of a slot's recordings that the region counts."""
        return slot.memory.nbytes

    def _shared_bytes(self) -> tuple[int, int]:
        """Return what the region counts of memory that others use as well, on the device and page-locked."""
        return 0, 0


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
