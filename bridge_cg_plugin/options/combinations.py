"""Combinations that each are fine alone and cannot work together, all in one place, each with its reason.

What megatron-core refuses of its own settings, in words of its own, is not among them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .declaration import plain
from .facts import (
    BALANCING,
    BALANCING_TYPE,
    EXPERTS,
    FP8_ATTENTION,
    FUSION,
    LOSS,
    OFFLOADED,
    OFFLOADS,
    PACKING_FIELDS,
    PENDING,
    ROUTERS,
    Facts,
)
from .graph_options import GROUPS, GraphOptions
from .language_model import IMPL, INFERENCE, INFERENCE_SCOPES, MODULES, SCOPE, CudaGraphModule
from .packed import MAX_PACKED_SEQS, PACKED_FIELDS, RankLayout
from .values import OptionError
from .vision import PROVIDER_FIELDS

VISION_IMPL = PROVIDER_FIELDS["impl"]
# Graphs that other loops do not drive, unless they are of packs.
DRIVEN_BY_BRIDGE = ("transformer_engine", "full_iteration")

# Returns something of a configuration.
Look = Callable[[GraphOptions, Facts], Any]
Text = str | Callable[[GraphOptions, Facts], str]


@dataclass(frozen=True, slots=True)
class Combination:
    """One combination that is refused.

    Attributes:
        beside: Returns the options that a value cannot go with, as "with field=value"; empty where they are not set.
        field: The field to change, with its section.
        allowed: What its value must be.
        reason: Why it cannot work.
        remedy: What to do.
        finds: Whether it is the combination, with these options; None looks whether the value is as allowed.
    """

    beside: Look
    field: str
    allowed: Text
    reason: str
    remedy: Text
    finds: Look | None = None

    def found(self, options: GraphOptions, facts: Facts) -> bool:
        """Whether options and facts are this combination."""
        if not self.beside(options, facts):
            return False
        if self.finds is not None:
            return bool(self.finds(options, facts))
        value = _value(self.field, options, facts)
        return (value or 1) > 1 if self.allowed == "1" else bool(value)

    def check(self, options: GraphOptions, facts: Facts) -> None:
        """Refuse options that are this combination.

        Raises:
            OptionError: They are.
        """
        if self.found(options, facts):
            allowed, remedy = (_text(part, options, facts) for part in (self.allowed, self.remedy))
            value, beside = _value(self.field, options, facts), self.beside(options, facts)
            raise OptionError(self.field, value, f"{allowed} {beside}", f"{self.reason}. {remedy}")


def check_options(options: GraphOptions, facts: Facts | None = None) -> None:
    """Refuse options that cannot work together, or with the rest of a configuration.

    Args:
        options: The options.
        facts: What else is known.

    Raises:
        OptionError: A combination cannot work.
    """
    for combination in COMBINATIONS:
        combination.check(options, facts or Facts())


def _text(part: Text, options: GraphOptions, facts: Facts) -> str:
    return part if isinstance(part, str) else part(options, facts)


def _value(field: str, options: GraphOptions, facts: Facts) -> Any:
    """Return the value of an option, or of another setting; lists as text."""
    leaf = field.rpartition(".")[2]
    named = {one.field: (group, one) for group in GROUPS for one in group.options}
    value = facts[leaf]
    if leaf in named:
        group, one = named[leaf]
        value = getattr(getattr(options, group.name), one.name)
    plain_value = plain(value)
    return ",".join(map(str, plain_value)) if plain_value and isinstance(plain_value, list) else plain_value


def _has(options: GraphOptions, *names: str) -> bool:
    """Whether one of these modules is named."""
    return any(CudaGraphModule[name] in options.language_model.modules for name in names)


def _whole_layers(options: GraphOptions) -> bool:
    return not options.language_model.modules


# What combinations are beside.


def _impl(o: GraphOptions, f: Facts) -> str:
    return f"with {IMPL}={o.language_model.impl}"


def _language_model(o: GraphOptions, f: Facts) -> str:
    return _impl(o, f) if o.language_model.enabled else ""


def _per_layer(o: GraphOptions, f: Facts) -> str:
    return _impl(o, f) if o.language_model.per_layer else ""


def _full_iteration(o: GraphOptions, f: Facts) -> str:
    return _impl(o, f) if o.language_model.impl == "full_iteration" else ""


def whole_language_model(options: GraphOptions, facts: Facts) -> str:
    """Return that the whole language model of a model that takes images is on graphs; empty where it is not."""
    takes_images = facts.images or (options.vision.enabled and not facts.other_tower)
    with_images = _full_iteration(options, facts) and takes_images
    return f"with {IMPL}=full_iteration on a model that takes images" if with_images else ""


def _other_loop(o: GraphOptions, f: Facts) -> str:
    return "in a loop other than Bridge's" if f.loop_parts is not None else ""


def _vision(o: GraphOptions, f: Facts) -> str:
    return f"with {VISION_IMPL}=transformer_engine" if o.vision.enabled else ""


def _graphs(o: GraphOptions, f: Facts) -> str:
    return _vision(o, f) or _language_model(o, f)


def _fixed_addresses(o: GraphOptions, f: Facts) -> str:
    return _vision(o, f) or whole_language_model(o, f) or packs(o, f)


def _copied_settings(o: GraphOptions, f: Facts) -> str:
    return f"{_vision(o, f)} on this model" if o.vision.enabled and f.copied_settings else ""


def _asks_for_packs(o: GraphOptions, f: Facts) -> str:
    return f"with {MAX_PACKED_SEQS}={o.packed.max_packed_seqs}" if o.packed.enabled else ""


def packs(options: GraphOptions, facts: Facts) -> str:
    """Return that packs are on graphs; empty where they are not."""
    return _asks_for_packs(options, facts) if options.language_model.impl == "transformer_engine" else ""


def _whole_moe_layers(o: GraphOptions, f: Facts) -> str:
    return f"{packs(o, f)} and {MODULES} empty" if packs(o, f) and f.moe and _whole_layers(o) else ""


def _shared_packs(o: GraphOptions, f: Facts) -> str:
    return f"{packs(o, f)} and context parallelism" if packs(o, f) and f.ranks("context") > 1 else ""


def _fp8_packs(o: GraphOptions, f: Facts) -> str:
    return f"{packs(o, f)} and model.fp8={f['fp8']}" if packs(o, f) and f["fp8"] is not None else ""


def _offload(o: GraphOptions, f: Facts) -> str:
    """Return that megatron-core offloads; empty where it does not."""
    return f"with {OFFLOADS}=true" if f[OFFLOADS] else ""


def _offload_and_graphs(o: GraphOptions, f: Facts) -> str:
    engines = o.language_model.impl == "transformer_engine" and not o.packed.enabled
    return f"{_offload(o, f)} and {IMPL}=transformer_engine" if engines and f[OFFLOADS] else ""


def _offload_in_attention(o: GraphOptions, f: Facts) -> str:
    inside = _has(o, "attn") and not {"qkv_linear", "core_attn", "attn_proj"}.isdisjoint(f.offloaded)
    return f"with {MODULES}={_value(MODULES, o, f)}" if inside and _offload_and_graphs(o, f) else ""


# What they need.


def _written_without_graphs(o: GraphOptions, f: Facts) -> bool:
    """Whether a person wrote modules, and that nothing is captured."""
    written = IMPL in f.explicit and not f.explicit.isdisjoint((MODULES, SCOPE))
    return written and bool(o.language_model.modules) and not o.language_model.enabled


def _dropped(part: str, module: str, options: GraphOptions, facts: Facts) -> bool:
    """Whether a recompute inside a graph would draw random numbers."""
    full = options.language_model.impl == "full_iteration"
    return part in facts.recomputed and (full or options.language_model.captures(CudaGraphModule[module]))


def _reaches_encoder(o: GraphOptions, f: Facts) -> bool:
    granularity = f["recompute_granularity"]
    if granularity is None or f.other_tower:
        return False
    return granularity != "selective" or bool({"core_attn", "mlp", "layernorm"} & set(f.recomputed))


def _takes_no_packs(o: GraphOptions, f: Facts) -> bool:
    """Whether upstream's graphs would contain a part that must know which document a token belongs to."""
    parts = (CudaGraphModule.attn, CudaGraphModule.mamba) if f.mamba else (CudaGraphModule.attn,)
    captured = o.language_model.impl == "transformer_engine" and any(map(o.language_model.captures, parts))
    return f.packed_data and captured and not o.packed.enabled


