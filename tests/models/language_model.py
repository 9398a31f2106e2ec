"""A GPT model or Mamba hybrid on a GPU with packed documents, as Bridge builds and calls one, and benchmarks' packs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bridge_cg_plugin.graphs.buckets import Bucket
from tests.models.tower import MainGrads

VOCABULARY = 32_768
# Fields of the configuration of most dense models.
DENSE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model.

    Attributes:
        layers: Transformer layers.
        hidden: Width.
        heads: Query heads; half as many, at most 8, for keys and values.
        head_width: Of an attention head.
        ffn: Width of the MLP, or of an expert.
        experts: Experts, each token goes to 4; 0 is a dense model.
        pattern: A letter per layer of a hybrid, M Mamba, * attention, - MLP, in place of `layers`; none is a GPT model.
        fused_rope: Whether eager's rotary embedding is Transformer Engine's kernel.
        images: Whether it is Qwen3-VL's language model, which takes features of images behind its first layers.
        fp8: How products in fp8 are scaled, as megatron-core's `fp8_recipe`; empty is bf16.
        attending: Every so manyth layer attends, and the others have gated delta nets, as Qwen3.5's; 1 is all attend.
    """

    layers: int = 16
    hidden: int = 2048
    heads: int = 16
    head_width: int = 128
    ffn: int = 6144
    experts: int = 0
    pattern: str = ""
    fused_rope: bool = False
    images: bool = False
    fp8: str = ""
    attending: int = 1


SHAPES = {
    "dense": Shape(),
    "fp8": Shape(fp8="tensorwise"),
    "moe": Shape(ffn=768, experts=32),
    "large": Shape(layers=8, hidden=5120, heads=40, ffn=17408),
    "planned": Shape(layers=8),
    "mamba": Shape(pattern="M-M-M*-M-M-M*-M-"),
}


def build_model(
    shape: Shape, seed: int = 0, max_length: int = 16_384, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> nn.Module:
    """Build a model with random weights on the current GPU, with graphs possible and off.

    Args:
        shape: Sizes.
        seed: Of the weights.
        max_length: Most tokens of a document.
        dtype: Of the weights.
        changes: Fields of the configuration.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)  # of layers that ranks share
    made = {**settings_of(shape), "params_dtype": dtype, "bf16": dtype is torch.bfloat16, **changes}
    model = _qwen(made, max_length) if shape.images else _language_model(shape, made, max_length)
    return model.cuda().to(dtype).train()


def settings_of(shape: Shape) -> dict[str, Any]:
    """Return the fields of a model's configuration."""
    experts = {
        "num_moe_experts": shape.experts,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,  # as in Bridge's recipes
        "moe_router_load_balancing_type": "none",
    }
    # Mamba layers twice as wide as the model, in heads of 64, as Nemotron-H has them.
    hybrid = {
        "num_layers": len(shape.pattern),
        "is_hybrid_model": True,
        "mamba_num_heads": shape.hidden // 32,
        "mamba_head_dim": 64,
        "mamba_state_dim": 128,
        "mamba_num_groups": 8,
    }
    delta_nets = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": shape.attending,
        "linear_num_key_heads": shape.heads,
        "linear_num_value_heads": 2 * shape.heads,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    }
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": min(shape.heads // 2, 8),
        "kv_channels": shape.head_width,
        "ffn_hidden_size": shape.ffn,
        **DENSE,
        "qk_layernorm": True,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": shape.fused_rope,
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_warmup_steps": 3,
        **(experts if shape.experts else {}),
        **(hybrid if shape.pattern else {}),
        **(delta_nets if shape.attending > 1 else {}),
        **({"fp8": "hybrid", "fp8_recipe": shape.fp8} if shape.fp8 else {}),
    }


def _language_model(shape: Shape, settings: dict[str, Any], max_length: int) -> nn.Module:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(**settings)
    return _hybrid(shape, config, max_length) if shape.pattern else _gpt(shape, config, max_length)


