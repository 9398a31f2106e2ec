"""What recording needs of Transformer Engine's modules, and what activations they make."""

import functools
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...announce import warn_once
from ...graphs.instance import every_module, has_parameters, modules_where
from ...graphs.recordings.recording import sum_of
from ...graphs.recordings.streams import SideStream, current_side_stream
from ...graphs.replays.gradients import SMALL
from ...offload.registry import current_registry, derive, scoped
from ...upstream_types import UpstreamModule
from ..seams.registry import seam
from ..seams.registry.engine import TE_ATTENTION, TE_ATTENTION_UTILS, TE_GEMM, TE_LAYERNORM_LINEAR, TE_LINEAR
from ..seams.states import fits
from ..wrappers import overridden


def forget_attention_selection() -> None:
    """Drop Transformer Engine's cached choice of attention kernel if comparing with it would read the device.

    Bridge's eager vision forward passes `max_seqlen` as a device tensor, and the cache keeps it. A recorded forward
    with the same value would compare against it, which waits for the device and ends a capture.
    """
    module = sys.modules.get(TE_ATTENTION)
    cache: Any = getattr(module, "_attention_backends", None)
    cached = cache.get("attention_params") if isinstance(cache, dict) else None
    if cached is not None and any(isinstance(value, Tensor) for value in vars(cached).values()):
        cache["attention_params"] = None


def accumulate_from_now_on(modules: Sequence[nn.Module]) -> None:
    """Let an eager microbatch add its weight gradients, also if it is the first one that modules see in a step.

    Where the weight-gradient GEMM writes to `main_grad` itself, a step's first microbatch overwrites what is there:
    zeros, or what replays of earlier microbatches added without the modules' knowing. megatron-core marks first
    microbatches in all modules of a model that computes in fp8, which the vision encoder itself never does.
    """
    for module in every_module(modules):
        marked: UpstreamModule = module
        if getattr(marked, "is_first_microbatch", False):
            marked.is_first_microbatch = False


FUSING = "fuse_wgrad_accumulation"


def _may_accumulate(module: nn.Module) -> bool:
    return hasattr(module, FUSING)


@contextmanager
def accumulating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let linear modules that add weight gradients to `main_grad` inside their GEMM never overwrite it instead.

    A first microbatch does; a recording serves every microbatch. Autograd gets one element, expanded, for a gradient
    that is there: Transformer Engine's placeholders are as large as the weights, one for each shape, and stay for good.
    """
    fitting = fits("placeholder_gradients.linear", "placeholder_gradients.layernorm_linear")
    with ExitStack() as stack:
        if fitting:
            stack.enter_context(in_linear_modules("get_dummy_wgrad", lambda original: _placeholder))
        for module in modules_where(_may_accumulate, modules):
            if getattr(module, FUSING) and hasattr(module, "is_first_microbatch"):
                stack.enter_context(overridden(module, "is_first_microbatch", False))
        yield


@contextmanager
def fused_accumulation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let linear modules add weight gradients to `main_grad` inside their GEMM, on the side stream if there is one.

    The sum keeps the fp32 product that a separate addition first rounds to the weight's dtype. What was set before
    comes back.
    """
    fitting = fits("weight_gradients.Linear", "weight_gradients.LayerNormLinear")
    with ExitStack() as stack:
        for module in modules_where(_may_accumulate, modules) if fitting else ():
            weight = module._parameters.get("weight")
            if weight is not None and weight.requires_grad and sum_of(weight) is not None:
                stack.enter_context(overridden(module, FUSING, True))
        stack.enter_context(accumulating(modules))
        stack.enter_context(side_weight_gradients(modules))
        yield


