"""Comparing replays with eager while training runs: outputs, then the gradient of each parameter.

The first training microbatch of a recording proves it, and every so many steps one more is compared. Eager runs the
same microbatch and leaves nothing behind. Ranks that see the same microbatches decide together. Off unless switched on,
until its costs are measured on GPUs.
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
from torch.autograd import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves, tree_map_only

from ..announce import announce, warn
from ..switches import PROOF
from .changes.dict_watch import WATCHER
from .changes.source import Source
from .errors import ProofError
from .instance import every_module
from .program import Piece, RankConsensus
from .recordings.chain import Part
from .recordings.executor import Executor
from .recordings.recording import Gradients, reach_of
from .recordings.warm_up import copies_of
from .replays.gradients import receiving
from .replays.replay import BackwardObserver, Replay

# Of all time, for proofs that come again. A first one takes less than the capture of its recording.
SHARE = 0.005
LEAST_STEPS = 100
# Of a gradient's elements, by the root mean square of all of the region's: what rounding leaves of small gradients.
ABSOLUTE = 1e-3
# Relative difference of eager passes with other random states, from which on they draw numbers, so that a replay draws
# others, too; where passes with the same states are equal, any difference is.
DRAWS = 0.01
# Free memory for a proof of gradients, by what the recording takes: eager's activations are as large.
ROOM = 1.25
# What ranks agree on for a proof, above all numbers of steps.
FAILED, DREW = 2.0**60, math.inf


class Finding(NamedTuple):
    """What was compared, the norm of the difference, eager's norm, and the largest difference that passes."""

    what: str
    difference: float
    size: float
    bound: float


class Pass:
    """Eager's pass over a microbatch, which can run again later.

    Args:
        call: The call, with its arguments.
        outputs: Returns the region's outputs in what the call returned.
        owner: A module whose attributes may hold inputs as well.
    """

    def __init__(
        self, call: partial[Any], outputs: Callable[[Any], Sequence[Tensor]] = tuple, owner: nn.Module | None = None
    ) -> None:
        self._call, self._outputs, self._owner = call, outputs, owner
        self._copies: dict[int, Tensor] = {}
        self._attributes: dict[str, Any] = {}

    def run(self) -> Sequence[Tensor]:
        """Return the outputs."""
        return self._outputs(self._call())

    def keep(self, inputs: Sequence[Tensor]) -> None:
        """Copy what is read of floating point, which training may overwrite; hosts know integers by their storage.

        Args:
            inputs: The region's differentiable inputs.
        """
        held = {} if self._owner is None else vars(self._owner)
        self._attributes = {name: value for name, value in held.items() if any(value is each for each in inputs)}
        read = tree_leaves((self._call.args, self._call.keywords, self._attributes))
        for tensor in (each for each in read if isinstance(each, Tensor) and each.is_floating_point()):
            self._copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """Return the leaf in the place of an argument; None without one."""
        return self._copies.get(id(tensor))

    def again(self) -> Sequence[Tensor]:
        """Return the outputs of a pass over the copies, which have no gradient yet."""
        for copy in self._copies.values():
            copy.grad = None
        arguments = tree_map_only(Tensor, self._own, (self._call.args, self._call.keywords))
        held = {} if self._owner is None else vars(self._owner)
        with WATCHER.silent():
            held.update(tree_map_only(Tensor, self._own, self._attributes))
        try:
            return self._outputs(self._call.func(*arguments[0], **arguments[1]))
        finally:
            with WATCHER.silent():
                held.update(self._attributes)

    def _own(self, tensor: Tensor) -> Tensor:
        copy = self._copies.get(id(tensor), tensor)
        return copy.view_as(copy) if copy.requires_grad else copy  # no leaf, as what an earlier module returns


