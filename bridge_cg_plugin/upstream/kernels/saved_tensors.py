"""What a layer's saved tensors are: the part of the model that they belong to, and how they are recomputed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ...graphs.instance import every_module
from ...offload.registry import current_registry, derive, scoped
from ..seams.registry.engine import TE_LAYERNORM_LINEAR
from ..wrappers import overridden
from .transformer_engine import in_linear_modules

# Attribute of a module -> the name of what runs in it, for `vision_cuda_graph_offload`.
SCOPES = {
    "self_attention": "attention",
    "self_attn": "attention",
    "attn": "attention",
    "attention": "attention",
    "norm1": "layernorm",
    "norm2": "layernorm",
    "layer_norm1": "layernorm",
    "layer_norm2": "layernorm",
    "attention_norm": "layernorm",
    "ffn_norm": "layernorm",
    "mlp": "mlp",
    "feed_forward": "mlp",
    "input_layernorm": "layernorm",
    "pre_mlp_layernorm": "layernorm",
    "merger": "merger",
    "deepstack_merger_list": "merger",
}


@contextmanager
def known_activations(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Note, while a region of these modules is recorded, what its activations are and how they are made."""
    with ExitStack() as stack:
        for module, scope in _scopes(modules):
            enter, leave = scoped(scope)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(in_linear_modules("general_gemm", _noting_product))
        owner = sys.modules.get(TE_LAYERNORM_LINEAR)
        if owner is not None:
            stack.enter_context(overridden(owner, "apply_normalization", _noting_norm(owner.apply_normalization)))
        yield


def _scopes(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    layernorm_linear = sys.modules.get(TE_LAYERNORM_LINEAR)
    for module in every_module(modules):
        for name, scope in SCOPES.items():
            found = module._modules.get(name)
            for part in found if isinstance(found, nn.ModuleList) else [found]:
                if part is not None:
                    yield part, scope
        if layernorm_linear is not None and isinstance(module, layernorm_linear.LayerNormLinear):
            yield module, "layernorm"


def _noting_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note of every normalization without quantization how its output is recomputed."""

    def apply_normalization(x: Tensor, out: Any, weight: Tensor, bias: Tensor | None, *settings: Any) -> Any:
        made = original(x, out, weight, bias, *settings)
        if current_registry() is not None and out is None and type(made[0]) is Tensor:

            def recompute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
                rebuilt: Tensor = original(x, None, weight, bias, *settings)[0]
                return rebuilt

            derive(made[0], "layernorm", (x, weight) if bias is None else (x, weight, bias), recompute)
        return made

    return apply_normalization


def _noting_product(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note of every matrix product of a forward, without quantization or communication, how it is recomputed."""

    def general_gemm(weight: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(weight, x, *args, **kwargs)
        bias = kwargs.get("bias")
        others = [kwargs.get(name) for name in ("quantization_params", "ub", "out", "extra_output", "gelu_in")]
        plain = isinstance(weight, Tensor) and type(x) is Tensor and type(made[0]) is Tensor
        if current_registry() is None or args or not plain or any(other is not None for other in others):
            return made

        settings = {name: value for name, value in kwargs.items() if name != "bias"}

        def recompute(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
            rebuilt: Tensor = original(weight, x, bias=bias, **settings)[0]
            return rebuilt

        derive(made[0], "linear", (weight, x) if bias is None else (weight, x, bias), recompute)
        return made

    return general_gemm
