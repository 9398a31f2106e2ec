"""Combinations of language-model graphs."""

from collections.abc import Callable

from ..facts import Facts
from ..graph_options import GraphOptions
from ..language_model import IMPL, INFERENCE, INFERENCE_SCOPES, MODULES, SCOPE, CudaGraphModule
from ..migration import module_names
from ..packed import MAX_PACKED_SEQS
from ..vision import PROVIDER_FIELDS
from .rule import Combination

VISION_IMPL = PROVIDER_FIELDS["impl"]
# Graphs that other loops do not drive, unless they are of packs.
DRIVEN_BY_BRIDGE = ("transformer_engine", "full_iteration")


def _names(options: GraphOptions) -> str:
    return ",".join(module_names(options.language_model.modules))


def _has(options: GraphOptions, *names: str) -> bool:
    lm = options.language_model
    return lm.enabled and all(CudaGraphModule[name] in lm.modules for name in names)


def _full(options: GraphOptions) -> bool:
    return options.language_model.impl == "full_iteration"


def _graphs(options: GraphOptions) -> str:
    return f"{VISION_IMPL}=transformer_engine" if options.vision.enabled else f"{IMPL}={options.language_model.impl}"


def _dropout_in_recompute(options: GraphOptions, facts: Facts) -> str | None:
    lm, parts = options.language_model, facts.recompute_modules
    if not lm.enabled or facts.recompute_granularity != "selective":
        return None
    captured = {m.name for m in CudaGraphModule if _full(options) or lm.captures(m)}
    if facts.attention_dropout and "core_attn" in parts and "attn" in captured:
        return "attention_dropout"
    random = (("mlp", "mlp"), ("moe", "moe"))
    if facts.hidden_dropout and any(part in parts and module in captured for part, module in random):
        return "hidden_dropout"
    return None


def _explicit_modules(options: GraphOptions, facts: Facts) -> bool:
    lm = options.language_model
    written = IMPL in facts.explicit and not facts.explicit.isdisjoint((MODULES, SCOPE))
    return not lm.enabled and bool(lm.modules) and written


_RANDOM = "The recompute inside a graph would draw other random numbers than the forward"
_LM = f"{IMPL}=none"

LANGUAGE_MODEL = (
    Combination(
        "graphs after fewer than no warm-up steps",
        "No step would be the one before which they are captured",
        lambda o, f: o.enabled and (f.warmup_steps or 0) < 0,
        lambda o, f: ("model.cuda_graph_warmup_steps", f.warmup_steps, f"at least 0 with {_graphs(o)}", "Set it to 3."),
    ),
    Combination(
        "`full_iteration` with modules",
        "One graph holds the whole step",
        lambda o, f: _full(o) and o.language_model.modules,
        lambda o, f: (
            MODULES,
            _names(o),
            f"empty with {IMPL}=full_iteration",
            f"Remove the modules, or write {IMPL}=transformer_engine with them.",
        ),
    ),
    Combination(
        "modules with `cuda_graph_impl=none`",
        "Without an implementation nothing is captured",
        _explicit_modules,
        lambda o, f: (MODULES, _names(o), f"empty with {_LM}", f"Set {IMPL}=transformer_engine or remove the modules."),
        harmless=True,
    ),
    Combination(
        "an inference scope that the implementation does not have",
        "Only local graphs run inference",
        lambda o, f: o.language_model.inference_scope not in INFERENCE_SCOPES[o.language_model.impl],
        lambda o, f: (
            INFERENCE,
            o.language_model.inference_scope.name,
            f"{' or '.join(s.name for s in INFERENCE_SCOPES[o.language_model.impl])} "
            f"with {IMPL}={o.language_model.impl}",
            f"Remove it, or set {IMPL}=local for inference.",
        ),
    ),
    Combination(
        "`moe` with `moe_router`",
        "The whole MoE layer contains its router",
        lambda o, f: _has(o, "moe", "moe_router"),
        lambda o, f: (MODULES, _names(o), "moe or moe_router", "Remove one of them."),
    ),
    Combination(
        "`moe_preprocess` without `moe_router`",
        "Preprocessing uses the router's results inside the same graph",
        lambda o, f: _has(o, "moe_preprocess") and not _has(o, "moe_router"),
        lambda o, f: (MODULES, _names(o), "moe_router,moe_preprocess", "Add moe_router."),
    ),
    Combination(
        "MoE modules on a model without MoE layers",
        "There is nothing to capture",
        lambda o, f: f.moe is False and (_has(o, "moe") or _has(o, "moe_router")),
        lambda o, f: (MODULES, _names(o), "attn or mlp on this model", "Remove the MoE modules."),
    ),
    Combination(
        "`mamba` on a model without Mamba layers",
        "There is nothing to capture",
        lambda o, f: f.mamba is False and _has(o, "mamba"),
        lambda o, f: (MODULES, _names(o), "attn, mlp or MoE modules on this model", "Remove mamba."),
        harmless=True,
    ),
    Combination(
        "graphs without `te_rng_tracker`",
        "Other random-state trackers cannot be captured",
        lambda o, f: f.te_rng_tracker is False and o.enabled,
        lambda o, f: (
            "rng.te_rng_tracker",
            False,
            f"true with {_graphs(o)}",
            "Set rng.te_rng_tracker=true and model.use_te_rng_tracker=true.",
        ),
    ),
    Combination(
        "language-model graphs other than those of packs in a loop other than Bridge's",
        "Only Bridge's own loop drives them",
        lambda o, f: f.loop_parts is not None and o.language_model.impl in DRIVEN_BY_BRIDGE and not o.packed.enabled,
        lambda o, f: (
            IMPL,
            o.language_model.impl,
            f"none, or transformer_engine with {MAX_PACKED_SEQS}, in a loop other than Bridge's",
            f"Set {IMPL}=none.",
        ),
    ),
    Combination(
        "full recompute with per-layer graphs",
        "The activations of captured layers are in graph memory",
        lambda o, f: f.recompute_granularity == "full" and o.language_model.per_layer,
        lambda o, f: (
            "model.recompute_granularity",
            "full",
            f"null or selective with {IMPL}={o.language_model.impl}",
            "Recompute parts outside the captured modules.",
        ),
    ),
    Combination(
        "graphs of single layers or of packs with `cpu_offloading`",
        "megatron-core moves the activations of layers between two layers, but those of a graph stay in its memory",
        lambda o, f: f.cpu_offloading and o.language_model.per_layer,
        lambda o, f: (
            "model.cpu_offloading",
            True,
            f"false with {IMPL}={o.language_model.impl}",
            "Switch one of both off.",
        ),
    ),
    Combination(
        "recompute of `moe` with a captured `moe_router`",
        "The recomputed part contains a captured one",
        lambda o, f: (
            f.recompute_granularity == "selective"
            and "moe" in f.recompute_modules
            and o.language_model.impl == "transformer_engine"
            and _has(o, "moe_router")
        ),
        lambda o, f: (
            "model.recompute_modules",
            list(f.recompute_modules),
            "modules without moe",
            "Remove one of both.",
        ),
    ),
    Combination(
        "recompute with dropout inside captured modules",
        _RANDOM,
        _dropout_in_recompute,
        lambda o, f: (
            f"model.{_dropout_in_recompute(o, f)}",
            "above 0",
            f"0 with {IMPL}={o.language_model.impl} and recompute of {','.join(f.recompute_modules)}",
            "Set it to 0, or do not recompute that part.",
        ),
    ),
    Combination(
        "`variable_seq_lengths` with language-model graphs",
        "A graph replays the shape it was captured with",
        lambda o, f: f.variable_seq_lengths and o.language_model.enabled and not o.packed.enabled,
        lambda o, f: (
            "model.variable_seq_lengths",
            True,
            f"false with {IMPL}={o.language_model.impl}",
            "Pad sequences to seq_length.",
        ),
    ),
    Combination(
        "NaN check of the loss with `full_iteration`",
        "The check reads the loss on the host, which a capture does not allow",
        lambda o, f: f.nan_check and _full(o),
        lambda o, f: (
            "rerun_state_machine.check_for_nan_in_loss",
            True,
            f"false with {IMPL}=full_iteration",
            "Switch it off.",
        ),
    ),
)


