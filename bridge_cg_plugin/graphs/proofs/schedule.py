"""When replays are compared with eager while training runs, and what follows from it.

The first microbatch of a recording proves it, and one of every so many steps is compared later on. Ranks that see the
same microbatches decide together.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...announce import announce, warn
from ...switches import PROOF
from ..buckets import Bucket
from ..errors import ProofError, named, release_frames
from ..program import Piece, RankConsensus
from ..recordings.chain import Part
from ..recordings.executor import Executor
from ..recordings.recording import Gradients
from ..replays.replay import BackwardObserver, Replay
from .comparison import Comparison, Finding, NotComparable
from .eager_pass import Pass

# Of all time, for proofs that come again, and for first ones: half of what a model's may take that has an encoder and a
# decoder on graphs.
SHARE, FIRST_SHARE = 0.0025, 0.01
LEAST_STEPS = 128
# The last proofs whose costs decide when the next one is due.
COSTS = 16
# Free memory for eager's passes, by what the recording takes: with a backward as much; a forward alone keeps little.
ROOM, FORWARD_ROOM = 1.25, 0.5
# What ranks agree on for a proof, above all costs.
FAILED, LEFT_OUT = 2.0**60, math.inf
# What they agree on before a backward: gradients are compared, are not, or memory is too short for it.
COMPARED, NOT_COMPARED, SHORT = 0.0, 1.0, 2.0


class Proof(BackwardObserver):
    """A comparison under way, whose backward is still to come.

    Args:
        proofs: Those of the module.
        comparison: Of the microbatch.
        begun: When the device began what is compared, by `time.perf_counter`.

    Attributes:
        begun: See the argument; of the backward, once that has begun.
        seconds: What the comparison has taken so far.
        counted: Whether its cost is known.
        gradients_name: Names the region's gradients in reports.
    """

    def __init__(self, proofs: "Proofs", comparison: Comparison, begun: float) -> None:
        self._proofs, self.comparison = proofs, comparison
        self.gradients_name = f"gradients of {comparison.part.name}"
        self._compares = False
        self.seconds, self.begun, self.counted = 0.0, begun, False

    def compare_outputs(self, outputs: Sequence[Tensor]) -> bool | None:
        """Return whether outputs, real rows, are near eager's; None where they cannot be compared."""
        comparison = self.comparison
        passed = self._judged(comparison.part.name, partial(comparison.of_outputs, outputs))
        if passed and any(output.requires_grad for output in outputs):
            comparison.keep_inputs()
        return passed

    def before_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """See `BackwardObserver`."""
        self.begun, self.comparison.output_gradients = self._proofs.now(), output_gradients
        refusal = self._proofs.consensus.agree(self._refusal).largest
        self._compares = refusal == COMPARED
        if refusal == SHORT:
            self._proofs.leave_out(self.gradients_name, f"free memory is below {ROOM} times what a recording takes")

    def _refusal(self) -> float:
        """Return whether gradients can be compared on this rank."""
        if self.comparison.lacks_gradients() or self.gradients_name in self._proofs.excluded:
            return NOT_COMPARED
        return COMPARED if self._proofs.has_room(ROOM * self.comparison.nbytes) else SHORT

    def after_backward(self, gradients: Gradients) -> Gradients | None:
        """See `BackwardObserver`: returns eager's gradients where the replay's differ."""
        if self._compares:
            looks = partial(self.comparison.of_gradients, gradients), self.comparison.beside_noise
            if self._judged(self.gradients_name, *looks) is False:
                return self.comparison.eagers(gradients)
        self._proofs.proven(self)
        return None

    def _judged(self, what: str, *looks: Callable[[], list[Finding]]) -> bool | None:
        """Return whether all ranks find that what they compared is near eager's; None where it cannot be compared.

        Args:
            what: Names what is compared.
            looks: Compare; all ranks go on to the next one where the one before failed on any.
        """
        for look in looks:
            found, reason = list[Finding](), ""
            try:
                found = look()
            except NotComparable as error:
                reason = str(error)
            except Exception as error:  # the replay is right as far as anybody knows, and training goes on
                reason = f"eager cannot run beside it: {named(error)}"
                release_frames(error)
            failing = next((each for each in found if not each.passes), None)
            agreed = self._proofs.agreed(self, failing is not None, bool(reason))
            if agreed != FAILED:
                break
        if agreed == LEFT_OUT:
            self._proofs.leave_out(what, reason or "another rank cannot compare it")
            return None
        if agreed == FAILED:
            self._proofs.failed(self, failing)
        return agreed != FAILED


