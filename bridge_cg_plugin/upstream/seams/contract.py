"""The contract: a graph stands for upstream's own code, so it is used only where that code is in place.

The tables name each function of upstream that recorded work does not run as it is. Its shipped object is what its
module held when the import ended, before anybody could patch it; names are no proof, as `functools.wraps` copies them.
What recorded work calls as it is, adapters and wrapped layers among it, needs no entry. Imports neither torch nor
Megatron.
"""

import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_QWEN3_VL = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
_CORE, _TE = "megatron.core", "transformer_engine.pytorch"
_HF = "transformers.models"
_ROPE, BIAS_DROPOUT_ADD = f"{_CORE}.models.common.embeddings.rope_utils", f"{_CORE}.fusions.fused_bias_dropout"
_MOE = f"{_CORE}.transformer.moe"
HF_MODELS, ATTENTION_FUNCTIONS = "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"
EAGER_ATTENTION, SDPA = "eager_attention_forward", "scaled_dot_product_attention"
# What Transformer Engine's linear layers multiply with, where they have such a method.
WEIGHTS = "_get_weight_tensors"
_VISION_LAYOUT = ("get_vision_cu_seqlens", "get_vision_position_ids")


def _tower(tower: str, attention: str, *functions: str) -> tuple[str, ...]:
    """Return what stands for a tower of Hugging Face's: its forward, attention, and functions that these call."""
    return (f"{tower}.forward", f"{attention}.forward", EAGER_ATTENTION, *functions)