def _qwen(settings: dict[str, Any], max_length: int) -> nn.Module:
    """Build Qwen3-VL's language model as Bridge does, set for packs."""
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model import Qwen3VLGPTModel
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import Qwen3VLTransformerConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.attention import SelfAttention

    config = Qwen3VLTransformerConfig(**settings, mrope_section=[24, 20, 20])
    spec = _delta_net_layers(config) or get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    for layer in getattr(spec, "layer_specs", [spec]):
        if layer.submodules.self_attention.module is SelfAttention:
            layer.submodules.self_attention.module = Qwen3VLSelfAttention
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = Qwen3VLGPTModel(config, spec, VOCABULARY, max_length, position_embedding_type="mrope", pg_collection=groups)
    model.rotary_pos_emb.is_thd_format = True  # the model around it sets this for packs
    made: nn.Module = model
    return made


def _gpt(shape: Shape, config: Any, max_length: int) -> nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    spec = _delta_net_layers(config) or get_gpt_layer_with_transformer_engine_spec(
        num_experts=shape.experts or None, moe_grouped_gemm=bool(shape.experts), qk_layernorm=True
    )
    model: nn.Module = GPTModel(
        config,
        spec,
        VOCABULARY,
        max_length,
        position_embedding_type="rope",
        rotary_base=1_000_000,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return model


def _delta_net_layers(config: Any) -> Any:
    """Return the layers of a model with gated delta nets; None of others."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    if not config.linear_attention_freq:
        return None
    return specs.get_transformer_block_with_experimental_attention_variant_spec(config)


def _hybrid(shape: Shape, config: Any, max_length: int) -> nn.Module:
    """Build a hybrid without rotary embedding, as Nemotron-H is."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    model: nn.Module = HybridModel(
        config,
        hybrid_stack_spec,
        VOCABULARY,
        max_length,
        hybrid_layer_pattern=shape.pattern,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return model


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack on the GPU.

    Attributes:
        arguments: Of the model.
        lengths: Tokens of every document, with its padding.
        weights: `[1, tokens]` gradients of the per-token losses.
    """

    arguments: dict[str, Any]
    lengths: tuple[int, ...]
    weights: Tensor

    @property
    def tokens(self) -> int:
        """Tokens."""
        return sum(self.lengths)


def make_pack(lengths: Sequence[int], seed: int = 1, room: Sequence[int] | None = None) -> Pack:
    """Make random tokens for documents; the offsets are announced to the plugin as Bridge's batch step does.

    Args:
        lengths: Tokens of every document.
        seed: Of the tokens.
        room: Tokens of every document with its padding; None is no padding.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    from bridge_cg_plugin.upstream.hooks.batches import PACK_OFFSETS

    places = tuple(room or lengths)
    generator = torch.Generator("cuda").manual_seed(seed)
    longest, count = max(places), sum(places)
    tokens = torch.randint(VOCABULARY, (1, count), device="cuda", generator=generator)
    named = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    if room is not None:
        named |= {"cu_seqlens_q_padded": room, "cu_seqlens_kv_padded": room}
    offsets = {}
    for name, counts in named.items():
        host = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        offsets[name] = host.cuda()
        PACK_OFFSETS.remember(offsets[name], host)
    params = PackedSeqParams(
        qkv_format="thd", **offsets, max_seqlen_q=longest, max_seqlen_kv=longest, total_tokens=count
    )
    arguments = {
        "input_ids": tokens,
        "position_ids": torch.cat([torch.arange(n, device="cuda") for n in places])[None],
        "attention_mask": None,
        "labels": tokens.roll(-1, 1),
        "packed_seq_params": params,
    }
    weights = torch.rand(1, count, device="cuda", generator=generator) / count
    return Pack(arguments, places, weights)


def with_images(pack: Pack, width: int, features: int = 2, every: int = 5) -> Pack:
    """Return a pack for Qwen3-VL's language model: positions on three axes, features at every so manyth token.

    Args:
        pack: Documents of text.
        width: Of the model.
        features: Behind how many layers features are added.
        every: Which tokens are those of images.
    """
    tokens = pack.arguments["input_ids"].shape[1]
    places = torch.arange(tokens, device="cuda")
    mask = (places % every == 1)[None]
    generator = torch.Generator("cuda").manual_seed(tokens)
    shape = int(mask.sum()), width
    embeddings = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for _ in range(features)
    ]
    axes = torch.stack([pack.arguments["position_ids"] + axis * (places % 7) for axis in range(3)])
    visual = {"visual_pos_masks": mask, "deepstack_visual_embeds": embeddings}
    return replace(pack, arguments={**pack.arguments, "position_ids": axes, **visual})


