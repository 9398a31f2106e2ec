"""A region as it is recorded: its slots, warm-up, what passes must not leave behind."""

from collections.abc import Iterable, Iterator, Sequence
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

    Attributes:
        program: The piece of the model.
        name: Of the program.
        statistics: Memory and time are counted there, too.
        buckets: What batches use, in the order in which they are tried.
        planned: What a capture records in each slot, largest first.
        forward_slot: For passes without a backward while another microbatch holds the first slot; None without one.
    """

    def __init__(self, piece: Piece, executor: Executor) -> None:
        self.program, self.name, self._piece, self.executor = piece.program, piece.program.name, piece, executor
        self.statistics, self._growth = RegionStatistics(), piece.growth
        self.buckets = self._ordered(piece.buckets)
        self.planned: Sequence[Sequence[Place]] = ()
        self._watch: ModelWatch | None = None
        self._sources: Sources | None = None
        self._slots: list[Slot] = []
        self.forward_slot: Slot | None = None
        self._kept = NOTHING
        self._always_changed: set[str] = set()

    @property
    def sources(self) -> Sources:
        """What recordings are made from.

        Raises:
            RuntimeError: Nothing is captured.
        """
        return self._captured(self._sources)

    @property
    def watch(self) -> ModelWatch:
        """What follows the model; everything that is recorded is a pass of it.

        Raises:
            RuntimeError: Nothing is captured.
        """
        return self._captured(self._watch)

    def _captured[Held](self, held: Held | None) -> Held:
        if held is None:
            raise RuntimeError(f"{self.name} is not captured")
        return held

    def source(self) -> Source | Fallback:
        """Return what the model is now, or why it cannot be recorded."""
        return self.sources.current

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

    def every_slot(self) -> list[Slot]:
        """Return the slots, also that of passes without a backward."""
        return [*self._slots, *([] if self.forward_slot is None else [self.forward_slot])]

    def new_slot(self, index: int, common: ChainSlot, buckets: Sequence[Bucket]) -> Slot:
        """Return a slot with static inputs for some buckets and no recordings."""
        executor = self.executor
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
                slot.buffers[bucket] = slot.input_buffers(self.program.input_specs(bucket))

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
            put_back(self.executor.generators()),  # ranks draw alike, and one of them may record alone
            self.watch.undone(unless_it_ends=True),
        ):
            self._kept = KeptTensors(self.watch.tensors_of(every_module(self.watch.roots)))
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
            self.program,
            slot.buffers[bucket],
            bucket,
            source.aliases,
            source.sinks if mode.gradients else None,
            self.executor.side_stream() if self._piece.has_side_stream(bucket) else None,
            partial(self.watch.passing, switched),
            slot.common.border,
        )
        body.state = source.number
        body.looked_at = partial(watched_pass, self.watch, self.executor.generators())

        def output_gradients(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            shapes = ((f"output_gradient:{i}", tuple(o.shape), o.dtype) for i, o in enumerate(outputs))
            return tuple(slot.for_gradients.view(*shape).zero_() for shape in shapes)

        self.program.load_example(slot.buffers[bucket], bucket)
        self.executor.warm_up(body, output_gradients, briefly)
        return body

    @contextmanager
    def checked(self, briefly: bool) -> Iterator[None]:
        """Record inside; modules and their tensors hold what they held before: what a capture makes is not for them.

        Raises:
            CaptureError: Passes change what a replay would not.
        """
        held = self.watch.contents()
        with self._kept.put_back():
            with self.watch.passing():
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
