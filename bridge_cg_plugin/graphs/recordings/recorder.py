"""Recording a region's buckets into slots."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ...announce import LOGGER
from ..changes.model_watch import ModelWatch
from ..changes.source import Recorded, Source
from ..changes.tables import Entry
from ..errors import CaptureError, OutOfMemoryInCapture, Refused, first_line
from ..fallback import Fallback
from ..instance import every_module
from ..piece import Piece
from ..planning.buckets import Bucket
from ..replays.slot import Slot
from ..reports.ranges import named_range
from .compiling import TURNS
from .executor import Executor
from .generators import put_back
from .layer_kinds import record_warmed_up
from .recording import ONE_THREAD, Mode, Recording, RegionBody
from .watched_pass import KeptTensors, watched_pass

# What is recorded in a slot.
Place = tuple[Bucket, Mode]

NOTHING = KeptTensors(())


class Recorder:
    """Makes slots and fills them with recordings.

    Args:
        piece: What is recorded.
        executor: Makes the recordings.
        watch: Follows the model; everything that is recorded is a pass of it.

    Attributes:
        executor: Makes the recordings.
        offloading: Decides where activations are between forward and backward; None for a part of a chain.
        chain: Parts that this one shares memory with, and that its recordings with a backward are made with.
        name: Of the program.
    """

    def __init__(self, piece: Piece, executor: Executor, watch: ModelWatch) -> None:
        self.executor, self.name = executor, piece.program.name
        self._program, self._piece, self._watch = piece.program, piece, watch
        self.offloading, self.chain = piece.offloading, piece.chain
        self._kept = NOTHING
        self._always_changed: set[Entry] = set()

    def slot(self, index: int, buckets: Sequence[Bucket]) -> Slot:
        """Return a slot with static inputs for some buckets and no recordings."""
        executor = self.executor
        common = None if self.chain is None else self.chain.common(index)
        memory = executor.new_memory() if common is None else common.memory
        slot = Slot(index, executor.device, memory, self._piece.shared, executor.static_memory())
        slot.common = common
        for bucket in sorted(set(buckets), reverse=True):
            self.add_inputs(slot, bucket)
        return slot

    def add_inputs(self, slot: Slot, bucket: Bucket) -> None:
        """Make a bucket's static inputs in a slot, if they are missing.

        Raises:
            CaptureError: There is no memory for them.
        """
        if bucket in slot.buffers:
            return
        with as_capture_error("static inputs"):
            slot.buffers[bucket] = slot.input_buffers(self._program.input_specs(bucket))

    def fill(
        self,
        source: Source,
        slot: Slot,
        places: Sequence[Place],
        trim: Callable[[Slot], None],
        recorded: Callable[[], None] = lambda: None,
    ) -> None:
        """Record in a slot that no microbatch holds; repeat it while its activations exceed their limit.

        What is lost between blocks is known only once they are there.

        Args:
            source: What the model is.
            slot: The slot.
            places: What to record.
            trim: Gives memory back that no recording of a slot uses any more.
            recorded: Called after each recording.

        Raises:
            CaptureError: It failed; what the slot held before stays unless activations took too much.
        """
        while True:
            with torch.inference_mode(False):
                for bucket, mode in places:
                    with named_range(f"capture {self.name}, bucket {bucket}"):
                        self._record(source, slot, bucket, mode)
                    recorded()
            if self.offloading is None:
                return
            total = slot.memory.nbytes + slot.static.nbytes + source.sinks.static_bytes
            if self.offloading.accepts(total):
                return
            held = [(bucket, mode) for _, bucket, mode in source.in_slot(slot)]
            places = sorted(held, key=lambda place: (place[0], place[1].gradients), reverse=True)
            source.forget(slot)
            source.earlier = None
            self.executor.tidy()
            trim(slot)

    def _record(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode) -> None:
        record = partial(self._record_once, source, slot, bucket, mode)
        record_warmed_up(record, mode in source.warm, self.name, bucket)

    def _record_once(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, briefly: bool) -> None:
        with self.recording(bucket):
            pool = slot.memory_of(mode.gradients).begin()
            body = self.warmed_up(source, slot, bucket, mode, briefly)
            if self.offloading is not None and mode.gradients:
                body.activations = self.offloading.prepare(self.executor, body, slot.index)
            with self.checked(briefly):
                recording = self.executor.record(body, pool)
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
            put_back(self.executor.generators()),  # ranks draw alike, and one of them may record alone
            self._watch.undone_by_errors(),
        ):
            # All parts of a chain are recorded inside.
            self._kept = KeptTensors(self._watch.tensors_of(every_module(self._watch.roots)))
            try:
                yield
            finally:
                self._kept = NOTHING

    def warmed_up(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode, briefly: bool) -> RegionBody:
        """Return work that ran outside a capture and can be recorded."""
        body = self._body(source, slot, bucket, mode)

        def output_gradients(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            shapes = ((f"output_gradient:{i}", tuple(o.shape), o.dtype) for i, o in enumerate(outputs))
            return tuple(slot.for_gradients.view(*shape).zero_() for shape in shapes)

        self._piece.compile(bucket.tokens)
        self._program.load_example(slot.buffers[bucket], bucket)
        body.looked_at = partial(watched_pass, self._watch, self.executor.generators())
        self.executor.warm_up(body, output_gradients, briefly)
        return body

    @contextmanager
    def checked(self, briefly: bool) -> Iterator[None]:
        """Record inside; modules and their tensors hold what they held before: what a capture makes is not for them.

        Raises:
            CaptureError: Passes change what a replay would not.
        """
        held = self._watch.contents()
        with self._kept.put_back():
            with self._watch.passing() as changed:
                yield
            changed += held.changed()
            if briefly and (first := [entry for entry in changed if entry not in self._always_changed]):
                raise CaptureError(f"layers' first passes change attributes: {self._watch.described(first)}")
            self._always_changed.update(changed)
            self._check_changed(changed)
            self._watch.put_back(held)

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
        """
        in_place = not source.moved(mode.gradients)
        recorded = Recorded(recording, body.output_gradients, nbytes, in_place)
        source.recordings[slot.index, body.bucket, mode] = recorded
        source.warm.add(mode)
        return recorded

    def _check_changed(self, changed: Sequence[Entry]) -> None:
        """Refuse a model whose every pass leaves another value or tensor in an attribute, which a replay would not.

        Other objects are named in the log.
        """
        if changed:
            LOGGER.info(
                "%s: replays do not set what a forward does: %s", self._program.name, self._watch.described(changed)
            )
        if left := self._watch.left(changed):
            what = f"each forward changes an attribute, which a graph does not: {self._watch.described(left)}"
            raise Refused(Fallback.LEAVES_TENSORS, what)

    def _body(self, source: Source, slot: Slot, bucket: Bucket, mode: Mode) -> RegionBody:
        """Return the work; modules that are in another mode than is recorded are switched while it runs."""
        if mode.gradients:
            source.sinks.prepare()
        sinks = source.sinks if mode.gradients else None
        switched = mode.training if isinstance(mode.training, bool) else None
        side = self.executor.side_stream() if self._piece.has_side_stream(bucket) else None
        buffers = slot.buffers[bucket]
        passing = partial(self._watch.passing, switched)
        body = RegionBody(self._program, buffers, bucket, source.aliases, sinks, side, passing, slot.border)
        body.state = source.number
        return body


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