def held(lengths: Sequence[int], ranks: int, rank: int) -> list[int]:
    """Return the places in a pack of the tokens that a context-parallel rank holds, in its order.

    Args:
        lengths: Tokens of every document with its padding, multiples of `2 * ranks`.
        ranks: Ranks of context parallelism; each holds two of `2 * ranks` chunks of every document.
        rank: Which of them.
    """
    places: list[int] = []
    start = 0
    for length in lengths:
        chunk = length // (2 * ranks)
        for number in (rank, 2 * ranks - rank - 1):
            places += range(start + number * chunk, start + (number + 1) * chunk)
        start += length
    return places


def part_of(pack: Pack, ranks: int, rank: int) -> Pack:
    """Return what a context-parallel rank is given of a pack; its offsets and lengths stay those of all."""
    if ranks == 1:
        return pack
    places = held(pack.lengths, ranks, rank)
    return replace(pack, arguments=arguments_at(pack.arguments, places), weights=pack.weights[:, places])


def arguments_at(arguments: dict[str, Any], places: list[int]) -> dict[str, Any]:
    """Return a model's arguments for the tokens at some places of a pack."""
    parts = {name: arguments[name][..., places] for name in ("input_ids", "position_ids", "labels")}
    if "visual_pos_masks" in arguments:
        mask = arguments["visual_pos_masks"]
        rows = (mask.cumsum(1) - 1)[0, places][mask[0, places]]
        embeddings = arguments["deepstack_visual_embeds"]
        parts["visual_pos_masks"] = mask[:, places]
        parts["deepstack_visual_embeds"] = [each.detach()[rows].requires_grad_() for each in embeddings]
    return {**arguments, **parts}


def step(model: nn.Module, pack: Pack, between: Callable[[], object] | None = None) -> Tensor:
    """Run forward and backward; returns the per-token losses, `[1, tokens]`. `between` is called between both."""
    losses: Tensor = model(**pack.arguments)
    if between is not None:
        between()
    losses.backward(pack.weights.to(losses.dtype))
    return losses.detach()


def split(tokens: int, documents: int) -> tuple[int, ...]:
    """Return lengths of so many documents, nearly alike, that are `tokens` together."""
    short, rest = divmod(tokens, documents)
    return (*(short + 1,) * rest, *(short,) * (documents - rest))


def draw(tokens: int, documents: int, seed: int) -> tuple[int, ...]:
    """Return random lengths of so many documents, with a long tail, that are `tokens` together."""
    rng = random.Random(seed)
    shares = [rng.paretovariate(1.2) for _ in range(documents)]
    lengths = [1 + int((tokens - documents) * share / sum(shares)) for share in shares]
    lengths[0] += tokens - sum(lengths)
    rng.shuffle(lengths)
    return tuple(lengths)


def new_helper(
    model: nn.Module,
    *warmup: Pack,
    modules: Sequence[str] = (),
    by_layer: bool = False,
    capture: bool = True,
    recorded: Sequence[Bucket] | None = None,
    exact: bool = True,
    **options: Any,
) -> Any:
    """Observe eager passes over packs, capture, and return the model's helper.

    Args:
        model: The model.
        warmup: Packs of the eager passes; their layout is that of all packs.
        modules: Parts of layers to capture; none are all layers as one region.
        by_layer: Whether parts stay regions of their own where they could be one.
        capture: Whether to capture at once.
        recorded: What to record, with the limits (documents, tokens of the longest); None is what options give.
        exact: Whether weight gradients are rounded before they are added, as eager's are.
        options: `cuda_graph_...` fields of the configuration.
    """
    from bridge_cg_plugin.upstream.hooks.helpers.constructors import decoder_helpers

    fusion = {"cuda_graph_packed_gradient_accumulation_fusion": not exact}
    values = {"cuda_graph_packed_strict": True, "cuda_graph_modules": list(modules), **fusion, **options}
    for name, value in values.items():
        setattr(model.config, name, value)
    (helper,) = decoder_helpers([model], model.config, num_microbatches=8)
    graphs = helper.graphs
    assert graphs is not None
    MainGrads.reduce_gradients(model, graphs)
    workload: Any = graphs.workload
    if by_layer:
        workload.family.parts = workload.family.layer_parts
    if recorded is not None:
        workload._planned = lambda: list(recorded)
    with torch.no_grad():
        for pack in warmup:
            model(**pack.arguments)
    if capture:
        helper.create_cudagraphs()
    return helper
