"""A region as it is recorded: its slots, warm-up, what passes must not leave behind."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ...announce import LOGGER
from ..changes.model_watch import ModelWatch
from ..changes.source import Recorded, Source
from ..changes.sources import Sources
from ..changes.state import listed
from ..errors import CaptureError, OutOfMemoryInCapture, Refused, first_line
from ..fallback import Fallback
from ..instance import every_module
from ..piece import Piece
from ..planning.buckets import Bucket
from ..replays.slot import ChainSlot, Slot
from ..reports.statistics import BucketStatistics, RegionStatistics
from .capture import put_back
from .executor import Executor
from .recording import ONE_THREAD, Mode, Recording, RegionBody
from .watched_pass import KeptTensors, watched_pass

# What is recorded in a slot.
Place = tuple[Bucket, Mode]

NOTHING = KeptTensors(())


class Part:
    """A region as it is recorded, with others or alone; see `Chain`.

    Args:
        piece: What is recorded.
        executor: Makes the recordings.
        watch: Follows the model; everything that is recorded is a pass of it.
        sources: What recordings are made from.
        statistics: Of the region; memory and time are counted there.
        source: Returns what the model is now, or why it cannot be recorded.

    Attributes:
        name: Of the program.
        sources, statistics, source: See above.
        planned: What a capture records in each slot, largest first.
        slots: The region's.
        forward_slot: For passes without a backward while another microbatch holds the first slot; None without one.
    """

    def __init__(
        self,
        piece: Piece,
        executor: Executor,
        watch: ModelWatch,
        sources: Sources,
        statistics: RegionStatistics,
        source: Callable[[], Source | Fallback],
    ) -> None:
        self.name = piece.program.name
        self._program, self._piece, self._executor, self._watch = piece.program, piece, executor, watch
        self.sources, self.source, self.statistics = sources, source, statistics
        self.planned: Sequence[Sequence[Place]] = ()
        self.slots: list[Slot] = []
        self.forward_slot: Slot | None = None
        self._kept = NOTHING
        self._always_changed: set[str] = set()

    def every_slot(self) -> list[Slot]:
        """Return the slots, also that of passes without a backward."""
        return [*self.slots, *([] if self.forward_slot is None else [self.forward_slot])]

    def new_slot(self, index: int, common: ChainSlot, buckets: Sequence[Bucket]) -> Slot:
        """Return a slot with static inputs for some buckets and no recordings."""
        executor = self._executor
        slot = Slot(index, executor.device, common, self._piece.shared, executor.static_memory())
        for bucket in sorted(set(buckets), reverse=True):
            self._add_inputs(slot, bucket)
        return slot

    def add_inputs(self, bucket: Bucket) -> None:
        """Make one more bucket's static inputs in every slot.

        Raises:
            CaptureError: There is no memory for them.
        """
        self.statistics.buckets.setdefault(bucket, BucketStatistics())
        for slot in self.every_slot():
            self._add_inputs(slot, bucket)

    def _add_inputs(self, slot: Slot, bucket: Bucket) -> None:
        if bucket not in slot.buffers:
            with as_capture_error("static inputs"):
                slot.buffers[bucket] = slot.input_buffers(self._program.input_specs(bucket))

    @contextmanager
    def recording(self, bucket: Bucket) -> Iterator[None]:
        """Be around all that is done for recordings of a bucket, of all parts of the chain.

        Raises:
            CaptureError: Anything inside went wrong.
        """
        with (
            ONE_THREAD,
            self._piece.around(),
            as_capture_error(f"bucket {bucket}"),
            put_back(self._executor.generators()),  # ranks draw alike, and one of them may record alone
            self._watch.undone(unless_it_ends=True),
        ):
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
            slot.common.border,
        )
        body.state = source.number
        body.looked_at = partial(watched_pass, self._watch, self._executor.generators())

        def output_gradients(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            shapes = ((f"output_gradient:{i}", tuple(o.shape), o.dtype) for i, o in enumerate(outputs))
            return tuple(slot.for_gradients.view(*shape).zero_() for shape in shapes)

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

    def keep_static(self) -> None:
        """Give back static tensors that no recording uses any more."""
        for slot in self.every_slot():
            slot.static.keep(self._used_in(slot))

    def _used_in(self, slot: Slot) -> Iterator[Tensor]:
        """Yield the static inputs and output gradients of what is recorded in a slot."""
        for buffers in slot.buffers.values():
            yield from buffers.values()
        for source in self.sources:
            for place in source.in_slot(slot):
                yield from source.recordings[place].output_gradients


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