def _methods(kind: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{kind}.{name}" for name in names)


EXCHANGE = (
    *("dispatch_preprocess", "token_dispatch", "dispatch_postprocess"),
    *("combine_preprocess", "token_combine", "combine_postprocess"),
)
# Where one of these is not upstream's, the region runs eager.
OUTLINES: dict[str, tuple[str, ...]] = {
    f"{_QWEN3_VL}.vision_model": (
        *_methods("Qwen3VLVisionModel", "forward", "rot_pos_emb", "fast_pos_embed_interpolate"),
        *("Qwen3VLVisionModel.build_packed_seq_params", "_vision_forward_packed_attention_setup"),
    ),
    f"{_QWEN3_VL}.utils": ("Qwen3VLVisionRotaryEmbedding.forward",),
    f"{_QWEN3_VL}.transformer_block": ("Qwen3VLTransformerBlock._deepstack_process",),
    f"{_HF}.qwen2_5_vl.modeling_qwen2_5_vl": _tower(
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionAttention",
        *("apply_rotary_pos_emb_vision", "rotate_half", "get_vision_window_index", *_VISION_LAYOUT),
    ),
    f"{_HF}.qwen2_5_omni.modeling_qwen2_5_omni": _tower(
        "Qwen2_5OmniVisionEncoder",
        "Qwen2_5OmniVisionAttention",
        *("apply_rotary_pos_emb_vision", "rotate_half", "get_vision_window_index", *_VISION_LAYOUT),
    ),
    f"{_HF}.glm4v.modeling_glm4v": _tower(
        "Glm4vVisionModel",
        "Glm4vVisionAttention",
        *("apply_rotary_pos_emb_vision", "rotate_half", *_VISION_LAYOUT),
    ),
    f"{_HF}.qwen3_omni_moe.modeling_qwen3_omni_moe": (
        *_tower("Qwen3OmniMoeVisionEncoder", "Qwen3OmniMoeVisionAttention", "apply_rotary_pos_emb_vision"),
        *("rotate_half", "get_vision_bilinear_indices_and_weights", *_VISION_LAYOUT),
        *("Qwen3OmniMoeAudioEncoder.forward", "Qwen3OmniMoeAudioAttention.forward"),
        *("chunk_and_pad_features", "get_audio_cu_seqlens", "get_valid_indices", "_get_feat_extract_output_lengths"),
    ),
    f"{_HF}.pixtral.modeling_pixtral": _tower(
        "PixtralVisionModel",
        "PixtralAttention",
        *("apply_rotary_pos_emb", "rotate_half", "generate_block_attention_mask", "position_ids_in_meshgrid"),
    ),
    f"{_CORE}.ssm.gated_delta_net.common": ("_GDNBase._resolve_cu_seqlens",),
    f"{_MOE}.moe_layer": _methods(
        "MoELayer",
        *("forward", "route", "preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess"),
        "shared_experts_compute",
    ),
    f"{_MOE}.token_dispatcher": tuple(
        method
        for kind in ("MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher")
        for method in _methods(kind, *EXCHANGE)
    )
    + ("MoEAlltoAllTokenDispatcher.preprocess", "permute", "unpermute", "sort_chunks_by_idxs", "all_to_all"),
    f"{_MOE}.experts": (
        *("TEGroupedMLP.forward", "SequentialMLP.forward"),
        *("weighted_bias_swiglu_impl", "weighted_bias_quick_geglu_impl"),
    ),
}
# Likewise, of packs whose tokens are rotated by these.
PACKED_ROTARY = {
    f"{_CORE}.transformer.attention": ("apply_rotary_pos_emb",),
    _ROPE: ("_apply_rotary_pos_emb_thd", "_get_thd_freqs_on_this_cp_rank"),
}
# Likewise, of experts inside a region, whose linear layers call these.
EXPERT_PRODUCTS = {
    f"{_CORE}.tensor_parallel.layers": (
        *("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"),
        *("ColumnParallelLinear._forward_impl", "RowParallelLinear._forward_impl"),
    )
}
# Where one of these is not upstream's, recorded work runs the module's own code in place of the plugin's kernel.
SWAPS: dict[str, tuple[str, ...]] = {
    "torch.nn.modules.sparse": ("Embedding.forward",),
    "torch.nn.modules.linear": ("Linear.forward",),
    "torch.nn.modules.conv": (  # captured as it is: only here a look sees PyTorch's own classes patched
        *_methods("Conv2d", "forward", "_conv_forward"),
        *_methods("Conv3d", "forward", "_conv_forward"),
    ),
    "torch.nn.functional": ("grid_sample", "linear", SDPA),
    f"{_QWEN3_VL}.attention": ("apply_rotary_pos_emb_absolute",),
    f"{_QWEN3_VL}.rope": ("apply_rotary_pos_emb_thd_absolute", "_apply_rotary_pos_emb_bshd"),
    _ROPE: ("_rotate_half",),
    f"{_CORE}.transformer.attention": ("SelfAttention.get_query_key_value_tensors",),
    f"{_CORE}.transformer.mlp": ("MLP.forward",),
    BIAS_DROPOUT_ADD: (
        *("get_bias_dropout_add", "bias_dropout_add_unfused", "_bias_dropout_add_func"),
        *("bias_dropout_add_fused_train", "bias_dropout_add_fused_inference"),
    ),
    f"{_MOE}.router": ("TopKRouter.routing", "TopKRouter._apply_expert_bias"),
    f"{_CORE}.tensor_parallel.layers": ("ColumnParallelLinear.forward", "RowParallelLinear.forward"),
    f"{_CORE}.extensions.transformer_engine": (
        *("TEDotProductAttention.forward", "TELinear.forward", "TEGroupedLinear.forward"),
        "TELayerNormColumnParallelLinear.forward",
    ),
    f"{_TE}.attention.dot_product_attention.dot_product_attention": ("DotProductAttention.forward",),
    f"{_TE}.attention.dot_product_attention.backends": (
        *("FusedAttention.forward", "FlashAttention.forward", *_methods("FusedAttnFunc", "forward", "backward")),
        *("fused_attn_fwd", "fused_attn_bwd"),
        *("_fused_attn_forward_impl", "_fused_attn_setup_ctx", "_fused_attn_backward_impl"),
    ),
    f"{_TE}.module.layernorm_linear": ("LayerNormLinear.forward", "_LayerNormLinear.forward"),
    f"{_TE}.module.grouped_linear": ("GroupedLinear.forward", f"GroupedLinear.{WEIGHTS}"),
    f"{_TE}.module.linear": (f"Linear.{WEIGHTS}",),
    f"{_TE}.ops.basic.layer_norm": ("LayerNorm.op_forward", "LayerNorm.op_backward"),
    f"{_HF}.qwen2_5_vl.modeling_qwen2_5_vl": ("Qwen2_5_VLRMSNorm.forward",),
    f"{_HF}.qwen2_5_omni.modeling_qwen2_5_omni": ("Qwen2_5OmniRMSNorm.forward",),
    f"{_HF}.glm4v.modeling_glm4v": ("Glm4vRMSNorm.forward",),
    f"{_HF}.pixtral.modeling_pixtral": ("PixtralRMSNorm.forward",),
    HF_MODELS: (ATTENTION_FUNCTIONS,),
    "transformers.integrations.sdpa_attention": ("sdpa_attention_forward", "use_gqa_in_sdpa"),
}
# Where Qwen3-VL's rotation is.
ROTARY_HOMES = (f"{_QWEN3_VL}.attention", f"{_QWEN3_VL}.rope", _ROPE)


def _joined(*tables: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: tuple(target for table in tables for target in table.get(name, ())) for name in names}


CONTRACT = _joined(OUTLINES, PACKED_ROTARY, EXPERT_PRODUCTS, SWAPS)
_PACKAGE = str(Path(__file__).parents[2])
# The shipped object by module and target; of each, in order, its name, its owner, the namespace that holds it, its key.
_shipped: dict[tuple[str, str], Any] = {}
PLACES: list[str] = []
_owners: list[Any] = []
_spaces: list[Mapping[str, Any]] = []
_keys: list[str] = []
_registries: list[int] = []
_remembered: set[str] = set()


def remember(module: ModuleType) -> None:
    """Note what a module of upstream has shipped; called when its import ends. The first look counts."""
    if module.__name__ in _remembered:
        return
    _remembered.add(module.__name__)
    for target in CONTRACT.get(module.__name__, ()):
        owner, _, name = target.rpartition(".")
        space = vars(vars(module).get(owner, object)) if owner else vars(module)
        if name in space:
            registry = name == ATTENTION_FUNCTIONS
            if registry:
                _registries.append(len(PLACES))
            _spaces.append(space)
            _keys.append(name)
            PLACES.append(f"{module.__name__}.{target}")
            _owners.append(vars(module)[owner] if owner else module)
            _shipped[module.__name__, target] = upstreams(_entries(space[name]) if registry else space[name])


def held_now() -> list[Any]:
    """Return what the contract's places hold now, in the order of `PLACES`."""
    # Before every replay outside of steps: no line of Python, and little memory, for each.
    try:
        held = list(map(operator.getitem, _spaces, _keys))
    except KeyError:
        held = [space.get(key) for space, key in zip(_spaces, _keys, strict=True)]
    for place in _registries:
        held[place] = _entries(held[place])
    return held


def put_back(held: Sequence[Any]) -> None:
    """Let the places hold what `held_now` returned: code that is interrupted may leave functions of its own there."""
    for number, (before, now) in enumerate(zip(held, held_now(), strict=False)):
        if before is not now and before is not None and number not in _registries:
            setattr(_owners[number], _keys[number], before)


def shipped(module: str, target: str) -> Any:
    """Return what a module shipped at a place of the contract; None where it ships nothing there.

    A module that was imported while the plugin was off has shipped what it holds at the first look.
    """
    if module not in _remembered and module in sys.modules:
        remember(sys.modules[module])
    return _shipped.get((module, target))


def is_shipped(module: str, function: Any) -> bool:
    """Whether a function is one that a module shipped at a place of the contract."""
    return function is not None and any(shipped(module, target) is function for target in CONTRACT[module])


def all_shipped(module: str) -> bool:
    """Whether a module holds what it shipped, or what the plugin put there, at each of its places of the contract."""
    targets = {f"{module}.{target}": target for target in CONTRACT[module]}
    held = zip(PLACES, held_now(), strict=True)
    return all(upstreams(now) is shipped(module, targets[place]) for place, now in held if place in targets)


def _entries(registry: Any) -> Any:
    """Return what a registry of functions holds, those of one object behind those of all; of no registry itself."""
    if not hasattr(registry, "items"):
        return registry
    parts = [getattr(registry, name, None) for name in ("_global_mapping", "_local_mapping")]
    found = chain.from_iterable(registry.items() if part is None else part.items() for part in parts)
    return tuple(found)


def upstreams(value: Any) -> Any:
    """Return what a replacement of the plugin's own replaced; any other value is itself."""
    while is_ours(value):
        value = getattr(value, "__wrapped__", None)
    return value


def is_ours(value: Any) -> bool:
    """Whether code of this package runs when a value is called: its file proves it, names do not."""
    code = _code(value)
    return code is not None and code.co_filename.startswith(_PACKAGE)


def described(value: Any) -> str:
    """Return what a function is and where its code lies."""
    code = _code(value)
    if code is None:
        kind = value if isinstance(value, type) else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _code(value: Any) -> CodeType | None:
    while isinstance(value, functools.partial):
        value = value.func
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return code if isinstance(code, CodeType) else None
