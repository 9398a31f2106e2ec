"""Combinations of packed-sequence graphs."""

from ..facts import Facts
from ..graph_options import GraphOptions
from ..language_model import IMPL, MODULES, CudaGraphModule
from ..layout import RankLayout
from ..migration import module_names
from ..packed import MAX_PACKED_SEQS, PACKED_FIELDS
from .rule import Combination

# Ways in which context-parallel ranks may exchange keys and values. The first is upstream's default, a ring; the others
# also give every rank a part of the heads.
RING, HEADS, HEADS_AND_RING = EXCHANGES = ("p2p", "a2a", "a2a+p2p")
SUPPORTED = (CudaGraphModule.attn, CudaGraphModule.mlp, CudaGraphModule.moe_router, CudaGraphModule.mamba)


def _names(options: GraphOptions) -> str:
    return ",".join(module_names(options.language_model.modules))


def _unsupported(options: GraphOptions) -> list[str]:
    return [m.name for m in options.language_model.modules if m not in SUPPORTED]


def packs(options: GraphOptions) -> bool:
    """Whether graphs of packed sequences are asked for."""
    return options.packed.enabled and options.language_model.impl == "transformer_engine"


def _upstreams_sequences(options: GraphOptions, facts: Facts) -> bool:
    """Whether upstream's graphs would contain a part that must know which document a token belongs to."""
    language_model = options.language_model
    parts = (CudaGraphModule.attn, CudaGraphModule.mamba) if facts.mamba else (CudaGraphModule.attn,)
    return language_model.impl == "transformer_engine" and any(map(language_model.captures, parts))


def _shares_documents(options: GraphOptions, facts: Facts) -> bool:
    return packs(options) and (facts.context_ranks or 1) > 1


def _ranks_of_heads(facts: Facts) -> int:
    """Return how many context-parallel ranks divide a tensor-parallel rank's heads, at most of all layers."""
    ranks = facts.context_ranks or 1
    if HEADS in facts.context_exchange:
        return ranks
    return facts.context_levels[0] if HEADS_AND_RING in facts.context_exchange and facts.context_levels else 1


