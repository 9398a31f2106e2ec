"""Where a recorded backward puts the gradients of a region's parameters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class GradientSinks:
    """Routes each trainable parameter's gradient to where eager training would put it.

    A parameter that Megatron gave a `main_grad` has its gradient added there inside the recorded backward, as soon as
    it exists, so no second copy of all gradients is kept. Data parallelism still sees a gradient arrive: it gets a
    placeholder and the flag `grad_added_to_main_grad`, the convention of Transformer Engine's fused accumulation.
    Any other parameter gets its gradient returned to autograd.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.main_grads: tuple[Tensor | None, ...] = tuple(getattr(p, "main_grad", None) for p in self.parameters)
        self._placeholders = _Placeholders()
        self._eager_task = self._replay_task = -1

    @property
    def accumulates(self) -> bool:
        """Whether any parameter's gradient goes straight to its `main_grad`."""
        return any(g is not None for g in self.main_grads)

    def moved(self) -> bool:
        """Whether a parameter's `main_grad` is another tensor than when this object was made."""
        return any(
            getattr(p, "main_grad", None) is not g for p, g in zip(self.parameters, self.main_grads, strict=True)
        )

    @contextmanager
    def attached(self, aliases: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Add gradients of the aliases to their `main_grad` while a backward over them runs."""
        handles = []
        for parameter, main_grad in zip(self.parameters, self.main_grads, strict=True):
            if main_grad is None:
                continue
            alias = aliases[parameter]
            alias.grad_added_to_main_grad = False
            handles.append(alias.register_hook(_adder(alias, main_grad, self._placeholders.scalar(alias))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def returned(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Keep the gradients that autograd must hand on; None where `main_grad` has it already."""
        return tuple(g if main_grad is None else None for g, main_grad in zip(gradients, self.main_grads, strict=True))

    def hand_over(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return what a replayed backward gives autograd for each parameter and set the flags that go with it."""
        self._replay_task = torch._C._current_graph_task_id()
        if self.accumulates:
            self._set_flags(self._eager_task != self._replay_task)
            torch.autograd.Variable._execution_engine.queue_callback(self._clear_flags)
        return tuple(
            g if main_grad is None else self._placeholders.like(p)
            for p, g, main_grad in zip(self.parameters, gradients, self.main_grads, strict=True)
        )

    def watch_eager(self, outputs: Sequence[Tensor]) -> None:
        """Note when the backward of an eager pass runs, so that its gradients are not taken for accumulated ones."""
        if not self.accumulates:
            return
        for output in outputs:
            if output.requires_grad:
                output.register_hook(self._on_eager_backward)

    def _on_eager_backward(self, gradient: Tensor) -> None:
        self._eager_task = torch._C._current_graph_task_id()
        if self._eager_task == self._replay_task:
            self._clear_flags()

    def _set_flags(self, value: bool) -> None:
        for parameter, main_grad in zip(self.parameters, self.main_grads, strict=True):
            if main_grad is not None:
                parameter.grad_added_to_main_grad = value

    def _clear_flags(self) -> None:
        self._set_flags(False)


def _adder(alias: nn.Parameter, main_grad: Tensor, scalar: Tensor):
    def add(gradient: Tensor) -> Tensor:
        # Transformer Engine's fused weight-gradient GEMM has added it already and says so.
        if not alias.grad_added_to_main_grad:
            main_grad.add_(gradient)
        return scalar.expand(gradient.shape)

    return add


class _Placeholders:
    """Zero tensors of any shape over one small storage per dtype, stolen by autograd without a copy."""

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, parameter: nn.Parameter) -> Tensor:
        key = (parameter.dtype, parameter.device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < parameter.numel():
            flat = self._flat[key] = torch.zeros(parameter.numel(), dtype=key[0], device=key[1])
        return flat[: parameter.numel()].view(parameter.shape).detach()

    def scalar(self, parameter: nn.Parameter) -> Tensor:
        """Return a zero of the parameter's dtype and device, to be expanded to any shape."""
        self.like(parameter)
        return self._flat[(parameter.dtype, parameter.device)][0]
