"""Faster kernels in megatron-core's and Transformer Engine's layers while a region is recorded."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...attention_bounds import UNPACKED_FROM, deterministic
from ...graphs.instance import modules_where
from ...offload.registry import derive
from ...upstream_types import UpstreamModule
from ...vision.encoder import RecordingKernels
from ..seams.contract import BIAS_DROPOUT_ADD, SWAPS, all_shipped, is_shipped
from ..seams.own_code import as_shipped, foreign_function
from ..seams.registry.engine import (
    EXTENSIONS,
    MLP,
    TE_ATTENTION,
    TE_ATTENTION_BACKENDS,
    TE_LAYERNORM,
    TE_LAYERNORM_LINEAR,
    TE_RMSNORM,
)
from ..seams.states import fits
from ..wrappers import overridden
from .recompute import recomputing, usable_random_states
from .transformer_engine import device_lengths, forget_attention_selection, fused_attention_refusal

TE_EXTENSION = "transformer_engine_torch"


def kernels_available() -> bool:
    """Whether the plugin's Triton kernels can run here."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


@contextmanager
def core_kernels(modules: Sequence[nn.Module], *others: RecordingKernels) -> Iterator[None]:
    """Let megatron-core's layers call the plugin's kernels while a region of these modules is recorded.

    Attention is chosen without reading the device. Without Triton or a GPU upstream's own functions stay.

    Args:
        modules: Roots of the modules.
        others: Kernels of the plugin.

    Raises:
        CaptureError: Dropout draws from random states that a graph cannot use.
    """
    forget_attention_selection()
    with usable_random_states(modules), recomputing(modules), device_lengths(), ExitStack() as stack:
        for kernels in others if kernels_available() else ():
            stack.enter_context(kernels(modules))
        yield


