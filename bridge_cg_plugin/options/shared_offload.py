"""One option for offloading, passed on to the plugin's regions and to the layers that megatron-core runs."""

from collections.abc import Iterator
from dataclasses import replace

from .errors import OptionError
from .facts import Facts
from .graph_options import GraphOptions
from .language_model import CudaGraphModule, LanguageModelGraphOptions
from .offload import CORE_FIELDS, OFFLOAD, OFFLOAD_MODULES, SHARED_FIELDS, OffloadOptions
from .packed import PACKED_FIELDS, PackedOptions
from .vision import PROVIDER_FIELDS, VisionGraphOptions

PARTS = SHARED_FIELDS["parts"]
EXPERTS = ("expert_fc1", "moe_act")
# Of experts whose MLP is one operation.
FUSED_EXPERTS = "fused_group_mlp"
IN_EXPERTS = (*EXPERTS, FUSED_EXPERTS)
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
# Part -> megatron-core's modules in it.
CORE_MODULES: dict[str, tuple[str, ...]] = {
    "attention": ATTENTION,
    "mlp": IN_EXPERTS,
    "layernorm": ("attn_norm", "mlp_norm"),
}
COUNTS_ENCODER = "megatron-core would count layers of the encoder, which has the same settings, as the language model's"
READ_BY_RESIDUAL = "megatron-core would free the layer's input, which the residual connection reads"
IN_LINEAR_LAYERS = "its norms are part of the linear layers behind them"


def share_offload(options: GraphOptions, facts: Facts) -> GraphOptions:
    """Return options in which the shared option has reached regions and megatron-core, with what it does not reach.

    Args:
        options: Options with parts to offload.
        facts: What else decides what can leave.

    Raises:
        OptionError: One of them was told something else, or nothing can be offloaded.
    """
    offload, parts = options.offload, options.offload.parts or ()
    vision, packed = options.vision, options.packed
    if vision.enabled:
        vision = _region(vision, offload, PROVIDER_FIELDS)
    if packed.enabled:
        packed = _region(packed, offload, PACKED_FIELDS)
        return replace(options, vision=vision, packed=packed)
    modules, kept = _core_modules(parts, options.language_model, facts)
    if not modules and not vision.enabled:
        reasons = "; ".join(dict.fromkeys(kept.values())) or "the language model has no such part"
        allowed = "parts that something of this model can offload"
        raise OptionError(PARTS, list(parts), allowed, f"Nothing would be: {reasons}. Remove it.")
    warnings = tuple(f"{PARTS}: {part} of the language model stays on the device: {why}" for part, why in kept.items())
    return replace(
        options,
        vision=vision,
        offload=_core(offload, modules, options.language_model, facts),
        warnings=(*options.warnings, *warnings),
    )


def _region[Region: (VisionGraphOptions, PackedOptions)](
    region: Region, offload: OffloadOptions, fields: dict[str, str]
) -> Region:
    """Return a region's options with what is shared."""
    if region.offload is not None and set(region.offload) != set(offload.parts or ()):
        raise _conflict(fields["offload"], list(region.offload), offload)
    return replace(region, offload=offload.parts)


def _core(
    offload: OffloadOptions, modules: tuple[str, ...], language_model: LanguageModelGraphOptions, facts: Facts
) -> OffloadOptions:
    """Return megatron-core's options as the shared one sets them; they may have been set from it before."""
    written = [name for name in ("enabled", "modules") if CORE_FIELDS[name] in facts.explicit]
    of_parts = {module for part in offload.parts or () for module in CORE_MODULES.get(part, ())}
    stranger = bool(offload.modules) and not (offload.enabled and set(offload.modules) <= of_parts)
    if written or stranger:
        name = written[0] if written else "modules"
        value = getattr(offload, name)
        raise _conflict(CORE_FIELDS[name], list(value) if isinstance(value, tuple) else value, offload)
    if offload.modules:
        return offload
    bound = 1 if modules and language_model.impl == "full_iteration" else None
    limit = bound if offload.max_inflight is None else offload.max_inflight
    return replace(offload, enabled=bool(modules), modules=modules, max_inflight=limit)


def _conflict(field: str, value: object, offload: OffloadOptions) -> OptionError:
    said = f"{PARTS}={','.join(offload.parts or ())}"
    return OptionError(field, value, f"left at its default with {said}", f"{PARTS} sets it too: remove one of the two.")