_ALLOWED = f"with {IMPL}=full_iteration on a model that takes images"


def whole_language_model(options: GraphOptions, facts: Facts) -> bool:
    """Whether the whole language model of a model that takes images is to be on graphs."""
    takes_images = facts.images or (options.vision.enabled and not facts.other_tower)
    return options.language_model.impl == "full_iteration" and bool(takes_images)


def _refused(
    what: str,
    reason: str,
    finds: Callable[[Facts], object],
    field: str | Callable[[Facts], str],
    value: Callable[[Facts], object],
    allowed: str,
) -> Combination:
    """Return the combination of `full_iteration` and a setting, on a model that takes images."""

    def found(options: GraphOptions, facts: Facts) -> object:
        return whole_language_model(options, facts) and finds(facts)

    def error(options: GraphOptions, facts: Facts) -> tuple[str, object, str, str]:
        name = field if isinstance(field, str) else field(facts)
        return name, value(facts), f"{allowed} {_ALLOWED}", f"Change it, or set {IMPL}=transformer_engine."

    return Combination(f"`full_iteration` on a model that takes images, with {what}", reason, found, error)


IMAGES = (
    _refused(
        "pipeline parallelism",
        "The graph covers everything from the embeddings to the loss, and a pipeline splits this",
        lambda f: (f.pipeline_stages or 1) > 1,
        "model.pipeline_model_parallel_size",
        lambda f: f.pipeline_stages,
        "1",
    ),
    _refused(
        "context parallelism",
        "Bridge's model reads sizes on the host when it splits sequences between ranks",
        lambda f: (f.context_ranks or 1) > 1,
        "model.context_parallel_size",
        lambda f: f.context_ranks,
        "1",
    ),
    _refused(
        "in-batch packing",
        "Document bounds are Python objects, which a graph cannot take as input",
        lambda f: f.in_batch_packing,
        lambda f: f"dataset.{f.in_batch_packing}",
        lambda f: True,
        "false",
    ),
    _refused(
        "recompute",
        "megatron-core's checkpointing does not support the backward that is captured",
        lambda f: f.recompute_granularity is not None,
        "model.recompute_granularity",
        lambda f: f.recompute_granularity,
        "null",
    ),
    _refused(
        "mixture-of-experts layers",
        "The host reads the number of tokens of each expert",
        lambda f: f.moe,
        "model.num_moe_experts",
        lambda f: "above 1",
        "null",
    ),
    _refused(
        "multi-token prediction",
        "Its additional losses are not part of the language model's output",
        lambda f: f.multi_token_layers,
        "model.mtp_num_layers",
        lambda f: f.multi_token_layers,
        "null",
    ),
    _refused(
        "fp8 or fp4",
        "Weights are quantized only in the first microbatch of a step, but the graph is the same for all microbatches",
        lambda f: f.low_precision,
        "model.fp8",
        lambda f: f.low_precision,
        "null",
    ),
)