class Held:
    """What generators and tensors hold when the object is made. A graph's writes leave no trace in version counters.

    Args:
        generators: The generators.
        tensors: The tensors.
    """

    def __init__(self, generators: Iterable[torch.Generator], tensors: Iterable[Tensor]) -> None:
        self._states = {generator: generator.get_state() for generator in generators}
        self._values = copies_of(tensors)

    def drew_until(self, later: "Held") -> bool:
        """Whether a generator was used in between."""
        return not all(torch.equal(state, later._states[each]) for each, state in self._states.items())

    def put_back_generators(self) -> None:
        """Let generators be where they were."""
        for generator, state in self._states.items():
            generator.set_state(state)

    def put_back(self) -> None:
        """Let all be as it was."""
        self.put_back_generators()
        with torch.no_grad():
            for tensor, values in self._values:
                with _unsafe_preserve_version_counter(tensor):  # another microbatch may have saved it for its backward
                    tensor.copy_(values)


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
        self._output_gradients: Sequence[Tensor | None] = ()
        self._compares = False
        self.output: float | None = None
        self.gradient: float | None = None
        self.seconds, self.begun = 0.0, _now(self._device)
        self.before = self._held()

    def _held(self) -> Held:
        watch, generators = self.part.watch, {*self.part.executor.generators(), torch.default_generator}
        return Held(generators, watch.tensors_of(every_module(watch.roots)))

    @contextmanager
    def _as_before(self) -> Iterator[Held]:
        """Run eager inside from where the replay's forward began; yields what there is now, which is put back."""
        watch = self.part.watch
        with self._piece.around(), watch.passing(), watch.undone():
            after = self._held()
            self.before.put_back()
            try:
                yield after
            finally:
                after.put_back()

    def compare_outputs(self, outputs: Sequence[Tensor]) -> bool | None:
        """Return whether outputs, real rows, are near eager's; None where eager draws others each time."""
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
        count, tolerance = len(outputs), self._piece.tolerance
        noisy = any(difference for difference, _ in norms[count : 2 * count])
        drew = any(difference > (DRAWS * size if noisy else 0) for difference, size in norms[2 * count :])
        found = [Finding(f"output {i}", d, size, tolerance * size) for i, (d, size) in enumerate(norms[:count])]
        self.output = _largest(found)
        passed = self._proofs.judge(self, found, drew)
        if passed:
            self._call.keep(self._inputs)
        return passed

    def before_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """See `BackwardObserver`."""
        self.begun, self._output_gradients = _now(self._device), output_gradients
        self._compares = not self._proofs.consensus.agree(self._refusal).largest

    def _refusal(self) -> float:
        """Return 0 where gradients can be compared on this rank: they are alone in `main_grad`, and memory suffices."""
        sums = [each for each in self.source.sinks.added_to() if each is not None]
        written = bool(sums) and bool(torch.stack(torch._foreach_norm(sums)).any())
        given = zip(self.source.sinks.parameters, self.source.sinks.given, strict=True)
        known = all(type(parameter) is nn.Parameter for parameter, main_grad in given if main_grad is not None)
        lacking = any(t.requires_grad and self._call.copy_of(t) is None for t in self._inputs[:1])
        return float(written or lacking or not known or not self._proofs.has_room(self._nbytes))

    def after_backward(self, gradients: Gradients) -> Gradients | None:
        """See `BackwardObserver`: returns eager's gradients where the replay's differ."""
        if self._compares and (found := self._compared(gradients)) is not None:
            self.gradient = _largest(found)
            if not self._proofs.judge(self, found):
                return self._eagers(gradients)
        self._proofs.proven(self)
        return None

    def _compared(self, gradients: Gradients) -> list[Finding] | None:
        sinks, added = self.source.sinks, self.source.sinks.added_to()
        norms: dict[int, Tensor] = {}

        def compare(place: int, expected: Tensor | None) -> None:
            returned = gradients.parameters[place]
            norms[place] = _norms(added[place] if returned is None else returned, expected, self._device)

        if (inputs := self._backward(compare, gradients)) is None:
            return None
        of_inputs = [
            _norms(None if a is None else a[: len(tensor)], copy.grad, self._device, self._real)
            for tensor, a, copy in inputs
        ]
        for place in range(len(sinks.parameters)):
            if place not in norms:
                compare(place, None)
        numbers = torch.stack([*(norms[place] for place in range(len(norms))), *of_inputs]).tolist()
        counts = [parameter.numel() for parameter in sinks.parameters]
        square = sum(size * size for _, size in numbers[: len(counts)]) / max(sum(counts), 1)
        tolerance = self._piece.tolerance
        known = {p: name for root in self.part.watch.roots for name, p in root.named_parameters()}
        names = [known.get(parameter, "a parameter") for parameter in sinks.parameters]
        small = [ABSOLUTE * math.sqrt(square * count) for count in counts] + [0.0] * len(of_inputs)
        names += [f"input {place}" for place in range(len(of_inputs))]
        return [
            Finding(f"the gradient of {name}", difference, size, tolerance * size + rest)
            for name, (difference, size), rest in zip(names, numbers, small, strict=True)
        ]

    def _eagers(self, gradients: Gradients) -> Gradients:
        """Return eager's gradients; what the replay added to `main_grad` is replaced there."""
        added, inputs = self.source.sinks.added_to(), list(gradients.inputs)
        parameters: list[Tensor | None] = [None] * len(gradients.parameters)
        for main_grad in added:
            if main_grad is not None:
                main_grad.zero_()

        def take(place: int, expected: Tensor) -> None:
            if (main_grad := added[place]) is not None:
                main_grad.copy_(expected)
            else:
                parameters[place] = expected

        for place, (_, _, copy) in enumerate(self._backward(take, gradients) or ()):
            inputs[place] = copy.grad
        return Gradients(tuple(inputs), tuple(parameters), gradients.reach)

    def _backward(
        self, receive: Callable[[int, Tensor], None], gradients: Gradients
    ) -> list[tuple[Tensor, Tensor | None, Tensor]] | None:
        """Run eager's forward and backward; each parameter's gradient is let go of once it was received.

        Returns:
            Each input that wants a gradient, the replay's gradient and the leaf that has eager's; None where eager's
            backward would reach a parameter itself, whose hooks would take it for training.
        """
        sinks = self.source.sinks
        with self._as_before(), torch.enable_grad(), self.source.aliases.active(sinks.handed) as aliases:
            for place, (parameter, main_grad) in enumerate(zip(sinks.parameters, sinks.given, strict=True)):
                receiving(aliases[parameter], main_grad, partial(receive, place))
            with self.source.autocasting(), self._piece.standing_in():
                outputs = self._call.again()
            pairs = zip(outputs, self._output_gradients, strict=True)
            roots = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
            if any(reach_of([o for o, _ in roots], dict(enumerate(sinks.parameters)))):
                self._proofs.excluded[f"gradients of {self.part.name}"] = "a parameter is held by what is no module"
                return None
            # Not for some inputs: checkpoints inside refuse that.
            torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
        inputs = zip(self._inputs, gradients.inputs, map(self._call.copy_of, self._inputs), strict=True)
        return [(tensor, actual, copy) for tensor, actual, copy in inputs if copy is not None and copy.requires_grad]


