"""Values of megatron-core's offloading that have no effect, each with the reason."""

from collections.abc import Iterator

from .facts import Facts
from .graph_options import GraphOptions
from .language_model import CudaGraphModule
from .offload import CORE_FIELDS, OFFLOAD, OffloadOptions
from .shared_offload import EXPERTS, IN_LINEAR_LAYERS

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