def _heads(facts: Facts) -> int:
    """Return the heads of keys and values of a tensor-parallel rank; 0 is unknown."""
    return max((facts.key_heads or 0) // (facts.tensor_ranks or 1), 1) if facts.key_heads else 0


def _layout(facts: Facts) -> RankLayout:
    """Return how ranks share packs, where a configuration sets it."""
    return RankLayout(facts.tensor_ranks or 1, facts.context_ranks or 1, bool(facts.sequence_parallel))


def _sets_layout(facts: Facts) -> bool:
    return None not in (facts.tensor_ranks, facts.context_ranks)


def _uneven_bucket(options: GraphOptions, facts: Facts) -> int:
    """Return a bucket that ranks cannot share in equal parts; 0 where there is none."""
    uneven = (tokens for tokens in options.packed.named_buckets if tokens % _layout(facts).unit)
    return next(uneven, 0) if _sets_layout(facts) else 0


def _next(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit


def whole_layers(options: GraphOptions) -> bool:
    """Whether no part of layers is named."""
    return not options.language_model.modules


def _routes(options: GraphOptions, facts: Facts) -> bool:
    """Whether routers are part of what is captured."""
    return bool(facts.moe and whole_layers(options)) or CudaGraphModule.moe_router in options.language_model.modules


def _expert_tensor_ranks(facts: Facts) -> int:
    """Return ranks of expert tensor parallelism; megatron-core's default is as many as of tensor parallelism."""
    return facts.expert_tensor_ranks or facts.tensor_ranks or 1


def with_experts(facts: Facts) -> str:
    """Return the parts of layers beside which experts stay eager."""
    return "attn,moe_router,mamba" if facts.mamba else "attn,moe_router"


def _all_parts(options: GraphOptions) -> bool:
    """Whether layers are captured as a whole, in either spelling."""
    return whole_layers(options) or {m.name for m in options.language_model.modules} == {"attn", "mlp"}


def one_region(options: GraphOptions, facts: Facts) -> bool:
    """Whether all layers are one region; with experts they are only where no module is named."""
    return whole_layers(options) or (not facts.moe and _all_parts(options))


def asked(options: GraphOptions) -> str:
    """Return the option that asks for graphs of packed sequences, with its value."""
    return f"{MAX_PACKED_SEQS}={options.packed.max_packed_seqs}"


PACKED = (
    Combination(
        "packed-sequence graphs without `cuda_graph_impl=transformer_engine`",
        "The train loop calls the plugin only with this implementation",
        lambda o, f: o.packed.enabled and o.language_model.impl != "transformer_engine",
        lambda o, f: (
            IMPL,
            o.language_model.impl,
            f"transformer_engine with {asked(o)}",
            f"Set {IMPL}=transformer_engine, or remove {MAX_PACKED_SEQS}.",
        ),
    ),
    Combination(
        "packed data with graphs of attention or Mamba layers over unpacked sequences",
        "megatron-core's graphs of these layers take no packed sequences; training would stop at the first replay",
        lambda o, f: f.packed_data and _upstreams_sequences(o, f) and not o.packed.enabled,
        lambda o, f: (
            MAX_PACKED_SEQS,
            None,
            "a number of documents with a dataset that packs",
            f"Set it, to what `bridge-cg plan packed` recommends, or {IMPL}=none.",
        ),
    ),
    Combination(
        "packed-sequence graphs of other modules than attn, mlp, moe_router and mamba",
        "When experts are captured alone, the host reads their token counts",
        lambda o, f: packs(o) and _unsupported(o),
        lambda o, f: (
            MODULES,
            _names(o),
            f"attn, mlp, moe_router, mamba, or empty with {asked(o)}",
            f"Remove {_unsupported(o)[0]}, or leave {MODULES} empty: all layers as one region, experts included.",
        ),
    ),
    Combination(
        "packed-sequence graphs of whole layers with expert tensor parallelism",
        "Graphs do not support experts of which each rank holds a part",
        lambda o, f: packs(o) and f.moe and whole_layers(o) and _expert_tensor_ranks(f) > 1,
        lambda o, f: (
            "model.expert_tensor_parallel_size",
            f.expert_tensor_ranks,
            f"1 with {asked(o)} and {MODULES} empty",
            f"Set {MODULES}={with_experts(f)}, where experts stay eager, or set it to 1.",
        ),
    ),
    Combination(
        "packed-sequence graphs of whole layers with adapters on experts",
        "Graphs compute experts' products without adapters",
        lambda o, f: packs(o) and f.moe and whole_layers(o) and f.expert_adapters,
        lambda o, f: (
            "peft.target_modules",
            ",".join(f.expert_adapters),
            f"other layers than experts' with {asked(o)} and {MODULES} empty",
            f"Set {MODULES}={with_experts(f)}, where experts stay eager.",
        ),
    ),
    Combination(
        "packed-sequence graphs of whole layers with other settings of experts or routers",
        "Experts inside the graph do not support them",
        lambda o, f: packs(o) and f.moe and whole_layers(o) and f.eager_experts,
        lambda o, f: (
            f"model.{f.eager_experts[0]}",
            f.eager_experts[1],
            f"{f.eager_experts[2]} with {asked(o)} and {MODULES} empty",
            f"Set {MODULES}={with_experts(f)}, where experts stay eager.",
        ),
    ),
    Combination(
        "packed-sequence graphs of routers with jitter on their input",
        "Graphs do not support random jitter of the router's input",
        lambda o, f: packs(o) and f.router_jitter and _routes(o, f),
        lambda o, f: (
            "model.moe_input_jitter_eps",
            "above 0",
            f"null with routers on graphs and {asked(o)}",
            f"Set it to null, or {MODULES}=attn.",
        ),
    ),
    Combination(
        "packed-sequence graphs with context parallelism by `all_gather`",
        "Gathered keys and values are not tested with packed documents",
        lambda o, f: _shares_documents(o, f) and set(f.context_exchange) - {*EXCHANGES},
        lambda o, f: (
            "model.cp_comm_type",
            ",".join(f.context_exchange),
            f"{', '.join(EXCHANGES)} with {asked(o)} and context parallelism",
            f"Set it to {RING}, or remove {MAX_PACKED_SEQS}.",
        ),
    ),
    Combination(
        "packed-sequence graphs with context parallelism by `a2a` over ranks that do not divide the heads",
        "Every rank takes an equal part of the heads of keys and values",
        lambda o, f: _shares_documents(o, f) and _heads(f) % _ranks_of_heads(f),
        lambda o, f: (
            "model.cp_comm_type",
            ",".join(f.context_exchange),
            f"{RING} where {_ranks_of_heads(f)} context-parallel ranks share {_heads(f)} heads",
            f"Set it to {RING}, or let a divisor of {_heads(f)} ranks share them.",
        ),
    ),
    Combination(
        "packed-sequence graphs with context parallelism on a model that takes images other than Qwen3-VL",
        "Only Bridge's Qwen3-VL divides packs with images among ranks",
        lambda o, f: _shares_documents(o, f) and f.other_tower,
        lambda o, f: (
            "model.context_parallel_size",
            f.context_ranks,
            f"1 with {asked(o)} on this model",
            f"Use tensor parallelism, or remove {MAX_PACKED_SEQS}.",
        ),
    ),
    Combination(
        "packed-sequence graphs with a bucket that ranks cannot share in equal parts",
        "Every rank holds as many tokens, two chunks of each document with context parallelism",
        lambda o, f: packs(o) and _uneven_bucket(o, f),
        lambda o, f: (
            PACKED_FIELDS["buckets"],
            _uneven_bucket(o, f),
            f"a multiple of {_layout(f).unit} with {_layout(f)}",
            f"Write {_next(_uneven_bucket(o, f), _layout(f).unit)}.",
        ),
    ),
    Combination(
        "packed-sequence graphs with recompute",
        "Activations are in graph memory; recomputing them would need a second graph",
        lambda o, f: packs(o) and f.recompute_granularity is not None,
        lambda o, f: (
            "model.recompute_granularity",
            f.recompute_granularity,
            f"null with {asked(o)}",
            "Remove it; use smaller packs if memory is short.",
        ),
    ),
    Combination(
        "packed-sequence graphs with dropout",
        "A graph does not advance Megatron's random states for dropout",
        lambda o, f: packs(o) and (f.attention_dropout or f.hidden_dropout),
        lambda o, f: (
            "model.attention_dropout" if f.attention_dropout else "model.hidden_dropout",
            "above 0",
            f"0 with {asked(o)}",
            "Set it to 0.",
        ),
    ),
    Combination(
        "packed-sequence graphs with multi-latent attention",
        "Graphs do not support its rotary embedding",
        lambda o, f: packs(o) and f.mla,
        lambda o, f: ("model.multi_latent_attention", True, f"false with {asked(o)}", f"Remove {MAX_PACKED_SEQS}."),
    ),
    Combination(
        "packed-sequence graphs with Megatron-FSDP",
        "Megatron-FSDP moves parameters between steps, but a graph reads fixed addresses",
        lambda o, f: packs(o) and f.megatron_fsdp,
        lambda o, f: (
            "ddp.use_megatron_fsdp",
            True,
            f"false with {asked(o)}",
            "Use DDP with the distributed optimizer.",
        ),
    ),
    Combination(
        "packed-sequence graphs without warm-up steps",
        "Buckets are planned from the packs of warm-up steps",
        lambda o, f: packs(o) and f.warmup_steps == 0,
        lambda o, f: ("model.cuda_graph_warmup_steps", 0, f"at least 1 with {asked(o)}", "Set it to 3."),
    ),
    Combination(
        "packed-sequence graphs with megatron-core's activation offloading",
        "The activations to offload are in graph memory",
        lambda o, f: packs(o) and o.offload.enabled,
        lambda o, f: (
            "fine_grained_activation_offloading",
            True,
            f"false with {asked(o)}",
            "Switch one of both off.",
        ),
    ),
)


TENSORWISE, DELAYED, BLOCKWISE = RECIPES = ("tensorwise", "delayed", "blockwise")
BF16 = "Train in bf16."


def _in_fp8(options: GraphOptions, facts: Facts) -> bool:
    return packs(options) and facts.fp8 is not None


def _with_fp8(options: GraphOptions, facts: Facts) -> str:
    return f"with {asked(options)} and model.fp8={facts.fp8}"


FP8 = (
    Combination(
        "packed-sequence graphs with fp4",
        "fp4 was not looked at",
        lambda o, f: packs(o) and f.fp8 is None and f.low_precision,
        lambda o, f: ("model.fp4", f.low_precision, f"null with {asked(o)}", BF16),
    ),
    Combination(
        "packed-sequence graphs with a precision for each module",
        "Quantized weights are followed where all layers have one recipe",
        lambda o, f: packs(o) and f.own_precision,
        lambda o, f: ("model.quant_recipe", "set", f"null with {asked(o)}", "Remove it."),
    ),
    Combination(
        "packed-sequence graphs in fp8 with another recipe than tensorwise, delayed or blockwise",
        "Other recipes were not compared with eager",
        lambda o, f: _in_fp8(o, f) and f.fp8_recipe not in (None, *RECIPES),
        lambda o, f: (
            "model.fp8_recipe",
            f.fp8_recipe,
            f"{TENSORWISE}, {DELAYED} or {BLOCKWISE} {_with_fp8(o, f)}",
            f"Set it to {TENSORWISE}.",
        ),
    ),
    Combination(
        "packed-sequence graphs in fp8 with attention in fp8",
        "Attention over packed documents in fp8 was not looked at",
        lambda o, f: _in_fp8(o, f) and f.fp8_attention,
        lambda o, f: (f"model.{f.fp8_attention}", True, f"false {_with_fp8(o, f)}", "Set it to false."),
    ),
    Combination(
        "packed-sequence graphs of parts of layers with delayed scaling",
        "Eager updates its scales in the backward of the first layer, which a replayed part leaves out",
        lambda o, f: _in_fp8(o, f) and f.fp8_recipe == DELAYED and not one_region(o, f),
        lambda o, f: (
            "model.fp8_recipe",
            DELAYED,
            f"{TENSORWISE} {_with_fp8(o, f)} and {MODULES} set",
            f"Set it to {TENSORWISE}" + ("." if f.moe else f", or leave {MODULES} empty."),
        ),
    ),
    Combination(
        "packed-sequence graphs of whole layers in fp8 with experts",
        "The plugin's kernels of experts compute in bf16",
        lambda o, f: _in_fp8(o, f) and f.moe and whole_layers(o),
        lambda o, f: (
            "model.fp8",
            f.fp8,
            f"null with {asked(o)}, experts and {MODULES} empty",
            f"Set {MODULES}={with_experts(f)}, where experts stay eager, or train in bf16.",
        ),
    ),
    Combination(
        "packed-sequence graphs in fp8 with Mamba layers",
        "Mamba layers in fp8 were not compared with eager",
        lambda o, f: _in_fp8(o, f) and f.mamba,
        lambda o, f: ("model.fp8", f.fp8, f"null with {asked(o)} and Mamba layers", BF16),
    ),
    Combination(
        "packed-sequence graphs in fp8 with tensor parallelism",
        "Ranks exchange the largest values inside the graph, which was not compared with eager",
        lambda o, f: _in_fp8(o, f) and (f.tensor_ranks or 1) > 1,
        lambda o, f: (
            "model.tensor_model_parallel_size",
            f.tensor_ranks,
            f"1 {_with_fp8(o, f)}",
            "Set it to 1, or train in bf16.",
        ),
    ),
)
