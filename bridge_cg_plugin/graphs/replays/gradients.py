"""Where a recorded backward puts the gradients of a region's parameters."""

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...upstream_types import MegatronParameter
from ..changes.dict_watch import WATCHER
from ..errors import ReplayError

# What PyTorch calls the backward under way where there is none.
NO_BACKWARD = -1
# Whether the backward under way runs a node of the autograd graph.
WILL_RUN = torch._C._will_engine_execute_node
# Place of a backward's inputs in PyTorch's call of its engine, behind the roots.
INPUTS = 3
# Elements up to which a gradient waits for the end of the backward, to be added with others in one kernel.
SMALL = 1 << 16


class Reduction(Protocol):
    """Data parallelism's reduction of gradients, as far as a replayed backward concerns it."""

    def waits(self) -> bool:
        """Inside a backward: whether a gradient that arrives now may set off communication."""

    def arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take note that the `main_grad` of these parameters holds all of this backward's gradient."""


NO_PARAMETERS: frozenset[nn.Parameter] = frozenset()


class ParameterHooks:
    """What recordings of a region share: hooks on its parameters, and replayed backwards of which these do not know.

    A hook must see the gradient itself. The reduction is notified once per backward, when the last replay has added
    its part.
    """

    def __init__(self) -> None:
        # Of backwards that are to come: the parameters to whose `main_grad` each adds, by its node.
        self._to_come: WeakKeyDictionary[Node, frozenset[nn.Parameter]] = WeakKeyDictionary()
        self._done: list[tuple[nn.Parameter, ...]] = []
        self._backward = NO_BACKWARD
        self._watched: set[nn.Parameter] = set()
        self._changed = True
        self._hooked: frozenset[nn.Parameter] = NO_PARAMETERS

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Follow the hooks on parameters, and the backwards that replays may add to."""
        INPUTS_GUARD.add(self)
        for parameter in set(parameters) - self._watched:
            # Made before anybody needs them, to be watched.
            if parameter._backward_hooks is None:
                parameter._backward_hooks = OrderedDict()
            if parameter._post_accumulate_grad_hooks is None:
                parameter._post_accumulate_grad_hooks = OrderedDict()
            for table in _tables_of(parameter):
                WATCHER.watch(table, self._note)
            self._watched.add(parameter)
        self._changed = True

    def keep(self, parameters: Set[nn.Parameter]) -> None:
        """Follow those of other parameters no more, which have left the model."""
        for parameter in self._watched - parameters:
            for table in _tables_of(parameter):
                WATCHER.unwatch(table, self._note)
            if not parameter._backward_hooks:
                parameter._backward_hooks = None
            if not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._watched &= parameters
        self._changed = True

    def release(self) -> None:
        """Follow none."""
        self.keep(NO_PARAMETERS)
        INPUTS_GUARD.discard(self)

    def _note(self, hooks: dict[Any, Any], key: Hashable, hook: Any) -> None:
        self._changed = True

    def hooked(self) -> frozenset[nn.Parameter]:
        """Return the parameters that have a hook."""
        if self._changed:
            self._changed = False
            self._hooked = frozenset(filter(hooked, self._watched))
        return self._hooked

    def expect(self, node: Node, accumulated: frozenset[nn.Parameter]) -> None:
        """Note that a replay's backward is to come, and the parameters to whose `main_grad` it adds."""
        self._to_come[node] = accumulated

    def ran(self, node: Node, accumulated: tuple[nn.Parameter, ...]) -> None:
        """Note that the backward under way has replayed it."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # the one before may have failed
            self._backward, self._done = backward, []
        self._to_come.pop(node, None)
        if not self._done or self._done[-1] is not accumulated:
            self._done.append(accumulated)

    def done(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters to which the backward under way has added by replays; nothing while one is to come."""
        to_come = self._to_come.data  # type: ignore[attr-defined] # its own dict: no call of Python's
        if to_come and any(map(WILL_RUN, self._to_come)):
            return ()
        done, self._done = self._done, []
        return tuple(dict.fromkeys(chain(*done))) if done[1:] else done[0]

    def adds_later(self, parameters: Set[nn.Parameter]) -> bool:
        """Whether the backward under way will yet replay what adds to the gradient of one of these parameters."""
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            return False
        return any(WILL_RUN(node) and not added.isdisjoint(parameters) for node, added in self._to_come.items())

    def refuse(self, roots: Sequence[Tensor | GradientEdge], inputs: Set[Any]) -> None:
        """Raise where gradients of inputs are asked for that a replay behind some roots would add to `main_grad`.

        Raises:
            ReplayError: An input is such a parameter.
        """
        asked = [node for node, added in self._to_come.items() if not added.isdisjoint(inputs)]
        begins = (root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots)
        if asked and not behind(begins).isdisjoint(asked):
            raise ReplayError(
                "torch.autograd.grad or backward(inputs=) asks for the gradient of a parameter that a graphed "
                "microbatch adds to main_grad for data parallelism, past autograd; run such a microbatch eager"
            )


