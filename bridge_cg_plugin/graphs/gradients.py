"""Where a recorded backward puts the gradients of a region's parameters."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import repeat
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

# Elements up to which a gradient waits for the end of the backward, to be added with others in one kernel.
SMALL = 1 << 16
# What PyTorch calls the backward under way where there is none.
NO_BACKWARD = -1
# Whether the backward under way runs a node of the autograd graph.
WILL_RUN = torch._C._will_engine_execute_node


class Reduction(Protocol):
    """Data parallelism's reduction of gradients, as far as a replayed backward concerns it."""

    def waits(self) -> bool:
        """Inside a backward: whether a gradient that arrives now may set off communication."""

    def arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take note that the `main_grad` of these parameters holds all of this backward's gradient."""


class GradientSinks:
    """Routes each trainable parameter's gradient to where eager training would put it.

    A parameter that Megatron gave a `main_grad` has its gradient added there inside the recorded backward, as soon as
    it exists, so no second copy of all gradients is kept. Data parallelism still sees a gradient arrive: it gets a
    placeholder and the flag `grad_added_to_main_grad`, the convention of Transformer Engine's fused accumulation.
    Any other parameter gets its gradient returned to autograd.

    Handing hundreds of placeholders over takes autograd milliseconds. With a reduction, and no hook of anybody else on
    a parameter, autograd does not get to know these parameters: the reduction is told itself, where it waits.

    Args:
        parameters: The region's trainable parameters.
        reduction: What waits for gradients; None hands every gradient over.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], reduction: Reduction | None = None) -> None:
        self.parameters = tuple(parameters)
        self._reduction = reduction
        self.main_grads: tuple[Tensor | None, ...] = tuple(getattr(p, "main_grad", None) for p in self.parameters)
        self._accumulated = [p for p, g in zip(self.parameters, self.main_grads, strict=True) if g is not None]
        self._placeholders = _Placeholders(self._accumulated)
        self._nodes: list[Node] = []
        self._to_come: WeakSet[Node] = WeakSet()
        self._returned_places = [place for place, g in enumerate(self.main_grads) if g is None]
        self._returned = tuple(map(self.parameters.__getitem__, self._returned_places))
        self._anchor = torch.zeros((), requires_grad=True)
        self._handles: list[RemovableHandle] = []
        self._tables: list[Mapping[int, Callable]] = []
        self._marked: list[nn.Parameter] = []

    def watch(self) -> None:
        """Put hooks on the parameters that tell replayed gradients from eager ones; needed for `hand_over`."""
        self._handles = [p.register_hook(self._marker(p)) for p in self._accumulated]
        # PyTorch keeps one table for a parameter from its first hook on.
        self._tables = [p._backward_hooks for p in self._accumulated]

    def release(self) -> None:
        """Take the hooks off the parameters."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles, self._tables, self._nodes = [], [], []

    def moved(self) -> bool:
        """Whether a parameter's `main_grad` is another tensor than when this object was made."""
        there = map(getattr, self.parameters, repeat("main_grad"), repeat(None))
        return not all(map(operator.is_, there, self.main_grads))

    @contextmanager
    def attached(self, aliases: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Add gradients of the aliases to their `main_grad` while a backward over them runs."""
        handles, small = [], SmallGradients()
        for parameter, main_grad in zip(self.parameters, self.main_grads, strict=True):
            if main_grad is None:
                continue
            alias = aliases[parameter]
            alias.grad_added_to_main_grad = False
            handles.append(alias.register_hook(_adder(alias, main_grad, self._placeholders.scalar(alias), small)))
        try:
            yield
            small.add()
        finally:
            for handle in handles:
                handle.remove()

    def returned(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Keep the gradients that autograd must hand on; None where `main_grad` has it already."""
        return tuple(g if main_grad is None else None for g, main_grad in zip(gradients, self.main_grads, strict=True))

    def receivers(self) -> tuple[Tensor, ...]:
        """Return the tensors through which autograd is to know a replay's backward: all parameters, or an anchor."""
        if self._reduction is None or self._hooked():
            return self.parameters
        return (self._anchor, *self._returned)

    def _hooked(self) -> bool:
        """Whether somebody else has a hook on a parameter; those on its node of the autograd graph cannot be seen."""
        # Hundreds of parameters, before every replay: no line of Python for each.
        return sum(map(len, self._tables)) > len(self._handles) or any(
            map(operator.attrgetter("_post_accumulate_grad_hooks"), self._accumulated)
        )

    def expect(self, node: Node, receivers: Sequence[Tensor]) -> None:
        """Note that a replay's backward is to come, with its node and what `receivers` returned for it."""
        if receivers is not self.parameters:
            self._to_come.add(node)

    def to_come(self) -> bool:
        """Whether the backward under way will yet replay one of which autograd does not know the parameters."""
        return torch._C._current_graph_task_id() != NO_BACKWARD and any(map(WILL_RUN, self._to_come))

    def adds_later(self, parameters: Set[nn.Parameter]) -> bool:
        """Whether `to_come`, and it adds to the gradient of one of these parameters."""
        return self.to_come() and not parameters.isdisjoint(self._accumulated)

    def hand_over(
        self, gradients: Sequence[Tensor | None], receivers: Sequence[Tensor], node: Node
    ) -> tuple[Tensor | None, ...]:
        """Return what a replayed backward gives autograd for each receiver: placeholders, or copies."""
        if receivers is not self.parameters:
            self._to_come.discard(node)
            self._tell()
            kept = map(gradients.__getitem__, self._returned_places)
            return None, *(None if g is None else g.clone() for g in kept)
        if self._handles:
            torch.autograd.Variable._execution_engine.queue_callback(self.clear)
        placeholders = self._placeholders.fresh()
        return tuple(
            next(placeholders) if main_grad is not None else None if g is None else g.clone()
            for g, main_grad in zip(gradients, self.main_grads, strict=True)
        )

    def _tell(self) -> None:
        """Tell the reduction that gradients are there, once the last of a backward's replays has added its own.

        Not of parameters that this backward reaches in another way, too: autograd calls their hooks.
        """
        if self._reduction.waits() and not self.to_come():
            self._nodes = self._nodes or [get_gradient_edge(p).node for p in self._accumulated]
            reached = map(WILL_RUN, self._nodes)
            self._reduction.arrived([p for p, r in zip(self._accumulated, reached, strict=True) if not r])

    def clear(self) -> None:
        """Take the flags back that replays set, also those that a failed backward left behind."""
        for parameter in self._marked:
            parameter.grad_added_to_main_grad = False
        self._marked = []

    def _marker(self, parameter: nn.Parameter) -> Callable[[Tensor | None], None]:
        # Called with the sum of a backward pass before data parallelism's hook. A bare placeholder says that main_grad
        # has everything; a sum with an eager gradient is another tensor, still to be added, as placeholders are zero.
        def mark(gradient: Tensor | None) -> None:
            if gradient is not None and self._placeholders.owns(gradient):
                parameter.grad_added_to_main_grad = True
                self._marked.append(parameter)

        return mark


def _adder(
    alias: nn.Parameter, main_grad: Tensor, scalar: Tensor, small: "SmallGradients"
) -> Callable[[Tensor | None], Tensor | None]:
    def add(gradient: Tensor | None) -> Tensor | None:
        # A function may give a parameter that it uses no gradient: Transformer Engine's a bias whose weight is frozen.
        if gradient is None:
            return None
        # Transformer Engine's fused weight-gradient GEMM has added it already and says so.
        if not alias.grad_added_to_main_grad:
            if gradient.numel() <= SMALL:
                small.keep(main_grad, gradient)
            else:
                main_grad.add_(gradient)
        return scalar.expand(gradient.shape)

    return add


class SmallGradients:
    """Gradients of biases and norms, added to their `main_grad` together: one by one each costs a kernel."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[torch.dtype, ...], list[tuple[Tensor, Tensor]]] = {}

    def keep(self, main_grad: Tensor, gradient: Tensor) -> None:
        """Hold a gradient until `add`."""
        self._pairs.setdefault((main_grad.dtype, gradient.dtype), []).append((main_grad, gradient))

    def add(self) -> None:
        """Add all that is held, in few kernels, each rounded as if it were added alone."""
        for pairs in self._pairs.values():
            main_grads, gradients = zip(*pairs, strict=True)
            # PyTorch adds lists in one kernel only where both have the same dtype.
            flat = torch.cat([g.reshape(-1) for g in gradients]).to(main_grads[0].dtype)
            parts = flat.split([g.numel() for g in gradients])
            torch._foreach_add_(main_grads, [part.view_as(g) for part, g in zip(parts, main_grads, strict=True)])
        self._pairs = {}


class _Placeholders:
    """Zero tensors of any parameter's shape over one storage per dtype and device; autograd steals them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for parameter in parameters:
            key = (parameter.dtype, parameter.device)
            sizes[key] = max(sizes.get(key, 0), parameter.numel())
        self._flat = {key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
        self._addresses = {flat.data_ptr() for flat in self._flat.values()}
        self._shaped = [self._flat[p.dtype, p.device].as_strided(p.shape, p.stride()) for p in parameters]

    def fresh(self) -> Iterator[Tensor]:
        """Return a zero tensor of each parameter's shape, in order; nobody else holds it, so autograd steals it."""
        return map(Tensor.detach, self._shaped)

    def scalar(self, parameter: nn.Parameter) -> Tensor:
        """Return a zero of the parameter's dtype and device, to be expanded to any shape."""
        return self._flat[parameter.dtype, parameter.device][0]

    def owns(self, gradient: Tensor) -> bool:
        """Whether the tensor is a bare placeholder."""
        return gradient.data_ptr() in self._addresses