@contextmanager
def fused_layernorm_backward(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let LayerNorm's backward run as the plugin's kernel, which adds up a row in another order than eager's.

    It adds the residual stream's gradient as well, where a layer's LayerNorm is part of its linear module.
    """
    from ...vision.kernels.residual import residual_stream

    extension = importlib.import_module(TE_EXTENSION)
    kernel = _layernorm_backward(extension.layernorm_bwd)
    with residual_stream() as stream, ExitStack() as stack:
        owners = {"layernorm_backward": extension, "layernorm_operation": importlib.import_module(TE_LAYERNORM)}
        for owner in (owner for name, owner in owners.items() if fits(name)):
            stack.enter_context(overridden(owner, "layernorm_bwd", kernel))
        for module in modules_where(_has_shipped_layernorm, modules) if fits("layernorm_backward") else ():
            stack.callback(module.register_forward_pre_hook(functools.partial(_begin_branch, stream)).remove)
        yield


def _has_shipped_layernorm(module: UpstreamModule) -> bool:
    """Whether a module is Transformer Engine's product with a LayerNorm before it, as shipped."""
    layernorm_linear = sys.modules.get(TE_LAYERNORM_LINEAR)
    if layernorm_linear is None or not isinstance(module, layernorm_linear.LayerNormLinear):
        return False
    has_bias = module.normalization == "LayerNorm" and module.layer_norm_bias is not None
    return has_bias and as_shipped(module, "forward")


def _begin_branch(stream: Any, module: UpstreamModule, arguments: tuple[Any, ...]) -> None:
    """Tell the residual stream what a LayerNorm reads, if its backward will get just that."""
    from ...vision.kernels.reduction import may_wait

    x, weight, bias = arguments[0], module.layer_norm_weight, module.layer_norm_bias
    if (
        x.requires_grad
        and x.is_contiguous()
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
    ):
        waits = may_wait(weight), may_wait(bias)
        stream.begin(x, weight, lambda: all(wait() for wait in waits))


@contextmanager
def fused_layer_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let layers add biases together with what follows, and one segment's attention run unpacked."""
    from ...vision.kernels.reduction import deferred_sums

    adds = fits("layer_residuals") and foreign_function(BIAS_DROPOUT_ADD, SWAPS) is None
    with deferred_sums(modules), ExitStack() as stack:
        for name, adds_so in ADDITIONS.items():
            for module in modules_where(adds_so, modules) if adds else ():
                stack.enter_context(overridden(module, name, _bias_residual(vars(module)[name])))
        attentions = modules_where(is_te_attention, modules)
        for module in attentions if attentions and not deterministic() and fused_attention_refusal() is None else ():
            stack.enter_context(overridden(module, "forward", functools.partial(_attention_forward, module)))
        for module in modules_where(adds_bias_before_activation, modules):
            stack.enter_context(overridden(module, "forward", functools.partial(_mlp_forward, module)))
        yield


def _adds_residual(name: str, module: nn.Module) -> bool:
    return is_shipped(BIAS_DROPOUT_ADD, vars(module).get(name))


# By the attribute in which a layer has the function: whether a module's is upstream's.
ADDITIONS = {name: functools.partial(_adds_residual, name) for name in ("self_attn_bda", "mlp_bda")}


def _layernorm_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    from ...vision.kernels.norms import layernorm_backward
    from ...vision.kernels.residual import current_stream

    def layernorm_bwd(
        gradient: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor,
        sm_margin: int,
        zero_centered_gamma: bool,
    ) -> Any:
        stream = current_stream()
        branch, residual = (stream.take(x, weight) if stream is not None else None) or (None, None)
        fits = x.dim() == 2 and x.is_contiguous() and gradient.is_contiguous() and gradient.dtype == x.dtype
        if not fits:
            found = original(gradient, x, mean, rstd, weight, sm_margin, zero_centered_gamma)
            return found if residual is None else (found[0] + residual.view_as(found[0]), *found[1:])
        deferred = branch is not None and branch.may_wait()
        found = layernorm_backward(gradient, x, mean, rstd, weight, zero_centered_gamma, residual, deferred)
        if stream is not None and found.x_sum is not None:
            stream.know(found.x, found.x_sum)
        return found.x, found.weight, found.bias

    return layernorm_bwd


def _bias_residual(original: Callable[..., Any]) -> Callable[..., Any]:
    from ...vision.kernels.bias import bias_residual
    from ...vision.kernels.residual import current_stream

    def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
        upstreams: Callable[..., Tensor] = original(training, fused)
        if fused:  # compiled, it rounds once where this kernel and upstream's other function round twice
            return upstreams

        def bias_dropout_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            dropped = training and prob > 0
            if dropped or bias is None or x.dtype != residual.dtype or not residual.is_contiguous():
                return upstreams(x_with_bias, residual, prob)
            stream = current_stream()
            return bias_residual(x, bias, residual, None if stream is None else stream.end(residual))

        return bias_dropout_add

    return get_bias_dropout_add


def is_te_attention(module: nn.Module) -> bool:
    """Whether a module is megatron-core's attention by Transformer Engine as shipped, no class derived from it."""
    extensions = sys.modules.get(EXTENSIONS)
    if extensions is None or type(module) is not extensions.TEDotProductAttention:
        return False
    if not fits("attention_forward", "te_attention"):
        return False
    kernels = filter(None, map(module._modules.get, ("fused_attention", "flash_attention")))
    (base, *_) = extensions.TEDotProductAttention.__bases__
    shipped = is_shipped(TE_ATTENTION, vars(base).get("forward")) and all_shipped(TE_ATTENTION_BACKENDS)
    return shipped and all(as_shipped(each, "forward") for each in (module, *kernels))


def _attention_forward(
    attention: UpstreamModule, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Attention of one segment without packing: cuDNN's packed backward scans 32 segments of the largest length.

    The same kernels compute the same values; rows behind the segment are zero, in gradients too.
    """
    packed = kwargs.get("packed_seq_params")
    if packed is None or packed.cu_seqlens_q.shape[0] != 2 or query.dim() != 3 or query.shape[0] < UNPACKED_FROM:
        return type(attention).forward(attention, query, key, value, *args, **kwargs)
    tokens = query.shape[0]
    out = super(type(attention), attention).forward(
        query[None],
        key[None],
        value[None],
        None,
        qkv_format="bshd",
        attn_mask_type="padding",
        cu_seqlens_q=packed.cu_seqlens_q,
        cu_seqlens_kv=packed.cu_seqlens_kv,
        max_seqlen_q=tokens,
        max_seqlen_kv=tokens,
    )
    return out.view(tokens, -1)


def adds_bias_before_activation(module: UpstreamModule) -> bool:
    """Whether a module is megatron-core's MLP in the form `fc2(activation(fc1(x) + bias))`."""
    mlp = sys.modules.get(MLP)
    fitting = mlp is not None and isinstance(module, mlp.MLP) and fits("mlp_forward")
    if not fitting or not as_shipped(module, "forward"):
        return False
    others = ("gated_linear_unit", "bias_activation_fusion", "use_te_activation_func")
    return not any(getattr(module.config, name, True) for name in others)


def _mlp_forward(
    mlp: UpstreamModule, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
) -> Any:
    if per_token_scale is not None:
        return type(mlp).forward(mlp, hidden_states, per_token_scale, **kwargs)
    x, bias = mlp.linear_fc1(hidden_states)
    activated = mlp.activation_func if bias is None else _after_bias(mlp.activation_func)
    sources = (x,) if bias is None else (x, bias)
    made = activated(*sources)
    derive(made, "gelu", sources, activated)
    return mlp.linear_fc2(made)


def _after_bias(activation: Any) -> Callable[..., Tensor]:
    """Return what adds a bias and applies the activation: as one kernel for GELU, upstream's own for others."""
    from ...vision.kernels.bias import bias_add, bias_gelu

    is_gelu = isinstance(activation, functools.partial) and activation.func is F.gelu
    if is_gelu and activation.keywords == {"approximate": "tanh"}:
        return bias_gelu
    return lambda x, bias: activation(bias_add(x, bias))


BACKWARD = "rmsnorm_bwd"


@contextmanager
def fused_head_norms(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let norms of 128 elements, as of queries and keys, be differentiated by kernels that give the same bits."""
    if not fits("rmsnorm_operation") or not modules_where(is_head_norm, modules):
        yield
        return
    owner = sys.modules[TE_RMSNORM]
    from ...vision.kernels import head_norms

    original = getattr(owner, BACKWARD)

    def rmsnorm_bwd(gradient: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, margin: int, zero_centered: bool) -> Any:
        if head_norms.takes(gradient, x, weight, margin):
            most = head_norms.most_blocks(x.device.index, original)
            if most is not None:
                return head_norms.backward(gradient, x, rstd, weight, zero_centered, most)
        return original(gradient, x, rstd, weight, margin, zero_centered)

    with overridden(owner, BACKWARD, rmsnorm_bwd):
        yield


def is_head_norm(module: nn.Module) -> bool:
    """Return whether a module is Transformer Engine's RMSNorm over heads of 128."""
    owner = sys.modules.get(TE_RMSNORM)
    return owner is not None and isinstance(module, owner.RMSNorm) and module.weight.shape == (128,)
