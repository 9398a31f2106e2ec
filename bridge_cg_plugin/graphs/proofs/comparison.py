"""Comparing one replayed microbatch with eager: outputs, then the gradient of each parameter.

Eager runs the same microbatch and leaves nothing behind.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..instance import every_module
from ..program import Piece
from ..recordings.chain import Part
from ..recordings.recording import Gradients, reach_of
from ..replays.gradients import receiving
from ..replays.replay import Replay
from .eager_pass import Held, Pass

# Of a gradient's elements, by the root mean square of all of the region's: what rounding leaves of small gradients.
ABSOLUTE = 1e-3
# How many times as far from eager a replay's gradient may be as eager's over inputs that are rounded otherwise, and one
# row of an output as all of it.
NOISE, ROW = 4, 4
# Relative difference of eager passes with other random states, from which on they draw numbers, so that a replay draws
# others, too; where passes with the same states are equal, any difference is.
DRAWS = 0.01


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


class Comparison:
    """One replayed microbatch beside eager.

    Args:
        part: The region.
        piece: What it is made of.
        replay: The microbatch's replay.
        batch: The microbatch.
        call: Eager's pass.

    Attributes:
        source, place, nbytes: What was recorded from; the recording's slot, bucket, mode and memory.
        key: Names the recording; equal on all ranks.
        before: The state in which the replay's forward began.
        output_gradients: Those that the backward began with.
        output, gradient: Largest relative differences; None where they were not compared.
    """

    def __init__(self, part: Part, piece: Piece, replay: Replay, batch: Any, call: Pass) -> None:
        self.part, self._piece, self._call = part, piece, call
        # Not the replay: it holds this object, and its slot would not be free before a garbage collection.
        self.source, self.place, self.nbytes = replay.source, replay.recorded.place, replay.recorded.nbytes
        self.key = part.name, self.source.number, self.place
        self._inputs = part.program.differentiable_inputs(batch)
        self._real, self._device = piece.real_rows(batch), part.executor.device
        self._full = part.program.size(batch) == replay.bucket.tokens
        self.output_gradients: Sequence[Tensor | None] = ()
        # Of gradients, by place among parameters and then inputs.
        self._found: dict[int, Finding] = {}
        self.output: float | None = None
        self.gradient: float | None = None
        self.before = self._held()

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

    def of_outputs(self, outputs: Sequence[Tensor]) -> list[Finding]:
        """Compare outputs, their real rows.

        Raises:
            NotComparable: A replay draws other random numbers than eager.
        """
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

    def keep_inputs(self) -> None:
        """Keep what eager reads, for its backward."""
        self._call.keep(self._inputs)

    def lacks_gradients(self) -> bool:
        """Whether gradients cannot be compared on this rank: `main_grad` is in use, or the region has changed since."""
        sums = [each for each in self.source.sinks.added_to() if each is not None]
        written = bool(sums) and bool(torch.stack(torch._foreach_norm(sums)).any())
        given = zip(self.source.sinks.parameters, self.source.sinks.given, strict=True)
        known = all(type(parameter) is nn.Parameter for parameter, main_grad in given if main_grad is not None)
        lacking = any(t.requires_grad and self._call.copy_of(t) is None for t in self._inputs[:1])
        changed = self.part.sources.recorded_state(gradients=True) != self.source.number  # since the forward
        return written or lacking or changed or not known

    def of_gradients(self, gradients: Gradients) -> list[Finding]:
        """Compare the gradients of parameters, then of inputs.

        Raises:
            NotComparable: Eager's backward would reach a parameter itself.
        """
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

    def beside_noise(self) -> list[Finding]:
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

    def eagers(self, gradients: Gradients) -> Gradients:
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
            pairs = zip(outputs, self.output_gradients, strict=True)
            roots = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
            if any(reach_of([o for o, _ in roots], dict(enumerate(sinks.parameters)))):
                raise NotComparable("a parameter is held by what is no module")
            # Not for some inputs: checkpoints inside refuse that.
            torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
        for place, copy in enumerate(map(self._call.copy_of, self._inputs), len(sinks.parameters)):
            if copy is not None and copy.requires_grad:
                receive(place, copy.grad)


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
