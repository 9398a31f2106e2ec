"""Comparing replays with eager while training runs: outputs, then the gradient of each parameter.

The first microbatch of a recording proves it, and one of every so many steps is compared later on. Eager runs the same
microbatch and leaves nothing behind. Ranks that see the same microbatches decide together.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..announce import announce, warn
from ..switches import PROOF
from .buckets import Bucket
from .eager_pass import Held, Pass
from .errors import ProofError, named, release_frames
from .instance import every_module
from .program import Piece, RankConsensus
from .recordings.chain import Part
from .recordings.executor import Executor
from .recordings.recording import Gradients, reach_of
from .replays.gradients import receiving
from .replays.replay import BackwardObserver, Replay

# Of all time, for proofs that come again, and for first ones: half of what a model's may take that has an encoder and a
# decoder on graphs.
SHARE, FIRST_SHARE = 0.0025, 0.01
LEAST_STEPS = 128
# The last proofs whose costs decide when the next one is due.
COSTS = 16
# Of a gradient's elements, by the root mean square of all of the region's: what rounding leaves of small gradients.
ABSOLUTE = 1e-3
# How many times as far from eager a replay's gradient may be as eager's over inputs that are rounded otherwise, and one
# row of an output as all of it.
NOISE, ROW = 4, 4
# Relative difference of eager passes with other random states, from which on they draw numbers, so that a replay draws
# others, too; where passes with the same states are equal, any difference is.
DRAWS = 0.01
# Free memory for eager's passes, by what the recording takes: with a backward as much; a forward alone keeps little.
ROOM, FORWARD_ROOM = 1.25, 0.5
# What ranks agree on for a proof, above all costs.
FAILED, LEFT_OUT = 2.0**60, math.inf
# What they agree on before a backward: gradients are compared, are not, or memory is too short for it.
COMPARED, NOT_COMPARED, SHORT = 0.0, 1.0, 2.0


class Finding(NamedTuple):
    """What was compared, the norm of the difference, eager's norm, and the largest difference that passes."""

    what: str
    difference: float
    size: float
    bound: float

    @property
    def passes(self) -> bool:
        """Whether the difference is within the bound; what is infinite in eager is not judged."""
        return not math.isfinite(self.size) or self.difference <= self.bound


class NotComparable(Exception):
    """Says why a replay is not compared with eager."""


