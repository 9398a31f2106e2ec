"""Combinations of offloading."""

from ..facts import Facts
from ..graph_options import GraphOptions
from ..language_model import IMPL, MODULES, CudaGraphModule
from ..migration import module_names
from ..offload import CORE_FIELDS, SHARED_FIELDS
from ..shared_offload import (
    ATTENTION,
    COUNTS_ENCODER,
    EXPERTS,
    FUSED_EXPERTS,
    IN_EXPERTS,
    READ_BY_RESIDUAL,
    reads_residual,
)
from .language_model import whole_language_model
from .rule import Combination

_IN_EXPERTS = set(IN_EXPERTS)


def _asked(options: GraphOptions) -> str:
    """Return the field that switched offloading on."""
    if options.offload.parts:
        return f"{SHARED_FIELDS['parts']}={','.join(options.offload.parts)}"
    return f"{CORE_FIELDS['enabled']}=true"


def _engines_layers(options: GraphOptions) -> bool:
    """Whether layers are on graphs of Transformer Engine, not on the plugin's of packs."""
    return options.language_model.impl == "transformer_engine" and not options.packed.enabled


def _modules(options: GraphOptions) -> str:
    return ",".join(module_names(options.language_model.modules))


def _captures(options: GraphOptions, *names: str) -> bool:
    return _engines_layers(options) and any(CudaGraphModule[name] in options.language_model.modules for name in names)


def _inside_attention(options: GraphOptions) -> bool:
    offload = options.offload
    return offload.enabled and bool(set(ATTENTION) & set(offload.modules)) and _captures(options, "attn")


def _offloads(options: GraphOptions, *names: str) -> bool:
    return options.offload.enabled and not set(names).isdisjoint(options.offload.modules)


def _beside_graphs(options: GraphOptions) -> bool:
    """Whether megatron-core offloads, and captures graphs itself."""
    return options.offload.enabled and options.language_model.enabled and not options.packed.enabled


def _refuse_modules(options: GraphOptions, allowed: str, remedy: str) -> tuple[str, object, str, str]:
    return CORE_FIELDS["modules"], list(options.offload.modules), allowed, remedy


def _reads_a_graph(options: GraphOptions, facts: Facts) -> bool:
    """Whether a norm before eager attention reads what the graph of the layer before it gives."""
    own_norm = facts.mla is not False or bool(facts.attention_variant)
    return own_norm and _captures(options, "mlp", "mamba") and not _captures(options, "attn")


def _cuts_before_mlp(options: GraphOptions, facts: Facts) -> bool:
    """Whether a graph begins or ends where the norm before the MLP reads, in experts' layers if there are any."""
    before_experts = _captures(options, "attn", "moe_router")
    before_dense = _captures(options, "attn") != _captures(options, "mlp")
    if facts.moe is None:
        return before_experts and before_dense
    return before_experts if facts.moe else before_dense


def _recomputes(facts: Facts, module: str) -> bool:
    return facts.recompute_granularity == "selective" and module in facts.recompute_modules


def _not_both(module: str, options: GraphOptions, facts: Facts) -> tuple[str, object, str, str]:
    allowed = f"without {module} with {_asked(options)}"
    return "model.recompute_modules", list(facts.recompute_modules), allowed, "Offload it or recompute it."


def _at_the_border(module: str, options: GraphOptions) -> tuple[str, object, str, str]:
    offload = options.offload
    allowed = f"without {module} with {MODULES}={_modules(options)}"
    return CORE_FIELDS["modules"], list(offload.modules), allowed, f"Remove {module}."