@contextmanager
def in_linear_modules(name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Let Transformer Engine's linear modules, where they are imported, call what is made of a function of theirs."""
    with ExitStack() as stack:
        for owner in filter(None, map(sys.modules.get, (TE_LINEAR, TE_LAYERNORM_LINEAR))):
            stack.enter_context(overridden(owner, name, made(getattr(owner, name))))
        yield


def _placeholder(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Stand in for Transformer Engine's `get_dummy_wgrad`: what nobody reads, or zeros."""
    make = torch.zeros if zero else torch.empty
    return make((1,) * len(shape), dtype=dtype, device="cuda").expand(*shape)


FUSED, FLASH, FLASH_2 = "NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2"
FLASH_BACKWARD = "NVTE_FUSED_ATTN_USE_FAv2_BWD"
AMPERE, HOPPER = (8, 0), (9, 0)


def fused_attention_refusal() -> str | None:
    """Return why eager attends otherwise than by cuDNN's fused kernels in this process, None where it does not.

    The variables are the whole choice: megatron-core writes `attention_backend` into them when it builds a language
    model. Transformer Engine reads them whenever its attention parameters change.
    """
    if not fits("attention_choice", "attention_backend", "flash_attention_installed"):
        return "this release chooses attention otherwise than those that were looked at"
    if not _is_on(FUSED):
        return f"{FUSED}=0 or attention_backend keeps eager from cuDNN's attention"
    capability = torch.cuda.get_device_capability()
    if capability < AMPERE:
        return "Transformer Engine does not attend by cuDNN's kernels on this GPU"
    if os.environ.get(FLASH_BACKWARD) == "1" and capability == HOPPER:
        return f"{FLASH_BACKWARD}=1 gives eager FlashAttention's backward"
    may_prefer = capability < HOPPER and _is_on(FLASH) and _is_on(FLASH_2)
    if may_prefer and importlib.import_module(TE_ATTENTION_UTILS).FlashAttentionUtils.is_installed:
        return f"Transformer Engine prefers the installed package flash-attn on this GPU; {FLASH}=0 switches it off"
    return None


def _is_on(name: str) -> bool:
    return bool(int(os.environ.get(name, "1")))


BACKWARD, VERSION = seam("attention_backward"), seam("engine_cudnn_version")
CUDNN_WITH_HOST_COPIES, KEYS = (9, 15, 0), 128
# From which on a backward over packs writes its workspace first, on Hopper (NVIDIA/TransformerEngine issue 2186). Of
# 9.14, gradients of heads of 128 were right, of wider ones a fifth off; 9.19's were right.
CUDNN_WITH_RIGHT_GRADIENTS, SURE = (9, 18, 0), 128
# Transformer Engine's names of masks -> the one that hides padding as well.
PADDED = {
    "no_mask": "padding",
    "causal": "padding_causal",
    "causal_bottom_right": "padding_causal_bottom_right",
}


def engine_cudnn() -> tuple[int, ...]:
    """Return the version of Transformer Engine's cuDNN, which need not be PyTorch's."""
    version: tuple[int, ...] = getattr(importlib.import_module(VERSION.module), VERSION.target)()
    return version


def warn_of_gradients(width: int) -> None:
    """Warn once where cuDNN's gradients of packs with heads of this width are wrong; graphs do as eager does."""
    if width <= SURE or not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return
    if (version := engine_cudnn()) < CUDNN_WITH_RIGHT_GRADIENTS:
        warn_once(
            f"Transformer Engine runs cuDNN {'.'.join(map(str, version))}, whose gradients of packs are wrong for "
            f"heads wider than {SURE}, eager too. Let it run 9.18 or newer: bridge-cg doctor --details"
        )


@contextmanager
def device_lengths() -> Iterator[None]:
    """Let a recorded backward of unpacked attention mask padding behind full sequences, where cuDNN is that old."""
    if not torch.cuda.is_available() or engine_cudnn() > CUDNN_WITH_HOST_COPIES:
        yield
        return
    backends = importlib.import_module(BACKWARD.module)
    with overridden(backends, BACKWARD.target, _with_lengths(getattr(backends, BACKWARD.target))):
        yield


def _with_lengths(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fused_attn_bwd(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        mask = PADDED.get(given.get("attn_mask_type", ""))
        if mask is not None and given["max_seqlen_kv"] % KEYS:
            given["attn_mask_type"] = mask
            for side in ("q", "kv"):
                given[f"cu_seqlens_{side}"] = _full(given[f"cu_seqlens_{side}"], given[f"max_seqlen_{side}"])
        return original(*call.args, **call.kwargs)

    return fused_attn_bwd


def _full(offsets: Tensor, tokens: int) -> Tensor:
    """Return the offsets of sequences of so many tokens each; the graph computes them in memory of its own."""
    return torch.arange(0, offsets.numel() * tokens, tokens, dtype=offsets.dtype, device=offsets.device)


@contextmanager
def side_weight_gradients(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run products that add a weight's gradient to `main_grad` on the side stream of a recorded backward.

    Nothing else in a backward reads `main_grad`. The bias gradient that such a product may compute as well waits for
    the end of the backward with other small ones. They have a workspace of their own: products that run at the same
    time in one workspace write to each other's intermediate results. Without a side stream all products stay where
    they are.
    """
    side, gemm = current_side_stream(), sys.modules.get(TE_GEMM)
    fitting = fits("gemm_workspace", "side_products.linear", "side_products.layernorm_linear")
    if side is None or gemm is None or not fitting:
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
        held = modules_where(has_parameters, modules)
        parameters = [p for module in held for p in module._parameters.values() if p is not None]
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
        """Whether nothing reads a bias's gradient before `add_together` adds it at the end."""
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
        owner = sys.modules.get(TE_LAYERNORM_LINEAR)
        if owner is not None and fits("layernorm_linear_forward"):
            stack.enter_context(in_linear_modules("general_gemm", _noting_product))
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
