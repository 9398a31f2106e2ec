"""Combinations that each are fine alone and cannot work together, refused before training, each with its reason.

For each feature, an allow-list has what settings must be beside it. What megatron-core refuses of its own settings, in
words of its own, is not among them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..switches import EXPERT_BOUNDS, switched_on
from .declaration import OptionError, plain
from .facts import (
    BALANCING,
    BALANCING_TYPE,
    DELTA_NETS,
    EXPERTS,
    FP8_ATTENTION,
    FUSION,
    LOSS,
    OF_TEXT,
    OFFLOADS,
    ONE_LENGTH,
    PACKING_FIELDS,
    ROUTERS,
    Facts,
)
from .graph_options import GROUPS, GraphOptions
from .language_model import IMPL, INFERENCE, MODULES, CudaGraphModule
from .packed import MAX_PACKED_SEQS
from .vision import PROVIDER_FIELDS

# Graphs that other loops do not drive, unless they are of packs.
DRIVEN_BY_BRIDGE = ("transformer_engine", "full_iteration")

# Returns something of a configuration.
Look = Callable[[GraphOptions, Facts], Any]
# Returns a feature as "with field=value"; empty where it is not asked for.
Feature = Callable[[GraphOptions, Facts], str]


def check_options(options: GraphOptions, facts: Facts | None = None) -> None:
    """Refuse options that cannot work together, or with the rest of a configuration.

    Args:
        options: The options.
        facts: What else is known.

    Raises:
        OptionError: A combination cannot work.
    """
    for error in refusals(options, facts or Facts()):
        raise error


def refusals(options: GraphOptions, facts: Facts) -> Iterator[OptionError]:
    """Yield an error for every setting that cannot be beside a feature that the options ask for."""
    for feature, remedy, settings in ALLOWED:
        if beside := feature(options, facts):
            told = remedy if isinstance(remedy, str) else remedy(options, facts)
            for field, (allowed, reason) in settings.items():
                value = _value(field, options, facts)
                if not _fits(value, allowed):
                    shown = ",".join(map(str, value)) if value and isinstance(value, list) else value
                    yield OptionError(field, shown, f"{allowed} {beside}", f"{reason}. {told}")


def _value(field: str, options: GraphOptions, facts: Facts) -> Any:
    """Return the value of an option, or of another setting."""
    leaf = field.rpartition(".")[2]
    for group in GROUPS:
        for one in group.options:
            if one.field == leaf:
                return plain(getattr(getattr(options, group.name), one.name))
    if leaf == "expert_tensor_parallel_size":
        return facts.expert_shards
    return plain(facts[leaf])


def _fits(value: Any, allowed: str) -> bool:
    """Whether a value is among the words that are allowed; one that is not set is, unless it must be."""
    must = allowed.startswith(("set", "true"))
    if must or not value:
        return bool(value) == must
    return {*map(str, value if isinstance(value, list) else [value])} <= {*re.split(r" or |, ", allowed)}


def _runs(*implementations: str) -> Feature:
    """Return the feature that one of these implementations captures the language model."""

    def runs(options: GraphOptions, facts: Facts) -> str:
        impl = options.language_model.impl
        return f"with {IMPL}={impl}" if impl in implementations else ""

    return runs


_language_model = _runs("local", "transformer_engine", "full_iteration")
_full_iteration, _engine = _runs("full_iteration"), _runs("transformer_engine")


def _elsewhere(options: GraphOptions, facts: Facts) -> str:
    driven = options.language_model.impl in DRIVEN_BY_BRIDGE and not options.packed.enabled
    return "in a loop other than Bridge's" if driven and facts.loop_parts is not None else ""


def padded_rows(options: GraphOptions, facts: Facts) -> str:
    """Return that layers over padded rows of a model that takes images are on graphs; empty where they are not."""
    takes_images = facts.rows or (options.vision.enabled and not facts.other_tower)
    with_images = _full_iteration(options, facts) and takes_images
    return f"with {IMPL}=full_iteration on a model that takes images" if with_images else ""


def _vision(options: GraphOptions, facts: Facts) -> str:
    return f"with {PROVIDER_FIELDS['impl']}=transformer_engine" if options.vision.enabled else ""


def _graphs(options: GraphOptions, facts: Facts) -> str:
    return _vision(options, facts) or _language_model(options, facts)


def _fixed_addresses(options: GraphOptions, facts: Facts) -> str:
    return _vision(options, facts) or padded_rows(options, facts) or packs(options, facts)


def _asks_for_packs(options: GraphOptions, facts: Facts) -> str:
    return f"with {MAX_PACKED_SEQS}={options.packed.max_packed_seqs}" if options.packed.enabled else ""


def packs(options: GraphOptions, facts: Facts) -> str:
    """Return that packs are on graphs; empty where they are not."""
    return _asks_for_packs(options, facts) if _engine(options, facts) else ""


def _layers(options: GraphOptions, facts: Facts) -> str:
    """Return that the plugin has a decoder's layers on graphs, over packs or padded rows; empty where it does not."""
    return packs(options, facts) or padded_rows(options, facts)


