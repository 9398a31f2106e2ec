"""Combinations of packed-sequence graphs."""

from ..facts import Facts
from ..graph_options import GraphOptions
from ..language_model import IMPL, MODULES, CudaGraphModule
from ..migration import module_names
from ..packed import MAX_PACKED_SEQS, PACKED_FIELDS
from .rule import Combination

# Upstream's default, and the one way in which context-parallel ranks may exchange keys and values.
RING = "p2p"
SUPPORTED = (CudaGraphModule.attn, CudaGraphModule.mlp, CudaGraphModule.moe_router, CudaGraphModule.mamba)


def _names(options: GraphOptions) -> str:
    return ",".join(module_names(options.language_model.modules))


def _unsupported(options: GraphOptions) -> list[str]:
    return [m.name for m in options.language_model.modules if m not in SUPPORTED]


def _packs(options: GraphOptions) -> bool:
    return options.packed.enabled and options.language_model.impl == "transformer_engine"


def _upstreams_sequences(options: GraphOptions, facts: Facts) -> bool:
    """Whether upstream's graphs would contain a part that must know which document a token belongs to."""
    language_model = options.language_model
    parts = (CudaGraphModule.attn, CudaGraphModule.mamba) if facts.mamba else (CudaGraphModule.attn,)
    return language_model.impl == "transformer_engine" and any(map(language_model.captures, parts))


def _shares_documents(options: GraphOptions, facts: Facts) -> bool:
    return _packs(options) and (facts.context_ranks or 1) > 1


def _whole_layers(options: GraphOptions) -> bool:
    return not options.language_model.modules


def _routes(options: GraphOptions, facts: Facts) -> bool:
    """Whether routers are part of what is captured."""
    return bool(facts.moe and _whole_layers(options)) or CudaGraphModule.moe_router in options.language_model.modules


def _expert_tensor_ranks(facts: Facts) -> int:
    """Return ranks of expert tensor parallelism; megatron-core's default is as many as of tensor parallelism."""
    return facts.expert_tensor_ranks or facts.tensor_ranks or 1


def _beside_experts(facts: Facts) -> str:
    return "attn,moe_router,mamba" if facts.mamba else "attn,moe_router"


def _all_parts(options: GraphOptions) -> bool:
    """Whether layers are captured as a whole, in either spelling."""
    return _whole_layers(options) or {m.name for m in options.language_model.modules} == {"attn", "mlp"}


def _moving(options: GraphOptions) -> str:
    """Return the first option that moves activations."""
    return next(PACKED_FIELDS[n] for n in ("offload", "recompute", "offload_above_gb") if getattr(options.packed, n))


def _asked(options: GraphOptions) -> str:
    return f"{MAX_PACKED_SEQS}={options.packed.max_packed_seqs}"