def _other_modules(o: GraphOptions) -> list[str]:
    taken = ("attn", "mlp", "moe_router", "mamba")
    return [module.name for module in o.language_model.modules if module.name not in taken]


def _routes(o: GraphOptions, f: Facts) -> bool:
    """Whether routers are part of what is captured."""
    return bool(f.moe and _whole_layers(o)) or _has(o, "moe_router")


def _eager_experts(o: GraphOptions, f: Facts) -> str:
    parts = "attn,moe_router,mamba" if f.mamba else "attn,moe_router"
    return f"Set {MODULES}={parts}, where experts stay eager."


def _one_region(o: GraphOptions, f: Facts) -> bool:
    """Whether all layers are one region; with experts they are only where no module is named."""
    named = {module.name for module in o.language_model.modules}
    return not named or (not f.moe and named == {"attn", "mlp"})


# Ways in which context-parallel ranks may exchange keys and values. The first is upstream's default, a ring; the others
# also give every rank a part of the heads.
RING, HEADS, HEADS_AND_RING = EXCHANGES = ("p2p", "a2a", "a2a+p2p")


def _ranks_of_heads(f: Facts) -> int:
    """Return how many context-parallel ranks divide a tensor-parallel rank's heads, at most of all layers."""
    exchanges, levels = f["cp_comm_type"] or (), f["hierarchical_context_parallel_sizes"]
    if HEADS in exchanges:
        return f.ranks("context")
    return levels[0] if HEADS_AND_RING in exchanges and levels else 1


