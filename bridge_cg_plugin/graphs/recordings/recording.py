"""The work that is recorded of one region at one bucket, over stand-ins for the region's parameters."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from ...upstream_types import MegatronParameter
from ..buckets import Bucket
from ..changes.dict_watch import WATCHER
from ..instance import every_module
from ..program import Buffers, RegionProgram
from ..replays.gradients import GradientSinks, behind
from ..replays.slot import StaticTensors
from .streams import SideStream
from .warm_up import one_layer_of_each_kind

# Where a backward begins: an output, or its place in the autograd graph where the output's memory is not kept.
Root = Tensor | GradientEdge
# Marks an alias whose gradient autograd hands on.
HANDED = "_handed_on"


def sum_of(weight: MegatronParameter) -> Tensor | None:
    """Return the `main_grad` to which the plugin may add a weight's gradient while it is recorded."""
    return None if hasattr(weight, HANDED) else getattr(weight, "main_grad", None)


class ParameterAliases:
    """Fresh leaves over the storage of a set of modules' parameters.

    A parameter's gradient accumulator remembers the stream of its first use and the hooks that data parallelism put on
    it. Recording through aliases leaves both alone: no hook fires during capture, and an eager pass whose autograd
    graph is still alive cannot pull another stream into it.

    Attributes:
        originals: The parameters, each once.
        trainable: Those that required a gradient when the object was made.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places = [
            (module, name, parameter)
            for module in every_module(modules)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.originals: tuple[nn.Parameter, ...] = tuple(dict.fromkeys(p for _, _, p in self._places))
        self.trainable: tuple[nn.Parameter, ...] = tuple(p for p in self.originals if p.requires_grad)

    def replaced(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Return those whose place another parameter has now, with their modules and names."""
        now = [module._parameters.get(name) for module, name, _ in self._places]
        found = zip(self._places, now, strict=True)
        return [place for place, there in found if there is not None and there is not place[2]]

    @contextmanager
    def active(self, handed: Collection[nn.Parameter] = ()) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Put the aliases in the modules for the duration; yields original -> alias.

        Args:
            handed: Parameters whose gradient the plugin must not add to `main_grad` inside: see `sum_of`.
        """
        with torch.inference_mode(False):
            aliases = {p: _alias(p) for p in self.originals}
        for parameter in handed:
            aliases[parameter].__dict__[HANDED] = True
        try:
            with WATCHER.silent():
                for module, name, parameter in self._places:
                    module._parameters[name] = aliases[parameter]
            yield aliases
        finally:
            with WATCHER.silent():
                for module, name, parameter in self._places:
                    module._parameters[name] = parameter


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    # Outside, those of a model made inside can require nothing.
    with torch.inference_mode() if parameter.is_inference() else nullcontext():
        alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)
    return alias


def reach_of(roots: Sequence[Root | None], targets: Mapping[int, Tensor]) -> tuple[frozenset[int], ...]:
    """Return the places of the targets that a backward from each root reaches; None has no backward.

    A function that gives an input no gradient counts as one that does: only its backward shows it.

    Args:
        roots: Where the backward through each output begins.
        targets: Leaves that require gradients, by place.
    """
    places = {get_gradient_edge(target).node: place for place, target in targets.items()}
    if not places:  # as in megatron-core's training: `main_grad` takes all
        return (frozenset(),) * len(roots)
    edges = (get_gradient_edge(root) if isinstance(root, Tensor) else root for root in roots)
    reached = (set[Node]() if edge is None else behind([edge.node]) for edge in edges)
    return tuple(frozenset(places[node] for node in places.keys() & nodes) for nodes in reached)


class Activations:
    """Decides where the tensors are that autograd saves in one recording; what is not overridden leaves them there.

    Attributes:
        copies: Whether any are copied to the host and back.
    """

    copies = False

    def saving(self, fixed: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Be entered around the forward.

        Args:
            fixed: Tensors over memory that outlives the forward: parameters, buffers, static inputs.
        """
        return nullcontext()

    def restoring(self) -> AbstractContextManager[None]:
        """Be entered around the backward."""
        return nullcontext()

    def join(self) -> None:
        """Let the current stream wait for the copies of a forward or backward that ended; a capture needs it."""
        return

    def forget(self) -> None:
        """Drop what is left of a forward whose backward will not come."""
        return


STAY = Activations()


# Address of a storage that came back -> the address at which it was saved. Autograd calls a backward in a thread of its
# own, so a context variable would not do.
_moved: dict[int, int] | None = None