class Proofs:
    """The proofs of one module's recordings: when they are due, what came of them.

    They are due in steps whose number is a multiple of a power of two, so that ranks with other microbatches, which
    wait for each other in each step, compare in the same ones.

    Args:
        executor: Makes the recordings.
        consensus: Ranks that see the same microbatches.
        strict: Whether a recording that differs from eager stops the run.

    Attributes:
        call: Eager's pass over the microbatch under way, where one may be compared.
        disproved: Names of regions that stay eager.
        excluded: What is not compared, and why.
        results: The largest relative differences of outputs and of gradients in each proof that passed; None where they
            were not compared.
    """

    def __init__(self, executor: Executor, consensus: RankConsensus, strict: bool) -> None:
        self._executor, self.consensus, self._strict = executor, consensus, strict
        self.call: Pass | None = None
        self.disproved: set[str] = set()
        self.excluded: dict[str, str] = {}
        # Seconds of the last steps; what the last proofs took in steps, and all, the same on all ranks.
        self._steps: deque[float] = deque(maxlen=LEAST_STEPS)
        self._costs: deque[float] = deque(maxlen=COSTS)
        self._spent = 0.0
        self._began = self._step_began = time.perf_counter()
        self._step, self._first, self._turn = 0, False, ""
        self._under_way = False
        # By the key of a recording that failed: whether its gradients did.
        self._suspects: dict[tuple[object, ...], bool] = {}
        self._seconds = 0.0
        self.results: list[tuple[float | None, float | None]] = []

    def now(self) -> float:
        """Return the time once the device has done what this stream has to do, in seconds.

        Not all streams: one may wait for another pipeline stage, which waits for this rank.
        """
        if self._executor.device.type == "cuda":
            torch.cuda.current_stream(self._executor.device).synchronize()
        return time.perf_counter()

    def has_room(self, nbytes: float) -> bool:
        """Whether the device has so much free memory."""
        device = self._executor.device
        if device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info(device)[0]
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached >= nbytes

    def begin_step(self, step: int, parts: Sequence[Part]) -> None:
        """Note that a step or an evaluation begins.

        Args:
            step: Number of the training step, or of the last one.
            parts: All regions; each in its turn has a recording compared again.
        """
        now, self._first = time.perf_counter(), step % self._steps_between(FIRST_SHARE) == 0
        if step > self._step:
            self._steps.append(now - self._step_began)
            self._step_began = now
        else:  # in evaluations, ranks with other microbatches do not wait for each other
            self._first = self._spent <= FIRST_SHARE * step
        self._step, self._under_way, self.call = step, False, None
        turn, rest = divmod(step, self._steps_between(SHARE, LEAST_STEPS))
        compared = [part.name for part in parts if not (part.disproved or part.name in self.excluded)]
        self._turn = compared[turn % len(compared)] if compared and not rest else ""

    def _steps_between(self, share: float, least: int = 1) -> int:
        """Return after how many steps a proof may come, for proofs to take no more than a share of all time."""
        needed = max(least, math.ceil(max(self._costs, default=0.0) / share))
        return 1 << (needed - 1).bit_length()

    def may_be_due(self, part: Part) -> bool:
        """Whether a replay of a region may have to be compared in this step."""
        unproven = self._first and any(source.unproven for source in part.sources)
        return unproven or part.name == self._turn or any(name == part.name for name, *_ in self._suspects)

    def run(
        self, part: Part, piece: Piece, replay: Replay, batch: Any, observer: BackwardObserver | None
    ) -> tuple[Tensor, ...] | None:
        """Replay a microbatch and compare it with eager where that is due; returns None where it is to run eager.

        Raises:
            ProofError: A recording differs from eager for the second time, and the run is strict.
        """
        call, self.call = self.call, None
        if call is None or self._under_way or not self._is_due(part, replay) or self._is_excluded(part, piece):
            return replay.run(batch, observer)  # others have no observer
        self._under_way = True
        needed = FORWARD_ROOM * replay.recorded.nbytes
        if self.consensus.agree(lambda: float(not self.has_room(needed))).largest:
            self.leave_out(f"bucket {replay.bucket} of {part.name}", "free memory is too little for eager's forward")
            replay.source.unproven.discard(replay.recorded.place)
            return replay.run(batch, observer)
        begun = self.now()
        proof = Proof(self, Comparison(part, piece, replay, batch, call), begun)
        outputs = replay.run(batch)
        passed = proof.compare_outputs(outputs)
        if passed is False:
            proof.comparison.before.put_back()
            return None
        if passed and any(output.requires_grad for output in outputs):
            replay.observer = proof
        elif passed:
            self.proven(proof)
        return outputs

    def _is_due(self, part: Part, replay: Replay) -> bool:
        place = replay.recorded.place
        first = self._first and place in replay.source.unproven
        return first or part.name == self._turn or (part.name, replay.source.number, place) in self._suspects

    def _is_excluded(self, part: Part, piece: Piece) -> bool:
        if piece.incomparable:
            self.leave_out(part.name, piece.incomparable)
        if part.name in self.excluded:
            for source in part.sources:
                source.unproven.clear()
        return part.name in self.excluded

    def leave_out(self, what: str, reason: str) -> None:
        """Note, and say once for each reason, that something is not compared."""
        if reason not in self.excluded.values():
            announce(f"{what}: not compared with eager: {reason}")
        self.excluded[what] = reason

    def agreed(self, proof: Proof, failed: bool, left_out: bool) -> float:
        """Return what all ranks say to what this one found: `FAILED`, `LEFT_OUT`, or what it took in steps."""
        ended = self.now()
        self._seconds += ended - proof.begun
        proof.seconds, proof.begun = proof.seconds + ended - proof.begun, ended
        cost = proof.seconds / (max(median(self._steps), 1e-6) if self._steps else 1.0)
        agreed = self.consensus.agree(lambda: LEFT_OUT if left_out else FAILED if failed else cost).largest
        if agreed < FAILED:
            if proof.counted:  # gradients come behind outputs, whose cost is in theirs
                self._spent -= self._costs.pop()
            proof.counted = True
            self._costs.append(agreed)
            self._spent += agreed
        return agreed

    def proven(self, proof: Proof) -> None:
        """Note that a recording passed all that could be compared."""
        compared = proof.comparison
        awaited = compared.gradient is None and proof.gradients_name not in self.excluded
        if self._suspects.get(compared.key) and awaited:
            return  # its gradients differed, and are to be compared again
        self._suspects.pop(compared.key, None)
        compared.source.unproven.discard(compared.place)
        self.results.append((compared.output, compared.gradient))

    def failed(self, proof: Proof, finding: Finding | None) -> None:
        """Note that a recording differs from eager; the second time in a row its region stays eager.

        Args:
            proof: The proof.
            finding: What this rank found; None where another one did.

        Raises:
            ProofError: It is the second time, and the run is strict.
        """
        part, key, what = proof.comparison.part, proof.comparison.key, "a replay of another rank differs from eager"
        if finding is not None:
            what = f"{finding.what} differs from eager's by {finding.difference:.2e}, allowed are {finding.bound:.2e}"
        if key not in self._suspects:
            self._under_way, self._suspects[key] = False, proof.comparison.gradient is not None
            announce(f"{part.name}: {what}; this microbatch took eager's, the next one is compared, too")
            return
        del self._suspects[key]
        part.disproved = True
        self.disproved.add(part.name)
        text = (
            f"{part.name}: {what}, for the second time in a row; it runs eager from now on. Please report it with the "
            f"output of `bridge-cg doctor --details --json`. With {PROOF}=0 nothing is compared"
        )
        if self._strict:
            raise ProofError(text)
        warn(text)

    def notes(self, left: Sequence[Bucket]) -> dict[str, str]:
        """Return lines of the report.

        Args:
            left: The bucket of each recording that was not compared.
        """
        notes = {}
        for reason in dict.fromkeys(self.excluded.values()):
            first, *others = (what for what, why in self.excluded.items() if why == reason)
            more = f" and {len(others)} more" if others else ""
            notes[f"not compared with eager, {first}{more}"] = reason
        if self.results or left:
            outputs = [output for output, _ in self.results if output is not None]
            gradients = [gradient for _, gradient in self.results if gradient is not None]
            exact = f"{max(outputs, default=0.0):.1e} ({outputs.count(0.0)} bit-equal)"
            of = f", of {', '.join(map(str, sorted(set(left))))}" if left else ""
            share = self._seconds / max(time.perf_counter() - self._began, 1e-6)
            notes["proofs"] = (
                f"{len(self.results)} replays compared with eager, {len(gradients)} with gradients, in "
                f"{self._seconds:.1f} s, {share:.2%} of the time; largest differences: outputs {exact}, gradients "
                f"{max(gradients, default=0.0):.1e}; recordings without a proof: {len(left)}{of}; one of every "
                f"{self._steps_between(SHARE, LEAST_STEPS)} steps is compared"
            )
        return notes