class Proof(BackwardObserver):
    """One replayed microbatch that is compared with eager.

    Args:
        proofs: Those of the module.
        part: The region.
        piece: What it is made of.
        replay: The microbatch's replay.
        batch: The microbatch.
        call: Eager's pass.

    Attributes:
        source, place: What was recorded from; the recording's slot, bucket and mode.
        key: Names the recording; equal on all ranks.
        begun: When the device began what is compared, by `time.perf_counter`.
        seconds: What the comparison has taken so far.
        counted: Whether its cost is known.
        output, gradient: Largest relative differences; None where they were not compared.
    """

    def __init__(
        self,
        proofs: "Proofs",
        part: Part,
        piece: Piece,
        replay: Replay,
        batch: Any,
        call: Pass,
    ) -> None:
        self._proofs, self.part, self._piece, self._call = proofs, part, piece, call
        # Not the replay: it holds this object, and its slot would not be free before a garbage collection.
        self.source, self.place, self._nbytes = replay.source, replay.recorded.place, replay.recorded.nbytes
        self.key = part.name, self.source.number, self.place
        self._inputs = part.program.differentiable_inputs(batch)
        self._real, self._device = piece.real_rows(batch), part.executor.device
        self._full = part.program.size(batch) == replay.bucket.tokens
        self._output_gradients: Sequence[Tensor | None] = ()
        self._compares = False
        # Of gradients, by place among parameters and then inputs.
        self._found: dict[int, Finding] = {}
        self.output: float | None = None
        self.gradient: float | None = None
        self.seconds, self.begun, self.counted = 0.0, _now(self._device), False
        self.before = self._held()

    @property
    def gradients_name(self) -> str:
        """Names the region's gradients in reports."""
        return f"gradients of {self.part.name}"

    def _held(self) -> Held:
        watch, generators = self.part.watch, {*self.part.executor.generators(), torch.default_generator}
        # A module may also hold the memory of its gradients.
        gradients = {each.untyped_storage()._cdata for each in self.source.sinks.given if type(each) is Tensor}
        tensors = (*watch.tensors_of(every_module(watch.roots)), *self._piece.counts())
        written = (each for each in tensors if type(each) is Tensor)
        return Held(generators, (each for each in written if each.untyped_storage()._cdata not in gradients))

    @contextmanager
    def _as_before(self) -> Iterator[Held]:
        """Run eager inside from where the replay's forward began; yields what there is now, which is put back."""
        watch = self.part.watch
        with watch.passing(), watch.undone():
            after = self._held()
            self.before.put_back()
            try:
                yield after
            finally:
                after.put_back()

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

    def compare_outputs(self, outputs: Sequence[Tensor]) -> bool | None:
        """Return whether outputs, real rows, are near eager's; None where they cannot be compared."""
        passed = self._judged(self.part.name, partial(self._of_outputs, outputs))
        if passed and any(output.requires_grad for output in outputs):
            self._call.keep(self._inputs)
        return passed

    def _of_outputs(self, outputs: Sequence[Tensor]) -> list[Finding]:
        with self._as_before() as after, torch.no_grad():
            expected = self._call.run()
            runs = [outputs]
            if self.before.drew_until(after):  # which attention does without dropout as well
                for states in (self.before, after):
                    self.before.put_back()
                    states.put_back_generators()
                    runs.append(self._call.run())
            pairs = [pair for run in runs for pair in zip(run, expected, strict=True)]
            norms = torch.stack([_norms(*pair, self._device, self._real) for pair in pairs]).tolist()
        count = len(outputs)
        noisy = any(difference for difference, _ in norms[count : 2 * count])
        if any(difference > (DRAWS * size if noisy else 0) for difference, size in norms[2 * count :]):
            raise NotComparable("it draws random numbers, others than eager")
        tolerance = 0.0 if self._piece.exact and self._full else self._piece.tolerance
        found = [Finding(f"output {i}", d, size, tolerance * size) for i, (d, size) in enumerate(norms[:count])]
        self.output = _largest(found)
        rows = [_worst_row(*pair, self._real).item() for pair in pairs[:count]]
        return found + [
            Finding(f"a row of {each.what}", worst, each.size, ROW * tolerance)
            for each, worst in zip(found, rows, strict=True)
        ]

    def before_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """See `BackwardObserver`."""
        self.begun, self._output_gradients = _now(self._device), output_gradients
        refusal = self._proofs.consensus.agree(self._refusal).largest
        self._compares = refusal == COMPARED
        if refusal == SHORT:
            self._proofs.leave_out(self.gradients_name, f"free memory is below {ROOM} times what a recording takes")

    def _refusal(self) -> float:
        """Return whether gradients can be compared on this rank."""
        sums = [each for each in self.source.sinks.added_to() if each is not None]
        written = bool(sums) and bool(torch.stack(torch._foreach_norm(sums)).any())
        given = zip(self.source.sinks.parameters, self.source.sinks.given, strict=True)
        known = all(type(parameter) is nn.Parameter for parameter, main_grad in given if main_grad is not None)
        lacking = any(t.requires_grad and self._call.copy_of(t) is None for t in self._inputs[:1])
        changed = self.part.sources.recorded_state(gradients=True) != self.source.number  # since the forward
        if written or lacking or changed or not known or self.gradients_name in self._proofs.excluded:
            return NOT_COMPARED
        return COMPARED if self._proofs.has_room(ROOM * self._nbytes) else SHORT

    def after_backward(self, gradients: Gradients) -> Gradients | None:
        """See `BackwardObserver`: returns eager's gradients where the replay's differ."""
        if self._compares:
            looks = partial(self._of_gradients, gradients), self._beside_noise
            if self._judged(self.gradients_name, *looks) is False:
                return self._eagers(gradients)
        self._proofs.proven(self)
        return None

    def _of_gradients(self, gradients: Gradients) -> list[Finding]:
        """Compare the gradients of parameters, then of inputs."""
        replayed, norms = self._replayed(gradients), dict[int, Tensor]()
        parameters = self.source.sinks.parameters

        def compare(place: int, expected: Tensor | None) -> None:
            rows = None if place < len(parameters) else self._real
            norms[place] = _norms(replayed[place], expected, self._device, rows)

        self._backward(compare)
        for place in range(len(parameters)):
            if place not in norms:
                compare(place, None)
        places = sorted(norms)
        numbers = torch.stack([norms[place] for place in places]).tolist()
        counts = [parameter.numel() for parameter in parameters]
        square = sum(size * size for _, size in numbers[: len(counts)]) / max(sum(counts), 1)
        small = [ABSOLUTE * math.sqrt(square * count) for count in counts] + [0.0] * len(self._inputs)
        tolerance = self._piece.tolerance
        self._found = {
            place: Finding(self._name(place), difference, size, tolerance * size + small[place])
            for place, (difference, size) in zip(places, numbers, strict=True)
        }
        self.gradient = _largest(self._found.values())
        return list(self._found.values())

    def _beside_noise(self) -> list[Finding]:
        """Return what was found of gradients, bounded by how far eager's move where inputs are rounded otherwise."""
        wanted = {place for place, each in self._found.items() if not each.passes}
        first: dict[int, Tensor] = {}

        def measure(place: int, gradient: Tensor) -> None:
            if place in first:
                moved, found = _norms(gradient, first[place], self._device)[0].item(), self._found[place]
                rest = found.bound - self._piece.tolerance * found.size
                self._found[place] = found._replace(bound=max(found.bound, NOISE * moved + rest))
            elif place in wanted:
                first[place] = gradient

        for odd in (None, True, False):
            self._backward(measure, odd)
        return list(self._found.values())

    def _name(self, place: int) -> str:
        parameters = self.source.sinks.parameters
        if place >= len(parameters):
            return f"the gradient of input {place - len(parameters)}"
        known = {p: name for root in self.part.watch.roots for name, p in root.named_parameters()}
        return f"the gradient of {known.get(parameters[place], 'a parameter')}"

    def _replayed(self, gradients: Gradients) -> list[Tensor | None]:
        """Return the replay's gradients of parameters, then of inputs, their real rows."""
        pairs = zip(gradients.parameters, self.source.sinks.added_to(), strict=True)
        inputs = zip(gradients.inputs, self._inputs, strict=True)
        return [
            *(added if returned is None else returned for returned, added in pairs),
            *(None if gradient is None else gradient[: len(tensor)] for gradient, tensor in inputs),
        ]

    def _eagers(self, gradients: Gradients) -> Gradients:
        """Return eager's gradients; what the replay added to `main_grad` is replaced there."""
        added, count = self.source.sinks.added_to(), len(gradients.parameters)
        taken: list[Tensor | None] = [*[None] * count, *gradients.inputs]
        for main_grad in added:
            if main_grad is not None:
                main_grad.zero_()

        def take(place: int, expected: Tensor | None) -> None:
            main_grad = added[place] if place < count else None
            if main_grad is not None and expected is not None:
                main_grad.copy_(expected)
            else:
                taken[place] = expected

        self._backward(take)
        return Gradients(tuple(taken[count:]), tuple(taken[:count]), gradients.reach)

    def _backward(self, receive: Callable[[int, Any], None], odd: bool | None = None) -> None:
        """Run eager's forward and backward.

        Args:
            receive: Called with the place and the gradient of each parameter, which is let go of then; behind them, of
                each input that wants one.
            odd: See `Pass.again`.

        Raises:
            NotComparable: The backward would reach a parameter itself, whose hooks would take it for training.
        """
        sinks = self.source.sinks
        with self._as_before(), torch.enable_grad(), self.source.aliases.active(sinks.handed) as aliases:
            for place, (parameter, main_grad) in enumerate(zip(sinks.parameters, sinks.given, strict=True)):
                receiving(aliases[parameter], main_grad, partial(receive, place))
            with self.source.autocasting(), self._piece.standing_in():
                outputs = self._call.again(odd)
            pairs = zip(outputs, self._output_gradients, strict=True)
            roots = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
            if any(reach_of([o for o, _ in roots], dict(enumerate(sinks.parameters)))):
                raise NotComparable("a parameter is held by what is no module")
            # Not for some inputs: checkpoints inside refuse that.
            torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
        for place, copy in enumerate(map(self._call.copy_of, self._inputs), len(sinks.parameters)):
            if copy is not None and copy.requires_grad:
                receive(place, copy.grad)


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
        proof = Proof(self, part, piece, replay, batch, call)
        outputs = replay.run(batch)
        passed = proof.compare_outputs(outputs)
        if passed is False:
            proof.before.put_back()
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
        now = _now(self._executor.device)
        self._seconds += now - proof.begun
        proof.seconds, proof.begun = proof.seconds + now - proof.begun, now
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
        awaited = proof.gradient is None and proof.gradients_name not in self.excluded
        if self._suspects.get(proof.key) and awaited:
            return  # its gradients differed, and are to be compared again
        self._suspects.pop(proof.key, None)
        proof.source.unproven.discard(proof.place)
        self.results.append((proof.output, proof.gradient))

    def failed(self, proof: Proof, finding: Finding | None) -> None:
        """Note that a recording differs from eager; the second time in a row its region stays eager.

        Args:
            proof: The proof.
            finding: What this rank found; None where another one did.

        Raises:
            ProofError: It is the second time, and the run is strict.
        """
        part, what = proof.part, "a replay of another rank differs from eager"
        if finding is not None:
            what = f"{finding.what} differs from eager's by {finding.difference:.2e}, allowed are {finding.bound:.2e}"
        if proof.key not in self._suspects:
            self._under_way, self._suspects[proof.key] = False, proof.gradient is not None
            announce(f"{part.name}: {what}; this microbatch took eager's, the next one is compared, too")
            return
        del self._suspects[proof.key]
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