OFFLOAD = (
    Combination(
        "offloading without modules",
        "Nothing would be offloaded",
        lambda o, f: o.offload.enabled and not o.offload.modules,
        lambda o, f: (CORE_FIELDS["modules"], [], "at least one module", "Name what to offload."),
    ),
    Combination(
        "offloading `attn_proj` without `core_attn`",
        "The input of the projection is the output of core attention",
        lambda o, f: o.offload.enabled and "attn_proj" in o.offload.modules and "core_attn" not in o.offload.modules,
        lambda o, f: (CORE_FIELDS["modules"], list(o.offload.modules), "core_attn,attn_proj", "Add core_attn."),
    ),
    Combination(
        "offloading with `local` graphs, apart from parts of MoE layers",
        "Local graphs offload only parts of MoE layers that are not captured",
        lambda o, f: (
            o.offload.enabled
            and o.language_model.impl == "local"
            and (not o.language_model.modules or not set(o.offload.modules) <= _IN_EXPERTS)
        ),
        lambda o, f: (
            CORE_FIELDS["modules"],
            list(o.offload.modules),
            f"{', '.join(sorted(_IN_EXPERTS))}, with {MODULES} set",
            f"Set {IMPL}=transformer_engine.",
        ),
    ),
    Combination(
        "offloading with `full_iteration` and no limit in flight",
        "The whole step is one graph, so the copies in flight need a limit",
        lambda o, f: o.offload.enabled and o.language_model.impl == "full_iteration" and o.offload.max_inflight is None,
        lambda o, f: (CORE_FIELDS["max_inflight"], None, "a whole number of at least 0", "Set it, 1 for example."),
    ),
    Combination(
        "offloading with `cpu_offloading`",
        "Both move the same activations",
        lambda o, f: (o.offload.enabled or o.offload.parts) and f.cpu_offloading,
        lambda o, f: ("model.cpu_offloading", True, f"false with {_asked(o)}", "Switch one of both off."),
    ),
    Combination(
        "offloading with full recompute",
        "Recomputed layers run twice, and megatron-core would count their offloads twice",
        lambda o, f: o.offload.enabled and f.recompute_granularity == "full",
        lambda o, f: (
            "model.recompute_granularity",
            "full",
            f"null or selective with {_asked(o)}",
            "Offload or recompute.",
        ),
    ),
    Combination(
        "offloading `core_attn` with recompute of it",
        "megatron-core does not offload what is recomputed, and gives no message",
        lambda o, f: o.offload.enabled and "core_attn" in o.offload.modules and _recomputes(f, "core_attn"),
        lambda o, f: _not_both("core_attn", o, f),
    ),
    Combination(
        "offloading inside MoE layers with recompute of `moe`",
        "The recompute runs the whole layer again, with the offloaded parts",
        lambda o, f: o.offload.enabled and _IN_EXPERTS & set(o.offload.modules) and _recomputes(f, "moe"),
        lambda o, f: _not_both("moe", o, f),
    ),
    Combination(
        "offloading with graphs of whole layers by Transformer Engine",
        "megatron-core waits for its copies only in graphs of named modules; the capture would fail",
        lambda o, f: o.offload.enabled and _engines_layers(o) and not o.language_model.modules,
        lambda o, f: (MODULES, [], f"attn, mlp or parts of MoE with {_asked(o)}", "Name what to capture."),
    ),
    Combination(
        "offloading inside captured attention on releases before 0.6",
        "megatron-core does not wait for copies inside graphs there; the capture would fail",
        lambda o, f: _inside_attention(o) and f.offload_in_graphs is False,
        lambda o, f: (
            CORE_FIELDS["modules"],
            list(o.offload.modules),
            f"modules outside {MODULES}={_modules(o)} on this release",
            "Leave attention eager, or use megatron-bridge 0.6.",
        ),
    ),
    Combination(
        "offloading beside captured `moe`",
        "megatron-core offloads nothing where MoE layers are captured",
        lambda o, f: (
            _beside_graphs(o) and o.language_model.per_layer and CudaGraphModule.moe in o.language_model.modules
        ),
        lambda o, f: (MODULES, _modules(o), f"without moe with {_asked(o)}", "Capture moe_router, or do not offload."),
    ),
    Combination(
        "offloading inside captured attention with a limit in flight above 0",
        "A layer's graph would wait for copies of another layer's graph; the capture would fail",
        lambda o, f: _inside_attention(o) and (o.offload.max_inflight or 0) > 0,
        lambda o, f: (
            CORE_FIELDS["max_inflight"],
            o.offload.max_inflight,
            f"null or 0 with {_asked(o)} and {MODULES}={_modules(o)}",
            "Remove it, or leave attention eager.",
        ),
    ),
    Combination(
        "offloading with graphs and no warm-up steps",
        "megatron-core plans offloading in eager steps",
        lambda o, f: _beside_graphs(o) and f.warmup_steps == 0,
        lambda o, f: ("model.cuda_graph_warmup_steps", 0, f"at least 1 with {_asked(o)}", "Set it to 3."),
    ),
    Combination(
        "offloading `attn_norm` with captured attention",
        "megatron-core switches it off and logs a line",
        lambda o, f: o.offload.enabled and "attn_norm" in o.offload.modules and _captures(o, "attn"),
        lambda o, f: _at_the_border("attn_norm", o),
        harmless=True,
    ),
    Combination(
        "offloading `attn_norm` behind captured MLPs or Mamba layers",
        "megatron-core would free the norm's input, which is the output of a graph; replays would fail",
        lambda o, f: _offloads(o, "attn_norm") and _reads_a_graph(o, f),
        lambda o, f: _at_the_border("attn_norm", o),
    ),
    Combination(
        "offloading `qkv_linear` of latent attention with `mla_down_proj_fusion`",
        READ_BY_RESIDUAL,
        lambda o, f: _offloads(o, "qkv_linear") and reads_residual(f),
        lambda o, f: _refuse_modules(o, "without qkv_linear with model.mla_down_proj_fusion", "Remove qkv_linear."),
    ),
    Combination(
        "offloading `mlp_norm` if only attention or only the MLP is captured, or a router",
        "megatron-core switches it off and logs a line",
        lambda o, f: o.offload.enabled and "mlp_norm" in o.offload.modules and _cuts_before_mlp(o, f),
        lambda o, f: _at_the_border("mlp_norm", o),
        harmless=True,
    ),
    Combination(
        "offloading parts of experts on a model without MoE layers",
        "Nothing would be offloaded",
        lambda o, f: o.offload.enabled and _IN_EXPERTS & set(o.offload.modules) and f.moe is False,
        lambda o, f: (
            CORE_FIELDS["modules"],
            list(o.offload.modules),
            "modules of attention and norms on this model",
            f"Remove {', '.join(sorted(_IN_EXPERTS & set(o.offload.modules)))}.",
        ),
        harmless=True,
    ),
    Combination(
        "offloading `fused_group_mlp` of experts that are not fused",
        "Only Transformer Engine's fused experts are one operation",
        lambda o, f: _offloads(o, FUSED_EXPERTS) and f.moe is not False and f.fused_experts is False,
        lambda o, f: _refuse_modules(
            o, "expert_fc1, moe_act without model.use_transformer_engine_op_fuser", "Offload these."
        ),
    ),
    Combination(
        "offloading `fused_group_mlp` with `expert_fc1` or `moe_act`",
        "These are parts of it",
        lambda o, f: _offloads(o, FUSED_EXPERTS) and _offloads(o, *EXPERTS) and not f.fused_experts,
        lambda o, f: _refuse_modules(o, f"{FUSED_EXPERTS} alone of experts", "Remove its parts."),
    ),
    Combination(
        "offloading `expert_fc1` or `moe_act` of fused experts",
        "Fused experts are one operation; building the model would fail",
        lambda o, f: (
            _offloads(o, *EXPERTS) and f.fused_experts and f.moe is not False and f.offload_in_graphs is not False
        ),
        lambda o, f: _refuse_modules(
            o, f"{FUSED_EXPERTS} with model.use_transformer_engine_op_fuser", f"Offload {FUSED_EXPERTS}."
        ),
    ),
    Combination(
        "offloading inside MoE layers with `moe_paged_stash`",
        "Paged stashing holds the same activations",
        lambda o, f: _offloads(o, *IN_EXPERTS) and f.stashed_experts,
        lambda o, f: ("model.moe_paged_stash", True, f"false with {_asked(o)}", "Switch one of both off."),
    ),
    Combination(
        "offloading by megatron-core on Nemotron VL and Nemotron Omni",
        COUNTS_ENCODER,
        lambda o, f: o.offload.enabled and f.copied_settings,
        lambda o, f: (CORE_FIELDS["enabled"], True, "false on this model", "Switch it off."),
    ),
    Combination(
        "offloading by megatron-core with `full_iteration` on a model that takes images",
        "Copies of megatron-core would cross between the forward and the backward graph",
        lambda o, f: o.offload.enabled and whole_language_model(o, f),
        lambda o, f: (IMPL, o.language_model.impl, f"none or transformer_engine with {_asked(o)}", "Change either."),
    ),
)