def whole_moe_layers(options: GraphOptions, facts: Facts) -> str:
    """Return that whole layers with experts are on graphs; empty where they are not."""
    if not facts.moe or options.language_model.modules:
        return ""
    beside = packs(options, facts)
    if beside:
        return f"{beside} and {MODULES} empty"
    return "" if padded_parts(options, facts) else padded_rows(options, facts)


def padded_parts(options: GraphOptions, facts: Facts) -> tuple[str, ...]:
    """Return the parts of layers that are on graphs over padded rows, where experts stay eager; none where all is."""
    if not (padded_rows(options, facts) and facts.shares_experts):
        return ()
    return ("attn", "moe_router", *(["mamba"] if facts.mamba else []))


def _fp8_packs(options: GraphOptions, facts: Facts) -> str:
    return f"{packs(options, facts)} and model.fp8={facts['fp8']}" if packs(options, facts) and facts["fp8"] else ""


def _where(feature: Feature, condition: Look) -> Feature:
    """Return a feature that there is only under a condition."""
    return lambda options, facts: feature(options, facts) if condition(options, facts) else ""


def _draws_again(options: GraphOptions, facts: Facts) -> bool:
    """Whether a recompute inside a graph would draw other random numbers than the forward."""
    whole, captures = options.language_model.impl == "full_iteration", options.language_model.captures
    drawn = {
        "core_attn": ("attn", "attention_dropout"),
        "mlp": ("mlp", "hidden_dropout"),
        "moe": ("moe", "hidden_dropout"),
    }
    return any(
        part in facts.recomputed and facts[dropout] and (whole or captures(CudaGraphModule[module]))
        for part, (module, dropout) in drawn.items()
    )


# What selective recompute names and recorded work runs again as upstream does.
RECOMPUTED = frozenset(("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts"))


def _recomputes_otherwise(options: GraphOptions, facts: Facts) -> bool:
    """Whether what layers would recompute was not compared with eager, or reaches around what is captured."""
    named = {*padded_parts(options, facts)} or {module.name for module in options.language_model.modules}
    in_parts = bool(named) and (facts.moe or named != {"attn", "mlp"})
    # These reach around a router that is captured without its experts.
    known = RECOMPUTED - {"layernorm", "moe"} if "moe_router" in named else RECOMPUTED
    again = facts.runs_layers_again and "mlp" not in named
    around = facts["recompute_granularity"] == "full" and in_parts and not again
    return around or facts.mamba or facts["fp8"] or not known.issuperset(facts.recomputed)


def _takes_no_packs(options: GraphOptions, facts: Facts) -> bool:
    """Whether upstream's graphs would contain a part that must know which document a token belongs to."""
    parts = (CudaGraphModule.attn, CudaGraphModule.mamba) if facts.mamba else (CudaGraphModule.attn,)
    return facts.packed_data and any(map(options.language_model.captures, parts)) and not options.packed.enabled


def _lengths_differ(options: GraphOptions, facts: Facts) -> bool:
    """Whether rows keep lengths of their own: Bridge pads them to one over stages and ranks of experts alone."""
    packs = facts.packed_data or options.packed.enabled
    several = facts.ranks("pipeline_model") > 1 or facts.ranks("expert_model") > 1
    padded = several and facts[OF_TEXT] is None
    ours = facts.rows is not False  # pads them, too
    return facts[ONE_LENGTH] is False and not (packs or padded or ours)