def _now(device: torch.device) -> float:
    """Return the time once the device has done what this stream has to do, in seconds.

    Not all streams: one may wait for another pipeline stage, which waits for this rank.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _norms(actual: Tensor | None, expected: Tensor | None, device: torch.device, rows: Tensor | None = None) -> Tensor:
    """Return the norm of the difference and that of the second, `[2]` fp32, over rows of a mask; None is zeros."""

    one, other = (torch.zeros((), device=device) if t is None else _of_rows(t, rows) for t in (actual, expected))
    return torch.stack([torch.linalg.vector_norm(one - other), torch.linalg.vector_norm(other)])


def _of_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    if rows is not None and tensor.shape[:1] == rows.shape:
        tensor = torch.where(rows.view(-1, *(1,) * (tensor.dim() - 1)), tensor, 0)
    return tensor.float()


def _worst_row(actual: Tensor, expected: Tensor, rows: Tensor | None) -> Tensor:
    """Return the largest relative difference of a row, small rows by the mean of all."""
    one, other = _of_rows(actual, rows), _of_rows(expected, rows)
    sizes = torch.linalg.vector_norm(other, dim=-1)
    worst: Tensor = (torch.linalg.vector_norm(one - other, dim=-1) / sizes.clamp(min=sizes.mean())).nan_to_num(0.0)
    return worst.amax()


def _largest(found: Iterable[Finding]) -> float:
    """Return the largest relative difference."""
    return max((each.difference / (each.size or 1.0) for each in found), default=0.0)
