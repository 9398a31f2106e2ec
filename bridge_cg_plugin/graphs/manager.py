"""A module that runs on graphs over a training run: observe, plan, record, dispatch, fall back, report."""

import gc
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..announce import announce, warn, warn_once
from ..switches import PROOF, switched_on
from . import ranges
from .buckets import Bucket, Demand
from .changes.model_watch import ModelWatch
from .errors import CaptureError, OtherRankFailed, OutOfMemoryInCapture, Retry, named, reason_of, release_frames
from .fallback import Fallback
from .instance import InstanceMethod
from .memory.ranges import DeviceMemoryError
from .memory.returning import release_homes
from .parts import Parts, RunsLater
from .program import Call, Eager, Piece, Surroundings, Workload
from .proofs.eager_pass import Pass
from .proofs.schedule import Proofs
from .ranges import named_range
from .recordings.capture import collected_later
from .recordings.chain import NOTHING_LEAVES, Chain, Offloading
from .recordings.executor import Executor, give_up
from .region import Region, all_idle
from .reports import RegionStatistics, counts_of, merge_statistics, render

# From so many recordings on, a capture takes more than a few seconds.
MANY_RECORDINGS = 4
# Moves of a model's memory after which it is taken to move all the time.
MANY_MOVES = 16


class GraphManager:
    """Stands in for a module's `forward`, on the instance, until `detach`.

    Until `capture` the module runs eager and its workload observes the calls. Then a call is replayed where it can be;
    else it runs eager and is counted with the reason.

    Args:
        model: The module.
        workload: What the module brings.
        executor: Makes recordings.
        surroundings: What is around the module in this run.

    Attributes:
        slots: Microbatches between forward and backward at once, fixed by a capture.
        captured: Whether graphs exist.
        failure: Why the last capture failed, None if it did not.
        step_number: Number of the training step under way, from 1.
        in_step: Whether a training step is under way.
        proofs: What compares replays with eager; None where nothing does.
        at_detach: What else `detach` undoes.
    """

    def __init__(
        self, model: nn.Module, workload: Workload, executor: Executor, surroundings: Surroundings | None = None
    ) -> None:
        self.model, self.workload, self.executor = model, workload, executor
        self.surroundings = surroundings or Surroundings()
        self.slots = self.surroundings.slots
        self.consensus, self.bucket_consensus = self.surroundings.consensus, self.surroundings.bucket_consensus
        self.failure: str | None = None
        self._failed_for, self._retry = Fallback.CAPTURE_FAILED, Retry(turns=1)
        self.step_number, self.in_step = 0, False
        self.at_detach = ExitStack()
        self._regions: list[Region] = []
        self._parts: Parts | None = None
        self._own = RegionStatistics()
        # Seconds of recordings of which it is known whether a step waited for them.
        self._noted_seconds = 0.0
        self._paused, self._stays_away = 0, False
        self._watch: ModelWatch | None = None
        # What microbatches ask for, and the regions that get it.
        self._demand: Demand | None = None
        self._growing: list[Region] = []
        self._warned: set[str] = set()
        workload.manager, self.captured = self, False
        self.proofs = Proofs(executor, self.bucket_consensus, workload.strict) if switched_on(PROOF, True) else None
        self._untraced = torch.compiler.disable(self._forward)
        self._instance = InstanceMethod(model, "forward", self._forward)

    def detach(self) -> None:
        """Give the module its former forward back and drop all graphs."""
        self.reset()
        self._instance.restore()
        self.at_detach.close()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward: a replay where possible, eager otherwise."""
        if torch.compiler.is_dynamo_compiling():  # what a loop compiles around the module must not trace captures
            return self._untraced(*args, **kwargs)
        call = self.workload.read(*args, **kwargs)
        eager = partial(self.eager_forward, *args, **kwargs)
        if ranges.on:
            with named_range(f"microbatch, {self.workload.noun}, {call.tokens} tokens"):
                return self.run(call, eager)
        return self.run(call, eager)

    def eager_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        with self.passing():
            return self._instance.original(*args, **kwargs)

    def passing(self) -> AbstractContextManager[None]:
        """Return what passes of the module run in."""
        return nullcontext() if self._watch is None else self._watch.passing()

    def run(self, call: Call, eager: partial[Any]) -> Any:
        """Replay a call where possible, else run it eager and count why.

        Args:
            call: The call.
            eager: Runs the module's own forward for it.
        """
        if self._demand is not None and call.note is not None and not self._paused:
            self._demand.saw(call.note)
        if self.captured and self._paused:
            return self._run_eager(call, eager)
        if not self.captured:
            if self.failure is None:
                self.workload.observe(call)
            elif call.counts:
                self.fell_back(self._failed_for, call.tokens)
        elif self.executor.memory_away and not self._take_back():
            self.fell_back(Fallback.MEMORY_RELEASED, call.tokens)
            with self.paused():  # nor is it timed
                return self._run_eager(call, eager)
        elif call.refusal is not None:
            self.fell_back(call.refusal, call.tokens)
        elif self._parts is not None:
            self._await_parameters()
            decided = self._parts.decide(call.batch)
            if not isinstance(decided, Fallback):
                return self._parts.run(call.batch, decided, eager)
            self.fell_back(decided, call.tokens)
            return self.workload.run_eager(call, eager)
        else:
            if (proofs := self._regions[0].proofs) is not None:
                proofs.call = Pass(eager, self.workload.outputs, self.model)
            outputs = self.workload.replay(self._regions[0], call.batch)
            if outputs is not None:
                return self.workload.returned(outputs)
        return self._run_eager(call, eager)

    def _run_eager(self, call: Call, eager: Eager) -> Any:
        self._await_parameters()
        return self.workload.run_eager(call, eager)

    def _await_parameters(self) -> None:
        """Wait for the parameters before an eager pass as a replay does.

        Eager's own hooks could start to gather them in another order, and ranks of a data-parallel group share a
        communicator: one may replay, or have nothing to run, while another runs eager.
        """
        if self.surroundings.before_replay is not None:
            self.surroundings.before_replay()

    def release_memory(self) -> int:
        """Take the graphs' memory off the device until the next microbatch that replays; returns how many bytes left.

        Nothing leaves in a step, or while a microbatch is between its forward and its backward.
        """
        if self.in_step or not all(region.is_idle() for region in self._regions):
            self._warn_once("memory cannot leave while a microbatch is between its forward and its backward")
            return 0
        try:
            return self.executor.release_memory() + release_homes()
        except DeviceMemoryError as error:
            self._warn_once(f"memory did not leave the device: {error}")
            return 0

    def _take_back(self) -> bool:
        """Take memory back that left; returns whether it is there. What does not fit is tried again in the next step.

        Dropping the graphs instead would cost captures, and the device often has room again a step later.
        """
        if self._stays_away:
            return False
        try:
            self.executor.restore_memory()
        except DeviceMemoryError as error:
            self._stays_away = True
            self._warn_once(f"memory cannot return: {error}. Microbatches run eager; each step tries again")
        return not self._stays_away

    def _warn_once(self, text: str) -> None:
        warn_once(f"{self.workload.title}: {text}", self._warned)

    def fell_back(self, reason: Fallback, tokens: int | None = None) -> None:
        """Count a microbatch that runs eager in the whole module."""
        self._own.fell_back(self.workload.noun, reason, tokens)

    def capture(self) -> bool:
        """Plan buckets and capture; returns whether graphs exist now.

        Raises:
            CaptureError: Capturing failed and the user asked for a strict run.
        """
        self._note_pause()
        self.reset()
        try:
            with self._counted():
                if self.executor.memory_away:
                    self.executor.restore_memory()
                self.workload.capture()
                self.consensus.agree(self.workload.captured)
        except BaseException as error:
            self.reset()
            if not isinstance(error, Exception):
                raise
            self._fail(error)
            return False
        self.failure, self._noted_seconds = None, self._seconds()
        self._retry = Retry(turns=1)
        return True

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count all the time inside as that of recordings, with waits for other ranks."""
        before, started = self._seconds(), time.perf_counter()
        try:
            # Backwards and writes of other passes follow, though the first one may be of inference mode.
            with collected_later(), torch.inference_mode(False):
                yield
        finally:
            counted = self._seconds() - before
            self._own.capture_seconds += time.perf_counter() - started - counted

    def _seconds(self) -> float:
        return self._own.capture_seconds + sum(region.statistics.capture_seconds for region in self._regions)

    def _note_pause(self) -> None:
        """Note that a step waited for what was recorded since the last look."""
        pause, own = self._seconds() - self._noted_seconds, self._own
        own.pause_seconds, own.longest_pause = own.pause_seconds + pause, max(own.longest_pause, pause)
        self._noted_seconds += pause

    def record(
        self,
        pieces: Sequence[Piece],
        demand: Demand | None = None,
        offloading: Offloading = NOTHING_LEAVES,
        runs_later: RunsLater | None = None,
    ) -> list[Region]:
        """Capture pieces of the module between two steps, and let their call sites replay them.

        Args:
            pieces: One whose call is the module's forward, or parts of it with calls of their own.
            demand: What microbatches ask for, of pieces that grow.
            offloading: Where activations are; where some leave, parts share memory.
            runs_later: Of parts that run again in the backward, one after the other; see `Parts`.

        Returns:
            Their regions, in their order.
        """
        patched = [(module, name) for piece in pieces for module, name, _ in piece.calls]
        if self._watch is None:  # it follows the module until `reset`
            replaced = [(self.model, "forward"), *patched]
            self._watch = ModelWatch((self.model,), replaced, (self.model,), self.surroundings.exempt)
        watch = self._watch
        in_turn = runs_later is not None
        slots = 1 if in_turn else self.slots
        around = replace(self.surroundings, slots=slots, consensus=self.bucket_consensus)
        together = patched and (in_turn or offloading is not NOTHING_LEAVES)
        chain = Chain(self.executor, offloading, in_parts=True, in_turn=in_turn) if together else None
        regions = [
            Region(piece, chain or Chain(self.executor, offloading), around, watch, self.workload.strict)
            for piece in pieces
        ]
        self._regions += regions
        for region in regions:
            region.statistics.known, region.statistics.step = self._own.known, self.step_number
            region.disproved = self.proofs is not None and region.name in self.proofs.disproved
            region.prepare()
        if (count := sum(len(places) for region in regions for places in region.planned)) >= MANY_RECORDINGS:
            announce(f"{self.workload.title}: {count} recordings begin")
        for each in dict.fromkeys(region.chain for region in regions):
            each.capture()
        for region, piece in zip(regions, pieces, strict=True):
            if piece.calls:
                self._parts = self._parts or Parts(runs_later)
                self._parts.install(region, piece.calls)
        if demand is not None:
            self._demand, demand.evaluated = demand, []  # regions begin with those for training
            self._growing = [region for region, piece in zip(regions, pieces, strict=True) if piece.growth]
        self.captured = True
        return regions

    def reset(self) -> None:
        """Drop all graphs and their memory; the module runs eager again."""
        if self._parts is not None:
            self._parts.restore()
            self._parts = None
        self._demand, self._growing, self.captured = None, [], False
        for region in self._regions:
            region.reset()
        self._regions = []
        self._noted_seconds = self._seconds()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self.executor.tidy()
        self.workload.forget()

    def _fail(self, error: Exception) -> None:
        title, noun, before = self.workload.title, self.workload.noun, self.failure
        out_of_memory = isinstance(error, (OutOfMemoryInCapture, torch.OutOfMemoryError))
        remedies = [self.workload.out_of_memory_remedy] if out_of_memory else []
        remedy = "".join(f" {sentence}" for sentence in [*getattr(error, "__notes__", []), *remedies])
        self.failure, self._failed_for = named(error), reason_of(error)
        self._retry.failed()
        if self.workload.strict:
            raise CaptureError(f"{title} could not be captured: {self.failure}.{remedy}") from error
        release_frames(error)
        gc.collect()  # a model may keep what its last pass made in a circle
        self.executor.tidy()
        if isinstance(error, OtherRankFailed) or self.failure == before:
            return  # the rank that failed reports it
        warn(f"{title} could not be captured, the {noun} runs eager: {self.failure}.{remedy}")

    @property
    def capture_due(self) -> bool:
        """Whether there are no graphs and a capture is worth a try, once warm-up steps have run.

        One that failed is tried again after one step, two, four and so on.
        """
        return not self.captured and self._retry.due

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the module eager inside, with the graphs kept for afterwards."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def readiness(self) -> tuple[object, ...]:
        """What decides how a microbatch runs besides the microbatch, equal on ranks that run the same one alike."""
        return self.captured, self._paused > 0, *(region.readiness for region in self._regions)

    def begin_step(self) -> None:
        """Note that a training step begins, and record one of the buckets that microbatches missed.

        Raises:
            CaptureError: It could not be recorded, and the user asked for a strict run.
        """
        self._stays_away = False
        self._retry.turn()
        if not (self.captured and self.executor.memory_away) or self._take_back():
            self._grow()
        ranges.look()
        self.step_number += 1
        self._own.step = self.step_number
        for region in self._regions:
            region.statistics.step = self.step_number
        self._begin_proofs()

    def _begin_proofs(self) -> None:
        if self.proofs is not None:
            self.proofs.begin_step(self.step_number, self._regions)
            for region in self._regions:
                region.begin_step(self.proofs)

    def before_evaluation(self) -> None:
        """Note that forward passes without a backward follow, and record a bucket that the last ones missed.

        Raises:
            CaptureError: It could not be recorded, and the user asked for a strict run.
        """
        if not (self.in_step or (self.captured and self.executor.memory_away)):
            self._grow()
        if not self.in_step:
            self._begin_proofs()

    def _grow(self) -> None:
        """Record what is worth it for the mode that the model is in, or everything with more room."""
        if self.captured and self.workload.outgrown and self.model.training:
            self._capture_again()
        elif (demand := self._demand) is not None:
            demand.turn_to(self.model.training)
            # One a step at most: ranks that train other microbatches wait meanwhile.
            if demand.due() and (bucket := demand.next()) and all_idle(self._growing, self.bucket_consensus):
                self._record_bucket(demand, bucket, self.model.training)

    def _record_bucket(self, demand: Demand, bucket: Bucket, training: bool) -> None:
        """Record one more bucket, on all ranks that see the same microbatches.

        Raises:
            CaptureError: It failed, and the run is strict.
        """
        started, what = time.perf_counter(), f"{self.workload.title}: bucket {bucket}"

        def record() -> None:
            for region in self._growing:
                region.add(bucket, training)

        try:
            with self._counted():
                self.bucket_consensus.agree(record)
        except Exception as error:
            for region in self._growing:
                region.drop(bucket)
            demand.refuse(bucket, reason_of(error))
            give_up(error, what, "the others go on", self.workload.strict, self.executor)
            return
        demand.add(bucket, training)
        announce(f"{what} captured in {time.perf_counter() - started:.1f} s")

    def _capture_again(self) -> None:
        """Capture with more room, if no microbatch is in flight on any rank that captures with this one."""
        if not all_idle(self._regions, self.consensus):
            return
        self._note_pause()
        counted = counts_of([self._own, *(region.statistics for region in self._regions)])
        self._own, before = counted, counted.capture_seconds
        self.reset()
        self.capture()
        self._noted_seconds = before
        self._note_pause()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be in a training step: its first replay compares all of the model with what was recorded."""
        self.begin_step()
        with nullcontext() if self._watch is None else self._watch.step():
            self.in_step = True
            try:
                yield
            finally:
                self.in_step = False
                for region in self._regions:
                    region.proofs = None
                self._note_pause()
                if any(region.sources.moves >= MANY_MOVES for region in self._regions):
                    where = f"memory of parameters, buffers or gradients was moved {MANY_MOVES} times"
                    self._warn_once(f"{where}, and graphs are captured again each time, for which steps wait")

    def adds_later(self, parameters: Set[nn.Parameter]) -> bool:
        """Whether the backward under way will yet replay what adds to the gradient of one of these parameters."""
        return self.captured and any(each.sources.hooks.adds_later(parameters) for each in self._regions)

    def statistics(self) -> RegionStatistics:
        """Return what happened so far, over all regions."""
        self._note_pause()
        total = merge_statistics([self._own, *(region.statistics for region in self._regions)])
        total.warmup_microbatches = self.workload.observed
        return total

    def report(self) -> str:
        """Return the run's report as text."""
        notes = self.workload.notes()
        if self.failure is not None:
            notes["not captured"] = self.failure
        if self.proofs is not None and self.captured:
            notes |= self.proofs.notes([bucket for region in self._regions for bucket in region.unproven])
        return render(self.statistics(), self.workload.title, notes)
