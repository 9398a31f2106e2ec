"""megatron-core's gated delta nets on a CPU, over packed documents and padded rows.

Model and layers are upstream's own, flash-linear-attention's indices too; stand-ins of its Triton kernels compute on a
CPU. As the kernels do, they find rows by the chunks that they are given, and leave rows that no chunk has unwritten.
"""

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from fla.modules import convolution
from fla.ops.common import chunk_delta_h
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import Qwen3VLTransformerConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from examples.photographs.small_tower import start_single_process

from .packs import ON_CPU, CausalSegments, OnCpu, QwenOnCpu, built, settings_of

# A module, and since megatron-core 0.19 a package.
HOME = "megatron.core.ssm.gated_delta_net"
# Tokens of a chunk of the convolution and of the delta rule, which differ upstream, too.
CONVOLVED, SCANNED = 16, 64
FIELDS = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 3,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def documents_of(rows, cu_seqlens, kernels, size):
    """Return the document of every row that a chunk has, the row where it began, and -1 for other rows.

    Args:
        rows: How many there are.
        cu_seqlens: None for one document.
        kernels: flash-linear-attention's module that asks for chunks.
        size: Tokens of a chunk.
    """
    if cu_seqlens is None:
        return torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    document, place = kernels.prepare_chunk_indices(cu_seqlens, size).long().unbind(1)
    first, end = cu_seqlens.long()[document], cu_seqlens.long()[document + 1]
    at = (first + place * size)[:, None] + torch.arange(size)
    at = torch.where(at < end[:, None], at, rows).reshape(-1)

    def of_rows(values):
        spread = values[:, None].expand(-1, size).reshape(-1)
        return torch.full((rows + 1,), -1).scatter_(0, at, spread)[:rows]

    return of_rows(document), of_rows(first)


class Written(torch.autograd.Function):
    """Rows of documents, and their gradients, in memory that nothing else wrote; a backward asks for chunks again."""

    @staticmethod
    def forward(ctx, computed, cu_seqlens, kernels, size):
        ctx.save_for_backward(cu_seqlens)
        ctx.kernels, ctx.size = kernels, size
        return Written.rows(computed, cu_seqlens, kernels, size)

    @staticmethod
    def backward(ctx, gradient):
        return Written.rows(gradient, *ctx.saved_tensors, ctx.kernels, ctx.size), None, None, None

    @staticmethod
    def rows(values, cu_seqlens, kernels, size):
        document, _ = documents_of(values.shape[1], cu_seqlens, kernels, size)
        there = (document >= 0).view(1, -1, *(1,) * (values.dim() - 2))
        return torch.where(there, values, torch.full_like(values, float("nan")))


def convolve(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens):
    """Stand in for `causal_conv1d`."""
    rows = x.shape[1]
    _, first = documents_of(rows, cu_seqlens, convolution, CONVOLVED)
    total = torch.zeros_like(x)
    for back in range(weight.shape[1]):
        shifted = functional.pad(x, (0, 0, back, 0))[:, :rows]
        inside = torch.arange(rows) - back >= first
        total = total + weight[:, -1 - back] * torch.where(inside[:, None], shifted, 0)
    return Written.apply(functional.silu(total), cu_seqlens, convolution, CONVOLVED), None


def delta_rule(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    """Stand in for `chunk_gated_delta_rule`: decaying linear attention inside documents, by dense masks."""
    rows = q.shape[1]
    document, _ = documents_of(rows, cu_seqlens, chunk_delta_h, SCANNED)
    together = (document[:, None] == document[None]) & torch.ones(rows, rows).tril().bool()
    decay = g.double().cumsum(1)
    weights = torch.exp(torch.where(together[..., None], decay[:, :, None] - decay[:, None], float("-inf")))
    mixed = weights * torch.einsum("blhn,bshn->blsh", q.double(), k.double())
    out = torch.einsum("blsh,bshp->blhp", mixed, beta[..., None].double() * v.double()).to(q.dtype)
    if cu_seqlens is not None:
        out = out * finds_states(cu_seqlens)
    return Written.apply(out, cu_seqlens, chunk_delta_h, SCANNED), None


def finds_states(cu_seqlens):
    """Return 1 if each chunk finds the state that its document's scan has written for it, else NaN."""
    before = chunk_delta_h.prepare_chunk_offsets(cu_seqlens, SCANNED)
    chunks = chunk_delta_h.prepare_chunk_indices(cu_seqlens, SCANNED)
    document, place = chunks.long().unbind(1)
    there = place * SCANNED < cu_seqlens.long().diff()[document]
    right = before[document] + place == torch.arange(len(chunks))
    return torch.where((right | ~there).all(), 1.0, float("nan"))


def normalize(x, *unused, **unused_too):
    """Stand in for `l2norm`."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@contextmanager
def stand_ins():
    """Inside, gated delta nets can be built and run without a GPU."""
    names = {
        "causal_conv1d": convolve,
        "chunk_gated_delta_rule": delta_rule,
        "l2norm": normalize,
        "get_cuda_rng_tracker": lambda: SimpleNamespace(fork=nullcontext),
    }
    homes = [module for name, module in list(sys.modules.items()) if name.startswith(HOME)]
    with ExitStack() as stack:
        stack.enter_context(ON_CPU())
        for name in ("range_push", "range_pop"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, lambda *_: None))
        for home in homes:
            for name, value in names.items():
                if hasattr(home, name):
                    stack.enter_context(mock.patch.object(home, name, value))
        yield


def layer_specs(config, attention=None):
    """Return the layers of a model: two gated delta nets, then attention, over and over."""
    submodules = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    specs = []
    for number in range(config.num_layers):
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm")
        if (number + 1) % config.linear_attention_freq:
            spec.submodules.self_attention = ModuleSpec(GatedDeltaNet, submodules=submodules)
        else:
            spec.submodules.self_attention.module = attention or spec.submodules.self_attention.module
            spec.submodules.self_attention.submodules.core_attention = CausalSegments
        specs.append(spec)
    return TransformerBlockSubmodules(specs, WrappedTorchNorm)


def new_delta_nets(seed=0, layers=3, qwen=False, **config):
    """Build a model with gated delta nets, in training mode; where `stand_ins` are in place.

    Args:
        seed: Of the weights.
        layers: How many, two of three gated delta nets.
        qwen: Whether it is Qwen3.5-VL's language model, with multimodal rotary embedding.
        config: Further fields of the configuration.
    """
    start_single_process()
    torch.manual_seed(seed)
    fields = {**settings_of(layers), **FIELDS, **config}
    made = Qwen3VLTransformerConfig(**fields, mrope_section=[2, 1, 1]) if qwen else TransformerConfig(**fields)
    return built(QwenOnCpu if qwen else OnCpu, made, layer_specs(made, Qwen3VLSelfAttention if qwen else None))