@contextmanager
def returned_storages() -> Iterator[dict[int, int]]:
    """Let saved tensors come back at other addresses inside; yields where to note them."""
    global _moved
    before, _moved = _moved, {}
    try:
        yield _moved
    finally:
        _moved = before


def saved_address(tensor: Tensor) -> int:
    """Return the address at which a tensor that autograd saved lay in the forward; that of others is their own."""
    address = tensor.data_ptr()
    if not _moved:
        return address
    start = tensor.untyped_storage().data_ptr()
    return _moved.get(start, start) + address - start


# What stands in for others while a region is recorded, as kernels and a side stream, does so for the whole process.
ONE_THREAD = RLock()


@dataclass(slots=True)
class Gradients:
    """What a backward leaves behind, in static memory: overwritten by the next backward of the same slot.

    Attributes:
        inputs: Gradients of the differentiable inputs.
        parameters: Gradients of the parameters that autograd must hand on.
        reach: Of each output, the places among inputs and then parameters that a backward from it reaches.
    """

    inputs: tuple[Tensor | None, ...]
    parameters: tuple[Tensor | None, ...]
    reach: tuple[frozenset[int], ...]

    def through(self, output_gradients: Sequence[Tensor | None]) -> "Gradients":
        """Return what eager's backward gives: nothing for what only outputs without a gradient need, not zeros."""
        if not [None for g in output_gradients if g is None]:
            return self
        given = (of_output for of_output, g in zip(self.reach, output_gradients, strict=True) if g is not None)
        reached = frozenset().union(*given)
        kept = [g if place in reached else None for place, g in enumerate(self.inputs + self.parameters)]
        split = len(self.inputs)
        return Gradients(tuple(kept[:split]), tuple(kept[split:]), self.reach)


class Mode(NamedTuple):
    """What a recording was made as, besides its bucket; a tuple as that is.

    Attributes:
        gradients: Whether a backward can follow the forward.
        training: Whether the modules were in training mode, which decides dropout; for each module where they differ.
    """

    gradients: bool
    training: bool | tuple[bool, ...]


TRAINING = Mode(gradients=True, training=True)
EVALUATION = Mode(gradients=False, training=False)


