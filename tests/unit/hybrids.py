"""megatron-core's Mamba-Transformer hybrid on a CPU with packed documents.

Model, layers and mixer are upstream's own; mamba-ssm's two kernels run on a GPU only, and stand-ins of theirs compute
the same recurrence here: a causal convolution and a scan, both inside documents as `seq_idx` says.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_block, mamba_context_parallel, mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import nn
from torch.nn import functional

from examples.photographs.small_tower import start_single_process
from tests.models.language_model import held

from .packs import ON_CPU, VOCABULARY, CausalSegments, pack, peaked, settings_of

PATTERN = "M*-M"
MAMBA = {"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_num_heads": 4}


class GatedNorm(nn.Module):
    """Stands in for mamba-ssm's RMS norm."""

    def __init__(self, width, eps, device=None, dtype=None, **unused):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width, device=device, dtype=dtype)), eps

    def forward(self, x):
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def scan(
    zxbcdt, conv_weight, conv_bias, dt_bias, a, D, chunk_size, activation, headdim, ngroups, seq_idx=None, **unused
):
    """Stand in for `mamba_split_conv1d_scan_combined`: convolution, scan and gate inside documents, by dense masks.

    In double precision, so that rounding of decays does not hide what tests compare.
    """
    dtype = zxbcdt.dtype
    zxbcdt, conv_weight, conv_bias, dt_bias, a, D = (
        t.double() for t in (zxbcdt, conv_weight, conv_bias, dt_bias, a, D)
    )
    tokens, heads = zxbcdt.shape[1], dt_bias.shape[0]
    inner, states = heads * headdim, (conv_weight.shape[0] - heads * headdim) // 2
    z, mixed, dt = zxbcdt[0].split([inner, inner + 2 * states, heads], dim=-1)
    document = torch.zeros(tokens) if seq_idx is None else seq_idx[0]
    together = (document[:, None] == document[None]) & torch.ones(tokens, tokens).tril().bool()
    convolved = conv_bias.expand(tokens, -1)
    for back in range(min(conv_weight.shape[1], tokens)):
        shifted = functional.pad(mixed, (0, 0, back, 0))[:tokens]
        seen = functional.pad(document[: tokens - back] == document[back:], (back, 0))
        convolved = convolved + conv_weight[:, -1 - back] * torch.where(seen[:, None], shifted, 0)
    x, b, c = functional.silu(convolved).split([inner, states, states], dim=-1)
    x = x.view(tokens, heads, headdim)
    b, c = (t.view(tokens, ngroups, -1).repeat_interleave(heads // ngroups, 1) for t in (b, c))
    dt = functional.softplus(dt + dt_bias)
    decay = (dt * a).cumsum(0)
    weights = torch.exp(torch.where(together[..., None], decay[:, None] - decay[None], float("-inf")))
    mixed = weights * torch.einsum("lhn,shn->lsh", c, b)
    y = torch.einsum("lsh,shp->lhp", mixed, dt[..., None] * x) + D[:, None] * x
    return (y.reshape(tokens, inner) * functional.silu(z))[None].to(dtype)


def partitioned_indices(cu_seqlens, total_tokens, ranks, rank):
    """Stand in for Transformer Engine's kernel: the places of the tokens that a context-parallel rank holds."""
    places = held(cu_seqlens.diff().tolist(), ranks, rank)
    assert len(places) * ranks == total_tokens
    return torch.tensor(places, dtype=torch.int32)


@contextmanager
def stand_ins():
    """Inside, megatron-core's mixer can be built and run without mamba-ssm and a GPU."""
    replacements = {
        "HAVE_MAMBA_SSM": True,
        "ExtendedRMSNorm": GatedNorm,
        "mamba_split_conv1d_scan_combined": scan,
        "_check_mamba_sequence_packing_support": lambda for_inference_not_training: (True, None),
        "get_cuda_rng_tracker": lambda: SimpleNamespace(fork=nullcontext),
    }
    with ExitStack() as stack:
        stack.enter_context(ON_CPU())
        for name, value in replacements.items():
            stack.enter_context(mock.patch.object(mamba_mixer, name, value))
        kernels = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
        stack.enter_context(mock.patch.object(mamba_context_parallel, "tex", kernels))
        yield


def stack_spec(experts):
    local = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm").submodules
    moe = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm").submodules.mlp
    local.self_attention.submodules.core_attention = CausalSegments
    bda = get_bias_dropout_add
    mixer = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm, self_attention=local.self_attention, self_attn_bda=bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=local.mlp, mlp_bda=bda)
    routed = TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=moe, mlp_bda=bda)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=ModuleSpec(mamba_mixer.MambaMixer, submodules=mixer), mamba_bda=bda
    )
    return ModuleSpec(
        mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(MoETransformerLayer, submodules=routed),
        ),
    )


def new_hybrid(seed=0, pattern=PATTERN, rotary=False, **config):
    """Build a hybrid of a few layers with random weights, in training mode; where `stand_ins` are in place.

    Args:
        seed: Of the weights.
        pattern: A letter per layer: M Mamba, * attention, - MLP, E experts.
        rotary: Whether attention rotates.
        config: Further fields of the configuration.
    """
    start_single_process()
    torch.manual_seed(seed)
    made = TransformerConfig(**{**settings_of(len(pattern)), "is_hybrid_model": True, **MAMBA, **config})
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with mock.patch(f"{mamba_block.MambaStack.__module__}.TENorm", WrappedTorchNorm):
        model = MambaModel(
            made,
            stack_spec(made.num_moe_experts),
            VOCABULARY,
            1024,
            hybrid_layer_pattern=pattern,
            position_embedding_type="rope" if rotary else "none",
            pg_collection=groups,
        )
    return peaked(model)


def hybrid_pack(lengths, **changes):
    """Return `pack`'s arguments with every token's document, as Bridge's step asks upstream for it."""
    arguments = pack(lengths, **changes)
    params = arguments["packed_seq_params"]
    params.total_tokens = arguments["input_ids"].shape[1]
    params.__post_init__()
    return arguments
