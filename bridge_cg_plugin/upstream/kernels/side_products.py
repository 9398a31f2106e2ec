"""Matrix products of Transformer Engine on the side stream of a recording, weight gradients above all."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.instance import every_module
from ...graphs.recordings.side_stream import SideStream, current_side_stream
from ...graphs.replays.gradients import SMALL
from ..seams.registry.engine import TE_GEMM
from ..wrappers import overridden
from .transformer_engine import in_linear_modules


@contextmanager
def side_weight_gradients(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run products that add a weight's gradient to `main_grad` on the side stream of a recorded backward.

    Nothing else in a backward reads `main_grad`. The bias gradient that such a product may compute as well waits for
    the end of the backward with other small ones. They have a workspace of their own: products that run at the same
    time in one workspace write to each other's intermediate results. Without a side stream all products stay where
    they are.
    """
    side, gemm = current_side_stream(), sys.modules.get(TE_GEMM)
    if side is None or gemm is None:
        yield
        return
    workspace = _own_workspace(side, gemm.get_cublas_workspace, gemm.get_cublas_workspace_size_bytes)
    products = _Products(side, modules)
    with overridden(gemm, "get_cublas_workspace", workspace), in_linear_modules("general_gemm", products.routed):
        yield


class _Products:
    """Decides which matrix products run on the side stream.

    Args:
        side: Where they run.
        modules: Roots of the modules whose products these are.
    """

    def __init__(self, side: SideStream, modules: Sequence[nn.Module]) -> None:
        parameters = [p for module in every_module(modules) for p in module._parameters.values() if p is not None]
        places = Counter(p.data_ptr() for p in parameters)
        # One stream alone may touch a gradient: that of a weight which several modules have stays on the main stream.
        self._single = {p.data_ptr() for p in parameters if places[p.data_ptr()] == 1}
        main_grads = ((p.data_ptr(), getattr(p, "main_grad", None)) for p in parameters)
        self._targets = {g.data_ptr() for place, g in main_grads if g is not None and place in self._single}
        self._side = side

    def routed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for Transformer Engine's `general_gemm`."""

        def general_gemm(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("grad") and isinstance(kwargs.get("bias"), Tensor):
                self._side.note_use(kwargs["bias"])
            if args or not self._may_leave(a, b, kwargs):
                return original(a, b, *args, **kwargs)
            # Transformer Engine empties tensors of its own behind the product: detached ones keep their memory.
            return self._side.run(lambda: _cast(original(a, b, **kwargs), kwargs.get("bias")), a.detach(), b.detach())

        return general_gemm

    def _may_leave(self, a: Any, b: Any, settings: dict[str, Any]) -> bool:
        """Whether this product adds a weight's gradient to a `main_grad` that no other work touches."""
        out, bias = settings.get("out"), settings.get("bias")
        others = [settings.get(name) for name in ("quantization_params", "ub", "extra_output")]
        plain = type(a) is Tensor and type(b) is Tensor and all(other is None for other in others)
        if not plain or not settings.get("grad") or not settings.get("accumulate") or not isinstance(out, Tensor):
            return False
        return out.data_ptr() in self._targets and (bias is None or self._bias_may_wait(bias))

    def _bias_may_wait(self, bias: Tensor) -> bool:
        """Whether nothing reads a bias's gradient before `SmallGradients` adds it at the end."""
        return bias.numel() <= SMALL and bias.data_ptr() in self._single and self._side.used_once(bias)


def _cast(made: Sequence[Any], bias: Tensor | None) -> tuple[Any, ...]:
    """Return a product's results with the bias's gradient in the bias's dtype.

    It comes in the dtype of `main_grad`, and autograd would cast it on the main stream, which has not waited for it.
    """
    out, gradient, *others = made
    return out, gradient if bias is None else gradient.to(bias.dtype), *others


def _own_workspace(
    side: SideStream, original: Callable[..., Any], size: Callable[[], int]
) -> Callable[[int, bool, bool], Any]:
    """Return what stands in for Transformer Engine's `get_cublas_workspace` during one pass.

    The workspace is memory of the pass: a graph writes to its pool's, which leaves the device with the graph.
    """
    workspaces: dict[int, Tensor] = {}

    def get_cublas_workspace(device: int, ub: bool, grouped_gemm: bool) -> Any:
        if not side.runs_now or ub or grouped_gemm:
            return original(device, ub, grouped_gemm)
        if device not in workspaces:
            workspaces[device] = _workspace(device, size())
        return workspaces[device]

    return get_cublas_workspace


def _workspace(device: int, nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