class Proofs:
    """The proofs of one module's recordings: when they are due, what came of them.

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
        self._steps: deque[float] = deque(maxlen=LEAST_STEPS)
        self._step_began = time.perf_counter()
        self._step, self._again = 0, math.inf
        self._under_way = False
        # By the key of a recording that failed: whether its gradients did.
        self._suspects: dict[tuple[object, ...], bool] = {}
        self._seconds = 0.0
        self.results: list[tuple[float | None, float | None]] = []

    def has_room(self, nbytes: int) -> bool:
        """Whether eager's activations have room on the device beside a recording of so many bytes."""
        device = self._executor.device
        if device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info(device)[0]
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached >= ROOM * nbytes

    def begin_step(self, step: int) -> None:
        """Note that a training step begins."""
        now = time.perf_counter()
        if self._step:
            self._steps.append(now - self._step_began)
        self._step, self._step_began, self._under_way, self.call = step, now, False, None

    def may_be_due(self, sources: Iterable[Source]) -> bool:
        """Whether a replay of a region may have to be compared in this step."""
        return self._step >= self._again or any(source.unproven for source in sources)

    def run(
        self, part: Part, piece: Piece, replay: Replay, batch: Any, observer: BackwardObserver | None
    ) -> tuple[Tensor, ...] | None:
        """Replay a microbatch and compare it with eager where that is due; returns None where it is to run eager.

        Raises:
            ProofError: A recording differs from eager for the second time, and the run is strict.
        """
        call, self.call = self.call, None
        due = replay.recorded.place in replay.source.unproven or self._step >= self._again
        if self._under_way or call is None or not due or self._is_excluded(part, piece.unproven):
            return replay.run(batch, observer)  # others have no observer
        proof = Proof(self, part, piece, replay, batch, call)
        outputs = replay.run(batch)
        self._under_way = True
        passed = proof.compare_outputs(outputs)
        if passed is False:
            proof.before.put_back()
            return None
        if passed and any(output.requires_grad for output in outputs):
            replay.observer = proof
        elif passed:
            self.proven(proof)
        return outputs

    def _is_excluded(self, part: Part, reason: str = "") -> bool:
        """Whether a region is not compared, for a reason that is noted once."""
        if reason:
            self.excluded[part.name] = reason
        if part.name in self.excluded:
            for source in part.sources:
                source.unproven.clear()
        return part.name in self.excluded

    def judge(self, proof: Proof, found: Sequence[Finding], drew: bool = False) -> bool | None:
        """Return what all ranks say to what this one found: whether it passes; None where random numbers differ.

        Raises:
            ProofError: A recording differs from eager for the second time, and the run is strict.
        """
        seconds = _now(self._executor.device) - proof.begun
        proof.seconds += seconds
        self._seconds += seconds
        known = (each for each in found if math.isfinite(each.size))
        failing = next((each for each in known if not each.difference <= each.bound), None)
        step = max(median(self._steps), 1e-6) if self._steps else 1.0
        steps = max(LEAST_STEPS, math.ceil(proof.seconds / (SHARE * step)))
        own = DREW if drew else steps if failing is None else FAILED
        agreed = self.consensus.agree(lambda: own).largest
        if agreed == DREW:
            self._is_excluded(proof.part, "it draws random numbers, others than eager")
            return None
        if agreed >= FAILED:
            self._failed(proof, failing)
            return False
        self._again = self._step + agreed
        return True

    def proven(self, proof: Proof) -> None:
        """Note that a recording passed all that could be compared."""
        if self._suspects.get(proof.key) and proof.gradient is None:
            return  # its gradients differed, and are to be compared again
        self._suspects.pop(proof.key, None)
        proof.source.unproven.discard(proof.place)
        self.results.append((proof.output, proof.gradient))

    def _failed(self, proof: Proof, finding: Finding | None) -> None:
        """Note that a recording differs from eager; the second time in a row its region stays eager."""
        part, what = proof.part, "a replay of another rank differs from eager"
        if finding is not None:
            what = f"{finding.what} differs from eager's by {finding.difference:.2e}, allowed are {finding.bound:.2e}"
        if proof.key not in self._suspects:
            self._under_way, self._suspects[proof.key] = False, proof.gradient is not None
            proof.source.unproven.add(proof.place)
            announce(f"{part.name}: {what}; this microbatch took eager's, the next one is compared, too")
            return
        del self._suspects[proof.key]
        part.disproved = True
        self.disproved.add(part.name)
        text = (
            f"{part.name}: {what}, for the second time in a row; it runs eager from now on. Please report it with the "
            f"output of `bridge-cg doctor --details --json`. Without {PROOF}=1 nothing is compared"
        )
        if self._strict:
            raise ProofError(text)
        warn(text)

    def notes(self, left: int) -> dict[str, str]:
        """Return lines of the report.

        Args:
            left: Recordings that were not compared.
        """
        notes = {f"not compared with eager, {name}": reason for name, reason in self.excluded.items()}
        if self.results or left:
            outputs = [output for output, _ in self.results if output is not None]
            gradients = [gradient for _, gradient in self.results if gradient is not None]
            exact = f"{max(outputs, default=0.0):.1e} ({outputs.count(0.0)} bit-equal)"
            notes["proofs"] = (
                f"{len(self.results)} replays compared with eager, {len(gradients)} with gradients, in "
                f"{self._seconds:.1f} s; largest differences: outputs {exact}, gradients "
                f"{max(gradients, default=0.0):.1e}; recordings without a proof: {left}"
            )
        return notes


def _now(device: torch.device) -> float:
    """Return the time once the device has done what there is to do, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _norms(actual: Tensor | None, expected: Tensor | None, device: torch.device, rows: Tensor | None = None) -> Tensor:
    """Return the norm of the difference and that of the second, `[2]` fp32, over rows of a mask; None is zeros."""

    def values(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return torch.zeros((), device=device)
        if rows is not None and tensor.shape[:1] == rows.shape:
            tensor = torch.where(rows.view(-1, *(1,) * (tensor.dim() - 1)), tensor, 0)
        return tensor.float()

    one, other = values(actual), values(expected)
    return torch.stack([torch.linalg.vector_norm(one - other), torch.linalg.vector_norm(other)])


def _largest(found: Sequence[Finding]) -> float:
    """Return the largest relative difference."""
    return max((each.difference / (each.size or 1.0) for each in found), default=0.0)