def _delta_nets(options: GraphOptions, facts: Facts) -> bool:
    return bool(facts["experimental_attention_variant"] == DELTA_NETS)


def _delayed_parts(options: GraphOptions, facts: Facts) -> bool:
    """Whether scales are delayed and layers are not one region; with experts they are only where none is named."""
    named = {module.name for module in options.language_model.modules}
    return facts["fp8_recipe"] == "delayed" and bool(named) and (facts.moe or named != {"attn", "mlp"})


def _router_loss(options: GraphOptions, facts: Facts) -> bool:
    return any(facts[LOSS] or ()) and bool({*(facts[BALANCING_TYPE] or BALANCING[1:])} - {"none"})


def _eager_experts(options: GraphOptions, facts: Facts) -> str:
    parts = "attn,moe_router,mamba" if facts.mamba else "attn,moe_router"
    if not options.packed.enabled:
        parts = f"{parts},moe_preprocess {IMPL}=transformer_engine"
    return f"Change it, or set {MODULES}={parts}, where experts stay eager."


TRACKER, RECOMPUTE = "rng.te_rng_tracker", "model.recompute_granularity"
LOW = ("fp8", "fp4")
_ONCE = "Weights are quantized only in the first microbatch of a step, but all replay the same graph"
_DRAWS = "A recompute inside a graph draws other random numbers than the forward"
_ROWS_IN_FP8 = "Padded sequences in low precision were not compared with eager"
_DROPOUT = "A graph does not advance Megatron's random states for dropout"
_EXPERTS = "Experts and routers inside the graph do not support it"
_ATTENTION = "Attention in fp8 was not compared with eager"
_PADDING = "Padding would change the scales that real tokens are quantized with"
# Features, what to do about settings that they do not allow, and these: what each must be, and why. `_fits` reads the
# former: what begins with "true" or "set" must be set, anything else may be unset, or one of the words.
ALLOWED: tuple[tuple[Feature, str | Feature, Mapping[str, tuple[str, str]]], ...] = (
    (
        _where(_graphs, lambda options, facts: facts.te_rng_tracker is False),
        f"Set {TRACKER}=true and model.use_te_rng_tracker=true.",
        {TRACKER: ("true", "Other random-state trackers cannot be captured")},
    ),
    (
        _full_iteration,
        f"Change it, or set {IMPL}=transformer_engine.",
        {
            MODULES: ("empty", "One graph holds the whole step"),
            "rerun_state_machine.check_for_nan_in_loss": ("false", "The host reads the loss, which no capture allows"),
        },
    ),
    (
        _runs("local"),
        f"Set {IMPL}=transformer_engine where inference stays eager.",
        {INFERENCE: ("layer or block", "Local graphs run inference, too")},
    ),
    (
        _runs("none", "transformer_engine", "full_iteration"),
        f"Remove it, or set {IMPL}=local for inference.",
        {INFERENCE: ("none", "Only local graphs run inference")},
    ),
    (
        _where(_language_model, _draws_again),
        "Recompute other parts, or set model.attention_dropout and model.hidden_dropout to 0.",
        {RECOMPUTE: ("null, as dropout is not 0,", _DRAWS)},
    ),
    (
        _where(_language_model, lambda options, facts: not options.packed.enabled),
        "Pad sequences to seq_length.",
        {"model.variable_seq_lengths": ("false", "A graph replays the shape it was captured with")},
    ),
    (
        _where(_runs("transformer_engine", "full_iteration"), _lengths_differ),
        lambda _, facts: f"Set it{'' if facts[OF_TEXT] is None else ' in dataset.dataset_kwargs'}, or {IMPL}=none.",
        {f"dataset.{ONE_LENGTH}": ("true", "A graph replays the length that it was captured with")},
    ),
    (
        _where(_engine, _takes_no_packs),
        f"Set it to auto or to what `bridge-cg plan packed` recommends, or {IMPL}=none.",
        {
            MAX_PACKED_SEQS: (
                "set for packed data",
                "megatron-core's graphs of attention and Mamba layers take no packs",
            )
        },
    ),
    (
        _where(_engine, lambda options, facts: facts.biases),
        f"Set {IMPL}=full_iteration.",
        {IMPL: ("none or full_iteration", "Its layers take pairs of biases, which megatron-core's graphs do not")},
    ),
    (
        _elsewhere,
        f"Set {IMPL}=none, or {MAX_PACKED_SEQS} for packs.",
        {IMPL: ("none or local", "Only Bridge's own loop drives such graphs")},
    ),
    (
        _where(_runs("local", "transformer_engine"), lambda options, facts: not options.packed.enabled),
        "Switch one of both off, or recompute parts outside the captured modules.",
        {RECOMPUTE: ("null or selective", "The activations of captured layers are in graph memory")},
    ),
    (
        _runs("local", "transformer_engine"),
        "Switch one of both off.",
        {"model.cpu_offloading": ("false", "It moves activations between layers, but a graph's stay in its memory")},
    ),
    (
        padded_rows,
        f"Change it, or set {IMPL}=transformer_engine.",
        {
            "model.context_parallel_size": ("1", "Graphs of padded sequences were not compared with eager under it"),
            **{f"dataset.{name}": ("false", f"Graphs of packs have {MAX_PACKED_SEQS}") for name in PACKING_FIELDS},
            **{f"model.{name}": ("null", _ROWS_IN_FP8) for name in (*LOW, "quant_recipe")},
            "model.cpu_offloading": ("false", "The activations that it moves are in graph memory"),
            "model.multi_latent_attention": ("false", "Graphs do not support its rotary embedding"),
            "model.moe_input_jitter_eps": ("null", "Graphs do not support random jitter of the router's input"),
            OFFLOADS: ("false", "Copies of megatron-core would cross between the forward and the backward graph"),
        },
    ),
    (
        _where(padded_rows, lambda options, facts: facts["attention_dropout"] or facts["hidden_dropout"]),
        "Set model.attention_dropout and model.hidden_dropout to 0.",
        {RECOMPUTE: ("null or selective, as dropout is not 0,", _DRAWS)},
    ),
    (
        _fixed_addresses,
        "Use DDP with the distributed optimizer.",
        {
            "ddp.use_megatron_fsdp": ("false", "It moves parameters between steps, but a graph reads fixed addresses"),
            "dist.use_torch_fsdp2": ("false", "It frees parameters after each module, which a graph reads"),
        },
    ),
    (
        _where(_vision, lambda options, facts: options.vision.moves_activations and not facts.other_tower),
        "Keep one of them.",
        {RECOMPUTE: ("null", "The encoder's activations would be recomputed by two settings")},
    ),
    (
        _where(_vision, lambda options, facts: facts.other_tower and not facts.rows),
        "Change either.",
        {IMPL: ("none or local or transformer_engine", "megatron-core would capture replays with the whole step")},
    ),
    (
        _where(_vision, lambda options, facts: facts.copied_settings),
        "The encoder has the same settings on this model: switch one of both off.",
        {
            **{f"model.{name}": ("null", _ONCE) for name in LOW},
            "model.cpu_offloading": ("false", "It moves the encoder's activations, too, which are in graph memory"),
        },
    ),
    (
        _asks_for_packs,
        f"Set {IMPL}=transformer_engine, or remove {MAX_PACKED_SEQS}.",
        {IMPL: ("transformer_engine", "The train loop calls the plugin only with this implementation")},
    ),
    (
        packs,
        f"Change it, or remove {MAX_PACKED_SEQS}.",
        {
            MODULES: ("attn, mlp, moe_router, mamba or empty", "The host reads the token counts of experts alone"),
            **{f"model.{name}": ("0", _DROPOUT) for name in ("attention_dropout", "hidden_dropout")},
            "model.multi_latent_attention": ("false", "Graphs do not support its rotary embedding"),
            "model.moe_input_jitter_eps": ("null", "Graphs do not support random jitter of the router's input"),
            OFFLOADS: ("false", "The activations that megatron-core would offload are in graph memory"),
            "model.fp4": ("null", "fp4 was not compared with eager"),
            "model.quant_recipe": ("null", "Quantized weights are followed where all layers have one recipe"),
        },
    ),
    (
        _where(_layers, _recomputes_otherwise),
        f"Set it to null, or {IMPL}=none.",
        {
            RECOMPUTE: (
                "null",
                "Graphs recompute in bf16; around attention and routers alone, layers one by one (uniform, 1) and "
                "neither layernorm nor moe",
            )
        },
    ),
    (
        _where(packs, lambda options, facts: options.packed.moves_activations),
        "Keep one of them.",
        {RECOMPUTE: ("null", "Activations would be recomputed by two settings")},
    ),
    (
        _where(_layers, lambda options, facts: facts["cuda_graph_warmup_steps"] == 0),
        "Set it to 3.",
        {"model.cuda_graph_warmup_steps": ("set to 1 or more", "Buckets are planned from what warm-up steps show")},
    ),
    (
        _where(packs, lambda options, facts: facts.ranks("context") > 1),
        "Set it to p2p.",
        {"model.cp_comm_type": ("p2p, a2a, a2a+p2p", "Gathered keys and values were not compared with eager")},
    ),
    (
        _where(packs, lambda options, facts: facts.other_tower),
        f"Use tensor parallelism, or remove {MAX_PACKED_SEQS}.",
        {"model.context_parallel_size": ("1", "Only Bridge's Qwen3-VL divides packs with images among ranks")},
    ),
    (
        _where(packs, _delta_nets),
        f"Use tensor parallelism, or remove {MAX_PACKED_SEQS}.",
        {"model.context_parallel_size": ("1", "Gated delta nets over packs were not compared with eager under it")},
    ),
    (
        _where(_fp8_packs, lambda options, facts: facts.mamba or _delta_nets(options, facts)),
        "Train in bf16.",
        {"model.fp8": ("null with Mamba layers or gated delta nets", "These in fp8 were not compared with eager")},
    ),
    (
        _fp8_packs,
        "Change it, or train in bf16.",
        {
            "model.fp8_recipe": ("tensorwise, delayed, blockwise", "Other recipes were not compared with eager"),
            **{f"model.{name}": ("false", _ATTENTION) for name in FP8_ATTENTION},
            "model.tensor_model_parallel_size": ("1", "Exchanges of scales in graphs were not compared with eager"),
            "model.add_bias_linear": ("false", _PADDING),
            "model.normalization": ("RMSNorm", _PADDING),
        },
    ),
    (
        _where(_fp8_packs, lambda options, facts: facts.ranks("context") > 1),
        "Change it, or train in bf16.",
        {"model.add_qkv_bias": ("false", _PADDING)},
    ),
    (
        _where(_fp8_packs, _delayed_parts),
        "Set it to tensorwise, or capture all layers as one region.",
        {"model.fp8_recipe": ("tensorwise with parts of layers", "Eager updates scales in what a replay leaves out")},
    ),
    (
        _where(whole_moe_layers, lambda options, facts: not switched_on(EXPERT_BOUNDS, False)),
        _eager_experts,
        {"model.expert_tensor_parallel_size": ("1", f"Parts of experts were not measured; see {EXPERT_BOUNDS}")},
    ),
    (
        whole_moe_layers,
        _eager_experts,
        {
            **{
                f"model.{name}": ("false" if needed is False else "null", _EXPERTS)
                for name, needed in (ROUTERS | EXPERTS).items()
            },
            f"model.{BALANCING_TYPE}": (", ".join(BALANCING), _EXPERTS),
            "model.fp8": ("null", "The plugin's kernels of experts compute in bf16"),
        },
    ),
    (
        _where(whole_moe_layers, _router_loss),
        _eager_experts,
        {f"model.{FUSION}": ("false with a router's loss", _EXPERTS)},
    ),
    (
        _where(whole_moe_layers, lambda options, facts: facts.expert_adapters),
        _eager_experts,
        {"peft.target_modules": ("other layers than experts'", "Graphs compute experts' products without adapters")},
    ),
    (
        _where(_graphs, lambda options, facts: facts.copied_settings),
        "Switch it off.",
        {OFFLOADS: ("false", "megatron-core would count layers of the encoder as the language model's")},
    ),
    (
        _where(_engine, lambda options, facts: facts[OFFLOADS] and not options.packed.enabled),
        "Name what to capture.",
        {MODULES: (f"set beside {OFFLOADS}", "megatron-core waits for its copies only in graphs of named modules")},
    ),
)