def _heads(f: Facts) -> int:
    """Return the heads of keys and values of a tensor-parallel rank; 0 is unknown."""
    heads = f["num_query_groups"] or f["num_attention_heads"] or 0
    return max(heads // f.ranks("tensor_model"), 1) if heads else 0


def _layout(f: Facts) -> RankLayout:
    return RankLayout(f.ranks("tensor_model"), f.ranks("context"), bool(f["sequence_parallel"]))


def _uneven_bucket(o: GraphOptions, f: Facts) -> int:
    """Return a bucket that ranks cannot share in equal parts; 0 where there is none."""
    sets_layout = None not in (f["tensor_model_parallel_size"], f["context_parallel_size"])
    uneven = (tokens for tokens in o.packed.named_buckets if tokens % _layout(f).unit)
    return next(uneven, 0) if sets_layout else 0


def _next_bucket(o: GraphOptions, f: Facts) -> str:
    unit = _layout(f).unit
    bucket = _uneven_bucket(o, f)
    return f"Write {-(-bucket // unit) * unit} for {bucket}."


RECIPES = ("tensorwise", "delayed", "blockwise")
TRACKER, WARM_UP, RECOMPUTE = "rng.te_rng_tracker", "model.cuda_graph_warmup_steps", "model.recompute_granularity"
_ONE_OF_BOTH, _SHARDING, _BF16 = "Switch one of both off.", "Use DDP with the distributed optimizer.", "Train in bf16."
_INSTEAD = f"Change it, or set {IMPL}=transformer_engine."
_WITHOUT_PACKS = f"Remove {MAX_PACKED_SEQS}."
# Options -> what cannot be beside them: a field, what it must be, and what finds that it is not (left out where its
# value tells) -> the reason and the remedy.
TABLE: dict[Look, dict[tuple[Any, ...], tuple[str, Text]]] = {
    _graphs: {
        (WARM_UP, "at least 0", lambda o, f: (f["cuda_graph_warmup_steps"] or 0) < 0): (
            "No step would be the one before which they are captured",
            "Set it to 3.",
        ),
        (TRACKER, "true", lambda o, f: f.te_rng_tracker is False): (
            "Other random-state trackers cannot be captured",
            f"Set {TRACKER}=true and model.use_te_rng_tracker=true.",
        ),
    },
    _full_iteration: {
        (MODULES, "empty"): (
            "One graph holds the whole step",
            f"Remove the modules, or write {IMPL}=transformer_engine with them.",
        ),
        ("rerun_state_machine.check_for_nan_in_loss", "false"): (
            "The check reads the loss on the host, which a capture does not allow",
            "Switch it off.",
        ),
    },
    _impl: {
        (MODULES, "empty", _written_without_graphs): (
            "Without an implementation nothing is captured",
            f"Set {IMPL}=transformer_engine or remove the modules.",
        ),
        (
            INFERENCE,
            lambda o, f: " or ".join(scope.name for scope in INFERENCE_SCOPES[o.language_model.impl]),
            lambda o, f: o.language_model.inference_scope not in INFERENCE_SCOPES[o.language_model.impl],
        ): ("Only local graphs run inference", f"Remove it, or set {IMPL}=local for inference."),
    },
    _language_model: {
        (MODULES, "moe or moe_router", lambda o, f: _has(o, "moe") and _has(o, "moe_router")): (
            "The whole MoE layer contains its router",
            "Remove one of them.",
        ),
        (
            MODULES,
            "moe_router,moe_preprocess",
            lambda o, f: _has(o, "moe_preprocess") and not _has(o, "moe_router"),
        ): ("Preprocessing uses the router's results inside the same graph", "Add moe_router."),
        (
            MODULES,
            "attn or mlp on a model without MoE layers",
            lambda o, f: f.moe is False and _has(o, "moe", "moe_router"),
        ): ("There is nothing to capture", "Remove the MoE modules."),
        **{
            (
                f"model.{dropout}",
                "0",
                lambda o, f, dropout=dropout, part=part, module=module: f[dropout] and _dropped(part, module, o, f),
            ): (
                f"The recompute of {part} inside a graph would draw other random numbers than the forward",
                "Set it to 0, or do not recompute that part.",
            )
            for dropout, part, module in (
                ("attention_dropout", "core_attn", "attn"),
                ("hidden_dropout", "mlp", "mlp"),
                ("hidden_dropout", "moe", "moe"),
            )
        },
        ("model.variable_seq_lengths", "false", lambda o, f: f["variable_seq_lengths"] and not o.packed.enabled): (
            "A graph replays the shape it was captured with",
            "Pad sequences to seq_length.",
        ),
        (MAX_PACKED_SEQS, "set with packed data and graphs of attention or Mamba layers", _takes_no_packs): (
            "megatron-core's graphs of these layers take no packs; training would stop at the first replay",
            f"Set it to auto or to what `bridge-cg plan packed` recommends, or {IMPL}=none.",
        ),
    },
    _other_loop: {
        (
            IMPL,
            f"none, or transformer_engine with {MAX_PACKED_SEQS},",
            lambda o, f: o.language_model.impl in DRIVEN_BY_BRIDGE and not o.packed.enabled,
        ): ("Only Bridge's own loop drives other graphs", f"Set {IMPL}=none."),
    },
    _per_layer: {
        (RECOMPUTE, "null or selective", lambda o, f: f["recompute_granularity"] == "full"): (
            "The activations of captured layers are in graph memory",
            "Recompute parts outside the captured modules.",
        ),
        ("model.cpu_offloading", "false"): (
            "megatron-core moves activations between two layers, but those of a graph stay in its memory",
            _ONE_OF_BOTH,
        ),
        (
            "model.recompute_modules",
            "modules without moe",
            lambda o, f: (
                "moe" in f.recomputed and o.language_model.impl == "transformer_engine" and _has(o, "moe_router")
            ),
        ): ("The recomputed part contains moe_router, which is captured", "Remove one of both."),
    },
    whole_language_model: {
        ("model.pipeline_model_parallel_size", "1"): (
            "The graph covers everything from the embeddings to the loss, and a pipeline splits this",
            _INSTEAD,
        ),
        ("model.context_parallel_size", "1"): (
            "Bridge's model reads sizes on the host when it splits sequences between ranks",
            _INSTEAD,
        ),
        **{
            (f"dataset.{name}", "false"): (
                "Document bounds are Python objects, which a graph cannot take as input",
                _INSTEAD,
            )
            for name in PACKING_FIELDS
        },
        (RECOMPUTE, "null"): (
            "megatron-core's checkpointing does not support the backward that is captured",
            _INSTEAD,
        ),
        ("model.num_moe_experts", "null", lambda o, f: f.moe): (
            "The host reads the number of tokens of each expert",
            _INSTEAD,
        ),
        ("model.mtp_num_layers", "null"): (
            "Its additional losses are not part of the language model's output",
            _INSTEAD,
        ),
        **{
            (f"model.{name}", "null"): (
                "Weights are quantized only in the first microbatch of a step, but all replay the same graph",
                _INSTEAD,
            )
            for name in ("fp8", "fp4")
        },
    },
    _fixed_addresses: {
        ("ddp.use_megatron_fsdp", "false"): (
            "Megatron-FSDP moves parameters between steps, but a graph reads fixed addresses",
            _SHARDING,
        ),
        ("dist.use_torch_fsdp2", "false"): (
            "FSDP2 frees gathered parameters after each module, but a graph reads fixed addresses",
            _SHARDING,
        ),
    },
    _vision: {
        (RECOMPUTE, "null", _reaches_encoder): (
            "Bridge applies recompute to the vision encoder too, and its activations are in graph memory",
            f"Lower {PROVIDER_FIELDS['max_seq_length']} if memory is short.",
        ),
        (
            IMPL,
            "none or transformer_engine",
            lambda o, f: f.other_tower and o.language_model.impl == "full_iteration",
        ): (
            "megatron-core captures the whole step of this model, and a graph cannot replay inside a capture",
            "Change either.",
        ),
    },
    _copied_settings: {
        **{
            (f"model.{name}", "null"): (
                "The encoder's layers, too, would quantize weights only in the first microbatch of a step",
                _BF16,
            )
            for name in ("fp8", "fp4")
        },
        ("model.cpu_offloading", "false"): (
            "It offloads the encoder's layers, too, and their activations are in graph memory",
            _ONE_OF_BOTH,
        ),
    },
    _asks_for_packs: {
        (IMPL, "transformer_engine", lambda o, f: o.language_model.impl != "transformer_engine"): (
            "The train loop calls the plugin only with this implementation",
            f"Set {IMPL}=transformer_engine, or remove {MAX_PACKED_SEQS}.",
        ),
    },
    packs: {
        (MODULES, "attn, mlp, moe_router, mamba, or empty", lambda o, f: _other_modules(o)): (
            "When experts are captured alone, the host reads their token counts",
            lambda o, f: f"Remove {_other_modules(o)[0]}, or leave {MODULES} empty: all layers as one region.",
        ),
        (
            "model.moe_input_jitter_eps",
            "null with routers on graphs",
            lambda o, f: f["moe_input_jitter_eps"] and _routes(o, f),
        ): ("Graphs do not support random jitter of the router's input", f"Set it to null, or {MODULES}=attn."),
        (
            PACKED_FIELDS["buckets"],
            lambda o, f: f"multiples of {_layout(f).unit} with {_layout(f)}",
            _uneven_bucket,
        ): ("Every rank holds as many tokens, two chunks of each document with context parallelism", _next_bucket),
        (RECOMPUTE, "null"): (
            "Activations are in graph memory; recomputing them would need a second graph",
            "Remove it; use smaller packs if memory is short.",
        ),
        **{
            (f"model.{name}", "0"): (
                "A graph does not advance Megatron's random states for dropout",
                "Set it to 0.",
            )
            for name in ("attention_dropout", "hidden_dropout")
        },
        ("model.multi_latent_attention", "false"): ("Graphs do not support its rotary embedding", _WITHOUT_PACKS),
        (WARM_UP, "at least 1", lambda o, f: f["cuda_graph_warmup_steps"] == 0): (
            "Buckets are planned from the packs of warm-up steps",
            "Set it to 3.",
        ),
        (OFFLOADS, "false"): (
            "The activations that megatron-core would offload are in graph memory",
            _ONE_OF_BOTH,
        ),
        ("model.fp4", "null"): ("fp4 was not looked at", _BF16),
        ("model.quant_recipe", "null"): (
            "Quantized weights are followed where all layers have one recipe",
            "Remove it.",
        ),
        ("model.fp8", "null with Mamba layers", lambda o, f: f["fp8"] and f.mamba): (
            "Mamba layers in fp8 were not compared with eager",
            _BF16,
        ),
    },
    _whole_moe_layers: {
        (
            "model.expert_tensor_parallel_size",
            "1",
            lambda o, f: (f["expert_tensor_parallel_size"] or f.ranks("tensor_model")) > 1,
        ): (
            "Graphs do not support experts of which each rank holds a part",
            lambda o, f: f"Set it to 1. {_eager_experts(o, f)}",
        ),
        ("peft.target_modules", "other layers than experts'", lambda o, f: f.expert_adapters): (
            "Graphs compute experts' products without adapters",
            _eager_experts,
        ),
        **{
            (
                f"model.{name}",
                "null" if needed is None else "false",
                lambda o, f, name=name, needed=needed: f[name] not in (None, needed),
            ): ("Experts inside the graph do not support it", _eager_experts)
            for name, needed in (ROUTERS | EXPERTS).items()
        },
        (
            f"model.{BALANCING_TYPE}",
            ", ".join(BALANCING),
            lambda o, f: {*(f[BALANCING_TYPE] or ())} - {*BALANCING},
        ): ("Routers inside the graph do not support it", _eager_experts),
        (
            f"model.{FUSION}",
            "false with a router's loss",
            lambda o, f: f[FUSION] and any(f[LOSS] or ()) and {*(f[BALANCING_TYPE] or BALANCING[1:])} - {"none"},
        ): ("Routers inside the graph do not support it", _eager_experts),
        ("model.fp8", "null"): (
            "The plugin's kernels of experts compute in bf16",
            lambda o, f: f"{_BF16} Or: {_eager_experts(o, f)}",
        ),
    },
    _shared_packs: {
        ("model.cp_comm_type", ", ".join(EXCHANGES), lambda o, f: {*(f["cp_comm_type"] or ())} - {*EXCHANGES}): (
            "Gathered keys and values are not tested with packed documents",
            f"Set it to {RING}, or remove {MAX_PACKED_SEQS}.",
        ),
        (
            "model.cp_comm_type",
            lambda o, f: f"{RING} where {_ranks_of_heads(f)} context-parallel ranks share {_heads(f)} heads",
            lambda o, f: _heads(f) % _ranks_of_heads(f),
        ): (
            "Every rank takes an equal part of the heads of keys and values",
            lambda o, f: f"Set it to {RING}, or let a divisor of {_heads(f)} ranks share them.",
        ),
        ("model.context_parallel_size", "1 on this model", lambda o, f: f.other_tower): (
            "Only Bridge's Qwen3-VL divides packs with images among ranks",
            f"Use tensor parallelism, or remove {MAX_PACKED_SEQS}.",
        ),
    },
    _fp8_packs: {
        (
            "model.fp8_recipe",
            "tensorwise, delayed or blockwise",
            lambda o, f: f["fp8_recipe"] not in (None, *RECIPES),
        ): ("Other recipes were not compared with eager", "Set it to tensorwise."),
        **{
            (f"model.{name}", "false"): (
                "Attention over packed documents in fp8 was not looked at",
                "Set it to false.",
            )
            for name in FP8_ATTENTION
        },
        (
            "model.fp8_recipe",
            f"tensorwise where {MODULES} is set",
            lambda o, f: f["fp8_recipe"] == "delayed" and not _one_region(o, f),
        ): (
            "Eager updates its scales in the backward of the first layer, which a replayed part leaves out",
            lambda o, f: "Set it to tensorwise" + ("." if f.moe else f", or leave {MODULES} empty."),
        ),
        ("model.tensor_model_parallel_size", "1"): (
            "Ranks exchange the largest values inside the graph, which was not compared with eager",
            f"Set it to 1. Or: {_BF16}",
        ),
    },
    _offload: {
        (RECOMPUTE, "null or selective", lambda o, f: f["recompute_granularity"] == "full"): (
            "Recomputed layers run twice, and megatron-core would count their offloads twice",
            "Offload or recompute.",
        ),
        (
            "model.recompute_modules",
            "without core_attn",
            lambda o, f: "core_attn" in f.offloaded and "core_attn" in f.recomputed,
        ): (
            "megatron-core does not offload what is recomputed, and gives no message",
            "Offload it or recompute it.",
        ),
        (
            OFFLOADED,
            "without qkv_linear with model.mla_down_proj_fusion",
            lambda o, f: "qkv_linear" in f.offloaded and f.fused_latent_norm,
        ): ("megatron-core would free the layer's input, which the residual connection reads", "Remove qkv_linear."),
        (
            OFFLOADED,
            "fused_group_mlp with model.use_transformer_engine_op_fuser",
            lambda o, f: (
                not {"expert_fc1", "moe_act"}.isdisjoint(f.offloaded)
                and f["use_transformer_engine_op_fuser"]
                and f.moe is not False
                and f.offload_in_graphs is not False
            ),
        ): ("Fused experts are one operation; building the model would fail", "Offload fused_group_mlp."),
        (OFFLOADS, "false on this model", lambda o, f: f.copied_settings): (
            "megatron-core would count layers of the encoder, which has the same settings, as the language model's",
            "Switch it off.",
        ),
        (IMPL, "none or transformer_engine", whole_language_model): (
            "Copies of megatron-core would cross between the forward and the backward graph",
            "Change either.",
        ),
    },
    _offload_and_graphs: {
        (MODULES, "attn, mlp or parts of MoE", lambda o, f: _whole_layers(o)): (
            "megatron-core waits for its copies only in graphs of named modules; the capture would fail",
            "Name what to capture.",
        ),
        (
            OFFLOADED,
            "without attn_norm",
            lambda o, f: (
                "attn_norm" in f.offloaded
                and (f["multi_latent_attention"] is not False or f["experimental_attention_variant"])
                and _has(o, "mlp", "mamba")
                and not _has(o, "attn")
            ),
        ): (
            "megatron-core would free the norm's input, which is the output of a graph; replays would fail",
            "Remove attn_norm.",
        ),
    },
    _offload_in_attention: {
        (
            OFFLOADED,
            "modules outside the captured ones on this release",
            lambda o, f: f.offload_in_graphs is False,
        ): (
            "megatron-core does not wait for copies inside graphs there; the capture would fail",
            "Leave attention eager, or use megatron-bridge 0.6.",
        ),
        (PENDING, "null or 0"): (
            "A layer's graph would wait for copies of another layer's graph; the capture would fail",
            "Remove it, or leave attention eager.",
        ),
    },
}

COMBINATIONS = tuple(
    Combination(beside, field, allowed, reason, remedy, *finds)
    for beside, rows in TABLE.items()
    for (field, allowed, *finds), (reason, remedy) in rows.items()
)