PACKED = (
    Combination(
        "packed-sequence graphs without `cuda_graph_impl=transformer_engine`",
        "The train loop calls the plugin only with this implementation",
        lambda o, f: o.packed.enabled and o.language_model.impl != "transformer_engine",
        lambda o, f: (
            IMPL,
            o.language_model.impl,
            f"transformer_engine with {_asked(o)}",
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
        lambda o, f: _packs(o) and _unsupported(o),
        lambda o, f: (
            MODULES,
            _names(o),
            f"attn, mlp, moe_router, mamba, or empty with {_asked(o)}",
            f"Remove {_unsupported(o)[0]}, or leave {MODULES} empty: all layers as one region, experts included.",
        ),
    ),
    Combination(
        "packed-sequence graphs of whole layers with expert tensor parallelism",
        "Graphs do not support experts of which each rank holds a part",
        lambda o, f: _packs(o) and f.moe and _whole_layers(o) and _expert_tensor_ranks(f) > 1,
        lambda o, f: (
            "model.expert_tensor_parallel_size",
            f.expert_tensor_ranks,
            f"1 with {_asked(o)} and {MODULES} empty",
            f"Set {MODULES}={_beside_experts(f)}, where experts stay eager, or set it to 1.",
        ),
    ),
    Combination(
        "packed-sequence graphs of whole layers with adapters on experts",
        "Graphs compute experts' products without adapters",
        lambda o, f: _packs(o) and f.moe and _whole_layers(o) and f.expert_adapters,
        lambda o, f: (
            "peft.target_modules",
            ",".join(f.expert_adapters),
            f"other layers than experts' with {_asked(o)} and {MODULES} empty",
            f"Set {MODULES}={_beside_experts(f)}, where experts stay eager.",
        ),
    ),
    Combination(
        "packed-sequence graphs of parts of layers with offloading or recompute",
        "A part of a layer is too short to overlap with a copy",
        lambda o, f: _packs(o) and o.packed.moves_activations and (f.moe or not _all_parts(o)),
        lambda o, f: (
            MODULES,
            _names(o),
            f"empty or attn,mlp, without experts, with {_moving(o)}",
            f"Capture all layers as one region, or remove {_moving(o)}.",
        ),
    ),
    Combination(
        "packed-sequence graphs of routers with jitter on their input",
        "Graphs do not support random jitter of the router's input",
        lambda o, f: _packs(o) and f.router_jitter and _routes(o, f),
        lambda o, f: (
            "model.moe_input_jitter_eps",
            "above 0",
            f"null with routers on graphs and {_asked(o)}",
            f"Set it to null, or {MODULES}=attn.",
        ),
    ),
    Combination(
        "packed-sequence graphs with context parallelism other than `p2p`",
        "Other exchanges of keys and values are not tested with packed documents",
        lambda o, f: _shares_documents(o, f) and set(f.context_exchange) - {RING},
        lambda o, f: (
            "model.cp_comm_type",
            ",".join(f.context_exchange),
            f"{RING} with {_asked(o)} and context parallelism",
            f"Set it to {RING}, or remove {MAX_PACKED_SEQS}.",
        ),
    ),
    Combination(
        "packed-sequence graphs with context parallelism on a model that takes images",
        "Graphs do not support the rotary angles that Bridge's model computes for each rank",
        lambda o, f: _shares_documents(o, f) and (f.images or o.vision.enabled),
        lambda o, f: (
            "model.context_parallel_size",
            f.context_ranks,
            f"1 with {_asked(o)} on this model",
            f"Use tensor parallelism, or remove {MAX_PACKED_SEQS}.",
        ),
    ),
    Combination(
        "packed-sequence graphs of a model with Mamba layers with context parallelism",
        "Graphs do not support how Mamba layers exchange a sequence between ranks",
        lambda o, f: _shares_documents(o, f) and f.mamba,
        lambda o, f: (
            "model.context_parallel_size",
            f.context_ranks,
            f"1 with {_asked(o)} on a model with Mamba layers",
            f"Use tensor parallelism, or remove {MAX_PACKED_SEQS}.",
        ),
    ),
    Combination(
        "packed-sequence graphs with recompute",
        "Activations are in graph memory; recomputing them would need a second graph",
        lambda o, f: _packs(o) and f.recompute_granularity is not None,
        lambda o, f: (
            "model.recompute_granularity",
            f.recompute_granularity,
            f"null with {_asked(o)}",
            "Remove it; use smaller packs if memory is short.",
        ),
    ),
    Combination(
        "packed-sequence graphs with dropout",
        "A graph does not advance Megatron's random states for dropout",
        lambda o, f: _packs(o) and (f.attention_dropout or f.hidden_dropout),
        lambda o, f: (
            "model.attention_dropout" if f.attention_dropout else "model.hidden_dropout",
            "above 0",
            f"0 with {_asked(o)}",
            "Set it to 0.",
        ),
    ),
    Combination(
        "packed-sequence graphs with multi-latent attention",
        "Graphs do not support its rotary embedding",
        lambda o, f: _packs(o) and f.mla,
        lambda o, f: ("model.multi_latent_attention", True, f"false with {_asked(o)}", f"Remove {MAX_PACKED_SEQS}."),
    ),
    Combination(
        "packed-sequence graphs with fp8 or fp4",
        "Scales are updated between steps, outside the graph",
        lambda o, f: _packs(o) and f.low_precision,
        lambda o, f: ("model.fp8", f.low_precision, f"null with {_asked(o)}", "Train in bf16."),
    ),
    Combination(
        "packed-sequence graphs with Megatron-FSDP",
        "Megatron-FSDP moves parameters between steps, but a graph reads fixed addresses",
        lambda o, f: _packs(o) and f.megatron_fsdp,
        lambda o, f: (
            "ddp.use_megatron_fsdp",
            True,
            f"false with {_asked(o)}",
            "Use DDP with the distributed optimizer.",
        ),
    ),
    Combination(
        "packed-sequence graphs without warm-up steps",
        "Buckets are planned from the packs of warm-up steps",
        lambda o, f: _packs(o) and f.warmup_steps == 0,
        lambda o, f: ("model.cuda_graph_warmup_steps", 0, f"at least 1 with {_asked(o)}", "Set it to 3."),
    ),
    Combination(
        "packed-sequence graphs with megatron-core's activation offloading",
        "The activations to offload are in graph memory",
        lambda o, f: _packs(o) and o.offload.enabled,
        lambda o, f: (
            "fine_grained_activation_offloading",
            True,
            f"false with {_asked(o)}",
            "Switch one of both off.",
        ),
    ),
)