def _core_modules(
    parts: tuple[str, ...], language_model: LanguageModelGraphOptions, facts: Facts
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return megatron-core's modules of these parts that it offloads, and why of other parts there are none."""
    found, kept = [], {}
    for part in (part for part in OFFLOAD_MODULES if part in parts and part in CORE_MODULES):
        why = {module: _why_kept(module, language_model, facts) for module in _modules_in(part, facts)}
        leaving = [module for module, reason in why.items() if reason is None]
        found += leaving
        if not leaving:
            kept[part] = next(reason for reason in why.values() if reason is not None)
    return tuple(found), kept


def _modules_in(part: str, facts: Facts) -> tuple[str, ...]:
    """Return megatron-core's modules in a part of this model: experts are offloaded in steps, or whole if fused."""
    if part != "mlp":
        return CORE_MODULES[part]
    return (FUSED_EXPERTS,) if facts.fused_experts and facts.offload_in_graphs is not False else EXPERTS


def _why_kept(module: str, language_model: LanguageModelGraphOptions, facts: Facts) -> str | None:
    """Return why megatron-core does not offload a module of this model; None where it does."""
    if facts.copied_settings:
        return COUNTS_ENCODER
    if module in IN_EXPERTS and facts.moe is False:
        return "megatron-core offloads MLPs of experts only"
    if module in IN_EXPERTS and facts.stashed_experts:
        return "moe_paged_stash holds activations of experts"
    if module == "qkv_linear" and reads_residual(facts):
        return READ_BY_RESIDUAL
    own_norm = facts.mla and not facts.mla_fused_norm
    if (module == "attn_norm" and not own_norm) or (module == "mlp_norm" and facts.moe is False):
        return IN_LINEAR_LAYERS
    return _why_graphs_keep(module, language_model, facts)


def reads_residual(facts: Facts) -> bool:
    """Whether latent attention's first projection reads what the residual connection reads, as no norm is before it."""
    return bool(facts.mla_fused_norm) and facts.mla is not False and not facts.attention_variant


def _why_graphs_keep(module: str, language_model: LanguageModelGraphOptions, facts: Facts) -> str | None:
    """Return why graphs of the language model keep a module on the device; None where they do not."""
    impl, captures = language_model.impl, language_model.captures
    if impl == "full_iteration" and facts.images:
        return "the language model is one graph forward and one backward"
    if CudaGraphModule.moe in language_model.modules and language_model.per_layer:
        return "megatron-core does not offload beside captured MoE layers"
    if impl == "local" and module not in IN_EXPERTS:
        return "megatron-core's local graphs leave the device for experts only"
    if language_model.per_layer and not language_model.modules:
        return "megatron-core does not wait for copies in graphs of whole layers"
    inside = captures(CudaGraphModule.attn) and module in ATTENTION
    if inside and facts.offload_in_graphs is False:
        return "this release of megatron-core does not wait for copies inside graphs"
    borders = (CudaGraphModule.attn, CudaGraphModule.mlp, CudaGraphModule.mamba)
    if module == "attn_norm" and any(map(captures, borders)):
        return "megatron-core keeps inputs of norms at a graph's border"
    router = captures(CudaGraphModule.moe_router) or captures(CudaGraphModule.moe)
    if module == "mlp_norm" and (captures(CudaGraphModule.attn) or router):
        return "megatron-core keeps inputs of norms at a graph's border"
    return None


_REPLAYED = (CudaGraphModule.attn, CudaGraphModule.moe_router)


def offload_without_effect(options: GraphOptions, facts: Facts) -> tuple[str, ...]:
    """Return a line for each value of megatron-core's offloading that changes nothing.

    Where it is off, these are values that a person wrote: recipes leave theirs.

    Args:
        options: Options, the shared one of offloading passed on.
        facts: What else decides what can leave.
    """
    if options.offload.enabled:
        return tuple(f"{said}: no effect, {why}" for said, why in _idle(options, facts))
    said = [word for field, word in _told(options.offload).items() if field in facts.explicit]
    off = f"megatron-core offloads nothing ({CORE_FIELDS['enabled']}=false)"
    return (f"{', '.join(said)}: no effect, {off}",) if said else ()


def _told(offload: OffloadOptions) -> dict[str, str]:
    """Return megatron-core's fields with values that are not their defaults, as `field=value`."""
    values = {one: getattr(offload, one.name) for one in OFFLOAD.options if one.since}
    written = {one.field: ",".join(v) if isinstance(v, tuple) else v for one, v in values.items() if v != one.default}
    return {field: f"{field}={value}" for field, value in written.items()}


def _idle(options: GraphOptions, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield what has no effect though megatron-core offloads, and why."""
    offload, told = options.offload, _told(options.offload)
    if offload.delay_until_cuda_graph and not _delays(options):
        parts = " and ".join(EXPERTS)
        yield told[CORE_FIELDS["delay_until_cuda_graph"]], f"only {parts} beside captured attn or moe_router wait"
    if offload.delta_bytes_across_pp_ranks and facts.pipeline_stages == 1:
        yield told[CORE_FIELDS["delta_bytes_across_pp_ranks"]], "there is one pipeline stage"
    if offload.fraction == 0:
        said = told.get(CORE_FIELDS["modules"], told[CORE_FIELDS["enabled"]])
        yield said, f"{CORE_FIELDS['fraction']}=0 offloads nothing"
    for norm in _norms_in_linear_layers(offload, facts):
        yield f"{norm} in {CORE_FIELDS['modules']}", IN_LINEAR_LAYERS


def _delays(options: GraphOptions) -> bool:
    """Whether copies of experts wait for the next replay: of graphs that Transformer Engine captured of MoE layers."""
    graphs = options.language_model
    replayed = graphs.impl == "transformer_engine" and not set(_REPLAYED).isdisjoint(graphs.modules)
    return replayed and not set(EXPERTS).isdisjoint(options.offload.modules)


def _norms_in_linear_layers(offload: OffloadOptions, facts: Facts) -> list[str]:
    single = not facts.attention_variant and not facts.mamba
    attention = single and (facts.mla is False or facts.mla_fused_norm)
    fused = {"attn_norm": attention, "mlp_norm": facts.moe is False}
    return [name for name in offload.modules if fused.get(name)]