def behind(nodes: Iterable[Node | None]) -> set[Node]:
    """Return the nodes that a backward from some nodes may run, and these."""
    waiting, seen = list(nodes), set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
    return seen


class _InputsGuard:
    """Looks at the inputs that a backward is asked for, in PyTorch's call of its engine, while replays may come.

    Autograd cannot reach parameters of which it does not know: it would give None, or add nothing without a word.
    """

    def __init__(self) -> None:
        self._hooks: WeakSet[ParameterHooks] = WeakSet()
        self._autograd: Any = torch.autograd
        self._original: Any = None

    def add(self, hooks: ParameterHooks) -> None:
        """Look at the inputs of backwards that may run these replays."""
        self._hooks.add(hooks)
        if self._original is None:
            self._original = self._autograd._engine_run_backward
            self._autograd._engine_run_backward = self._run_backward

    def discard(self, hooks: ParameterHooks) -> None:
        """End this; PyTorch's function comes back with the last one."""
        self._hooks.discard(hooks)
        if not self._hooks and self._original is not None:
            self._autograd._engine_run_backward, self._original = self._original, None

    def _run_backward(self, roots: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
        for inputs in filter(None, args[INPUTS : INPUTS + 1]):
            edges = (each.node if isinstance(each, GradientEdge) else each for each in inputs)
            asked = {getattr(each, "variable", each) for each in edges}
            for hooks in tuple(self._hooks):
                hooks.refuse(roots, asked)
        return self._original(roots, *args, **kwargs)


INPUTS_GUARD = _InputsGuard()


def hooked(parameter: nn.Parameter) -> bool:
    """Whether anybody has a hook on a parameter."""
    return any(_tables_of(parameter))


def _tables_of(parameter: nn.Parameter) -> Iterator[dict[Any, Any]]:
    """Return the hooks on a parameter, before and after accumulation: PyTorch keeps a table from the first hook on."""
    for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        if table is not None:
            yield table


class GradientSinks:
    """Routes each trainable parameter's gradient to where eager training would put it.

    With a reduction, the recorded backward adds a gradient to the parameter's `main_grad`, as data parallelism does
    with Transformer Engine's fused accumulation, and the reduction is notified: placeholders of hundreds of parameters
    take milliseconds. Any other parameter, or one with a user's hook, gets its gradient from autograd, in memory that
    all recordings share; a module that adds to `main_grad` itself does so in its recording, too.

    Args:
        parameters: The region's trainable parameters.
        reduction: What waits for gradients; None hands every gradient over.
        hooks: The region's hooks on parameters; None where no recording has a backward.

    Attributes:
        given: The `main_grad` of each parameter when this object was made.
        handed: Parameters with a `main_grad` that get their gradient from autograd.
        main_grads: The `main_grad` of each parameter to which the recorded backward adds; None for others.
        static: Memory of gradients that recordings return to autograd, by parameter.
        receivers: The tensors through which autograd is to know a replay's backward: an anchor and parameters.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        reduction: Reduction | None = None,
        hooks: ParameterHooks | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self._reduction, self._hooks = reduction, hooks or ParameterHooks()
        self.given = tuple(getattr(p, "main_grad", None) for p in self.parameters)
        given = [p for p, g in zip(self.parameters, self.given, strict=True) if g is not None]
        self._hooked = NO_PARAMETERS if reduction is None else frozenset(filter(hooked, given))
        self.handed = frozenset(given) if reduction is None else self._hooked
        self.main_grads: tuple[Tensor | None, ...] = tuple(
            None if p in self.handed else g for p, g in zip(self.parameters, self.given, strict=True)
        )
        self._accumulated = tuple(p for p, g in zip(self.parameters, self.main_grads, strict=True) if g is not None)
        self._added_to = frozenset(self._accumulated)
        self._zeros = {(p.dtype, p.device): torch.zeros((), dtype=p.dtype, device=p.device) for p in self._accumulated}
        self._nodes: list[Node] = []
        self._returned_places = [place for place, g in enumerate(self.main_grads) if g is None]
        self._returned = tuple(map(self.parameters.__getitem__, self._returned_places))
        self.static: dict[nn.Parameter, Tensor] = {}
        self._fused: set[nn.Parameter] = set()
        anchor = torch.zeros((), requires_grad=True)
        self._anchor_node = get_gradient_edge(anchor).node
        self.receivers: tuple[Tensor, ...] = (anchor, *self._returned)
        if hooks is not None and reduction is not None:
            hooks.watch(given)

    def prepare(self) -> None:
        """Take the memory of gradients that recordings return."""
        if not self.static:
            self.static.update((p, _empty(p)) for p in self._returned)

    def share_with(self, other: "GradientSinks") -> bool:
        """Have gradients where another object has them, if both return the same; returns whether they lie there."""
        same = len(self._returned) == len(other._returned) and all(map(operator.is_, self._returned, other._returned))
        if same and not self.static:
            self.static = other.static
        return self.static is other.static

    def hooked_otherwise(self) -> bool:
        """Whether other parameters have a hook than when this object was made."""
        found = self._hooks.hooked()
        if not (found or self._hooked):
            return False
        return found.intersection(self.parameters) != self._hooked

    @contextmanager
    def attached(self, aliases: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Add gradients of the aliases to their `main_grad`, or keep them, while a backward over them runs."""
        handles, small = [], list[tuple[Tensor, Tensor]]()
        for parameter, main_grad in zip(self.parameters, self.main_grads, strict=True):
            alias: MegatronParameter = aliases[parameter]
            alias.grad_added_to_main_grad = False
            if main_grad is not None:
                receive = _adder(alias, main_grad, self._zeros[alias.dtype, alias.device], small)
            elif parameter in self.static:
                receive = self._keeper(parameter, alias, small)
            else:
                continue
            handles.append(alias.register_hook(receive))
        try:
            yield
            add_together(small)
        finally:
            for handle in handles:
                handle.remove()
            small.clear()

    def _keeper(
        self, parameter: nn.Parameter, alias: MegatronParameter, small: list[tuple[Tensor, Tensor]]
    ) -> Callable[[Tensor | None], Tensor | None]:
        """Return a hook that keeps a gradient in static memory; a backward in several calls adds up.

        A small gradient may be written up to the end of the backward: it is read then.
        """
        static, started = self.static[parameter], False

        def keep(gradient: Tensor | None) -> Tensor | None:
            nonlocal started
            if alias.grad_added_to_main_grad:  # by its module, as in eager
                self._fused.add(parameter)
            if gradient is None or parameter in self._fused:
                return gradient
            if gradient.numel() <= SMALL:
                small.append((static if started else static.zero_(), gradient))
            else:
                static.add_(gradient) if started else static.copy_(gradient)
            started = True
            return static

        return keep

    def returned(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the gradients that autograd must hand on; None where `main_grad` has it already or there is none."""
        return tuple(
            None if g is None or main_grad is not None or p in self._fused else self.static.get(p, g)
            for p, g, main_grad in zip(self.parameters, gradients, self.main_grads, strict=True)
        )

    def added_to(self) -> tuple[Tensor | None, ...]:
        """Return the `main_grad` that a recorded backward adds to, for each parameter; None for others."""
        places = zip(self.parameters, self.given, self.main_grads, strict=True)
        return tuple(g if main is not None or p in self._fused else None for p, g, main in places)

    def expect(self, node: Node) -> None:
        """Note that a replay's backward is to come, with its node."""
        if self._accumulated:
            self._hooks.expect(node, self._added_to)

    def would_add_unasked(self) -> bool:
        """Whether the backward under way is for some inputs alone, but a replay would add to a `main_grad`."""
        return bool(self._accumulated) and not WILL_RUN(self._anchor_node)

    def hand_over(self, gradients: Sequence[Tensor | None], node: Node) -> tuple[Tensor | None, ...]:
        """Return what a replayed backward gives autograd for each receiver: copies.

        Args:
            gradients: Those that the recording returned.
            node: The replay's.
        """
        if self._accumulated:
            self._hooks.ran(node, self._accumulated)
            self._tell()
        kept = map(gradients.__getitem__, self._returned_places)
        return None, *map(self._handed_on, self._returned, kept)

    def _handed_on(self, parameter: MegatronParameter, gradient: Tensor | None) -> Tensor | None:
        """Return what autograd gets for a parameter: a copy of its gradient; zeros for hooks, which cannot take None.

        Without a gradient, eager's backward does not reach the parameter; a replay's reaches all, and calls their
        hooks. Zeros, marked as eager marks them, also stand for a gradient that a module has added to `main_grad`.
        """
        if gradient is not None:
            return gradient.clone()
        if parameter in self._fused:
            parameter.grad_added_to_main_grad = True
        elif not parameter._backward_hooks:
            return None
        return _empty(parameter).zero_()

    def _tell(self) -> None:
        """Tell the reduction that gradients are there, once the last of a backward's replays has added its own.

        Not of parameters that this backward reaches in another way, too: autograd calls their hooks.
        """
        if self._reduction is not None and self._reduction.waits() and (done := self._hooks.done()):
            own = done is self._accumulated
            nodes = self._nodes if own and self._nodes else [get_gradient_edge(parameter).node for parameter in done]
            if own:
                self._nodes = nodes
            self._reduction.arrived([p for p, r in zip(done, map(WILL_RUN, nodes), strict=True) if not r])


def static_bytes_of(sinks: Iterable[GradientSinks]) -> int:
    """Return the device memory of gradients that any of these objects return, in bytes."""
    shared = {id(each.static): each.static for each in sinks}
    return sum(gradient.nbytes for static in shared.values() for gradient in static.values())


def _empty(parameter: nn.Parameter) -> Tensor:
    """Return a plain tensor for a gradient: one like a parameter of another class would be of that class."""
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)


def _adder(
    alias: MegatronParameter, main_grad: Tensor, scalar: Tensor, small: list[tuple[Tensor, Tensor]]
) -> Callable[[Tensor | None], Tensor | None]:
    def add(gradient: Tensor | None) -> Tensor | None:
        # A function may give a parameter that it uses no gradient: Transformer Engine's a bias whose weight is frozen.
        if gradient is None:
            return None
        # Transformer Engine's fused weight-gradient GEMM has added it already and has set a flag.
        if not alias.grad_added_to_main_grad:
            if gradient.numel() <= SMALL:
                small.append((main_grad, gradient))
            else:
                main_grad.add_(gradient)
        return scalar.expand(gradient.shape)

    return add


def receiving(alias: MegatronParameter, main_grad: Tensor | None, receive: Callable[[Tensor], None]) -> None:
    """Have an alias's gradient received once it is complete, and let go of then.

    A fused product adds to `main_grad`, in whose place it finds zeros that are made when it asks.
    """
    if main_grad is not None:
        alias.__dict__.update({"grad_added_to_main_grad": False, LIKE: alias.__dict__.pop("main_grad")})
        alias.__class__ = _Scratched

    def arrived(alias: MegatronParameter) -> None:
        added = getattr(alias, "grad_added_to_main_grad", False)
        gradient, alias.grad = alias.main_grad if added else alias.grad, None
        alias.__dict__.pop(SUM, None)
        if gradient is not None:
            receive(gradient)

    alias.register_post_accumulate_grad_hook(arrived)


LIKE, SUM = "_like_main_grad", "_own_main_grad"


class _Scratched(nn.Parameter):
    @property
    def main_grad(self) -> Tensor:
        if SUM not in self.__dict__:
            self.__dict__[SUM] = torch.zeros_like(self.__dict__[LIKE])
        sum_: Tensor = self.__dict__[SUM]
        return sum_

    @main_grad.setter
    def main_grad(self, given: Tensor) -> None:  # as Transformer Engine does, with what it was given
        self.__dict__[SUM] = given


def add_together(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add gradients of biases and norms to their `main_grad` in few kernels: one by one each costs one.

    Each is rounded as if it were added alone.

    Args:
        pairs: A `main_grad` and what is added to it.
    """
    alike: dict[tuple[torch.dtype, ...], list[tuple[Tensor, Tensor]]] = {}
    for main_grad, gradient in pairs:
        alike.setdefault((main_grad.dtype, gradient.dtype), []).append((main_grad, gradient))
    for together in alike.values():
        main_grads, gradients = zip(*together, strict=True)
        # PyTorch adds lists in one kernel only where both have the same dtype.
        flat = torch.cat([g.reshape(-1) for g in gradients]).to(main_grads[0].dtype)
        parts = flat.split([g.numel() for g in gradients])
        torch._foreach_add_(main_grads, [part.view_as(g) for part, g in zip(parts, main_grads, strict=True)])