class RegionBody:
    """The recorded work: forward over the input buffers, backward from the output-gradient buffers.

    Args:
        program: The piece of the model.
        buffers: The bucket's static inputs.
        bucket: What is recorded for.
        aliases: Stand-ins for the program's parameters.
        sinks: Where parameter gradients go; None records a forward only, without autograd.
        side: Takes work that the main stream need not wait for; None leaves all of it on one stream.
        passing: Entered around every pass: sets modes, and what modules note in attributes then is their own doing.
        border: Where outputs and gradients of inputs are copied to, so that their own memory is free at once; None
            leaves them in the recording's memory.

    Attributes:
        name: Of the program.
        has_backward: Whether gradients are recorded.
        bucket: What is recorded for.
        state: Number of what the model is; see `Source`.
        output_gradients: Buffers that the backward reads.
        activations: What keeps the tensors that autograd saves.
        looked_at: Entered around the pass over one layer of each kind that follows a whole warm-up pass.
        kinds: Those of layers, as far as they are known.
    """

    def __init__(
        self,
        program: RegionProgram,
        buffers: Buffers,
        bucket: Bucket,
        aliases: ParameterAliases,
        sinks: GradientSinks | None,
        side: SideStream | None = None,
        passing: Callable[[], AbstractContextManager[object]] = nullcontext,
        border: StaticTensors | None = None,
    ) -> None:
        self._side, self._passing, self._border = side, passing, border
        self._program, self._buffers = program, buffers
        self._aliases, self._sinks = aliases, sinks
        specs = program.input_specs(bucket)
        self._differentiable = tuple(name for name, spec in specs.items() if spec.differentiable)
        self.output_gradients: tuple[Tensor, ...] = ()
        self.name, self.has_backward = program.name, sinks is not None
        self.bucket, self.state = bucket, 0
        self.activations = STAY
        self.looked_at: Callable[[], AbstractContextManager[None]] = nullcontext
        self.kinds: dict[nn.Module, Hashable] = {}
        self._device_type = next(iter(buffers.values())).device.type
        self._live: tuple[list[Root | None], list[Tensor], dict[nn.Parameter, nn.Parameter]] | None = None

    def forward(self) -> tuple[Tensor, ...]:
        """Run forward, keeping its autograd graph for `backward` when gradients are wanted."""
        buffers, leaves = dict(self._buffers), []
        if self._side is not None:
            self._side.forget()
        handed = () if self._sinks is None else self._sinks.handed
        with (
            ONE_THREAD,
            torch.set_grad_enabled(self._sinks is not None),
            _own_autocast_cache(),
            self._passing(),
            self._aliases.active(handed) as aliases,
            _own_saved_tensors(),
            nullcontext() if self._side is None else self._side.active(),
            self._program.recording(),
            self._saving(aliases),
        ):
            if self._sinks is not None:
                for name in self._differentiable:
                    leaves.append(buffers[name].detach().requires_grad_())
                    # No leaf, as what an earlier module returns: autocast keeps the casts of leaves.
                    buffers[name] = leaves[-1].view_as(leaves[-1])
            outputs = self._program.forward(buffers, self.bucket)
        if not isinstance(outputs, tuple):
            raise TypeError(f"{self.name}: its forward returned a {type(outputs).__name__}, not a tuple of tensors")
        self._live = (list(map(self._root, outputs)), leaves, aliases)
        return tuple(self._at_border(f"output:{i}", output.detach()) for i, output in enumerate(outputs))

    def _root(self, output: Tensor) -> Root | None:
        """Return where the backward through an output begins, None where there is none."""
        if not output.requires_grad:
            return None
        return output if self._border is None else get_gradient_edge(output)

    def _at_border(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of this pass where it may stay."""
        if self._border is None:
            return tensor
        return self._border.view(name, tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def backward(self) -> Gradients:
        """Run backward over the last forward's autograd graph."""
        if self._live is None or self._sinks is None:
            raise RuntimeError(f"{self.name}: a backward follows a forward with gradients")
        roots, leaves, aliases = self._live
        targets = [*leaves, *(aliases[p] for p in self._sinks.parameters)]
        pairs = [(r, g) for r, g in zip(roots, self.output_gradients, strict=True) if r is not None]
        main_grads = (*repeat(None, len(leaves)), *self._sinks.main_grads)
        handed_on = {i: t for i, (t, g) in enumerate(zip(targets, main_grads, strict=True)) if g is None}
        reach = reach_of(roots, handed_on)
        with (
            ONE_THREAD,
            torch.autocast(self._device_type, enabled=False),  # as users call backward: behind the forward's autocast
            self._passing(),
            self._sinks.attached(aliases),
            nullcontext() if self._side is None else self._side.active(),
            self._program.recording(),
            self.activations.restoring(),
        ):
            gradients: tuple[Tensor | None, ...] = (None,) * len(targets)
            if pairs:  # nothing is trained, as where adapters are switched off
                outputs, of_outputs = zip(*pairs, strict=True)
                gradients = torch.autograd.grad(outputs, targets, of_outputs, allow_unused=True)
        split = len(leaves)
        inputs = enumerate(gradients[:split])
        at_border = tuple(None if g is None else self._at_border(f"input_gradient:{i}", g) for i, g in inputs)
        return Gradients(at_border, self._sinks.returned(gradients[split:]), reach)

    def one_layer_of_each_kind(self) -> AbstractContextManager[None]:
        """Be around passes whose values nobody reads: see `warm_up`."""
        return one_layer_of_each_kind(self._program.modules(), self.kinds)

    @property
    def static_tensors(self) -> tuple[Tensor, ...]:
        """What the work reads, some of which other regions may have as well, and gradients that it returns."""
        returned = () if self._sinks is None else self._sinks.static.values()
        return (*self._buffers.values(), *self.output_gradients, *returned)

    def forget(self) -> None:
        """Free the autograd graph of the last forward."""
        self._live = None
        if self._side is not None:
            self._side.forget()
        self.activations.forget()

    def _saving(self, aliases: Mapping[nn.Parameter, nn.Parameter]) -> AbstractContextManager[None]:
        if self.activations is STAY or self._sinks is None:
            return nullcontext()
        held = (buffer for module in every_module(self._program.modules()) for buffer in module.buffers(recurse=False))
        return self.activations.saving((*self._buffers.values(), *aliases.values(), *held))


@contextmanager
def _own_autocast_cache() -> Iterator[None]:
    """Keep weights that autocast casts for one pass: one from an earlier pass would be recorded as a constant."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _own_saved_tensors() -> AbstractContextManager[None]:
    """Keep what autograd saves from hooks of the caller, which may move it to the host."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)
