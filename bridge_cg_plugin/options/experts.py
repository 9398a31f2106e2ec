"""Settings of experts and their routers that graphs of whole layers do not have."""

from collections.abc import Mapping, Sequence
from typing import Any

from .values import is_unset, parse_flag, real_number, words

# Fields of a model's configuration, and what each must be where a release has it.
ROUTERS: dict[str, Any] = {
    "moe_router_force_load_balancing": False,
    "moe_router_force_biased": None,
    "moe_enable_routing_replay": False,
}
EXPERTS: dict[str, Any] = {
    "moe_expert_capacity_factor": None,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_overlap": False,
    "moe_router_padding_for_quantization": False,
    "moe_mlp_glu_interleave_size": None,
    "add_bias_linear": False,
    "use_te_activation_func": False,
    "use_transformer_engine_op_fuser": False,
    "use_fused_weighted_squared_relu": False,
    "delay_wgrad_compute": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
}
BALANCING_TYPE, FUSION, LOSS = "moe_router_load_balancing_type", "moe_router_fusion", "moe_aux_loss_coeff"
# A loss over all data-parallel ranks would exchange inside the graph with ranks whose packs are others.
BALANCING = ("none", "aux_loss", "seq_aux_loss")
NEEDED = ROUTERS | EXPERTS
SETTINGS = (*NEEDED, BALANCING_TYPE, FUSION, LOSS)
_weight = real_number("numbers", lambda number: True)


def not_recorded(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the first setting that keeps experts out of graphs, its value and what it must be; empty if there is none.

    Args:
        settings: What is known of the model's configuration.
    """
    for field, needed in NEEDED.items():
        value = settings.get(field)
        if not is_unset(value) and (needed is None or parse_flag(field, value)):
            return field, value, "null" if needed is None else "false"
    kinds = settings.get(BALANCING_TYPE)
    named = ("aux_loss",) if is_unset(kinds) else words(kinds)  # megatron-core's default
    if others := sorted({*named} - {*BALANCING}):
        return BALANCING_TYPE, others[0], ", ".join(BALANCING)
    fused = not is_unset(settings.get(FUSION)) and parse_flag(FUSION, settings[FUSION])
    has_loss = bool({*named} - {"none"}) and any(_weight(LOSS, each) for each in _each(settings.get(LOSS)))
    return (FUSION, True, "false with a router's loss") if fused and has_loss else ()


def _each(value: Any) -> Sequence[Any]:
    """Return what a field holds: one value, several, or several as text."""
    if is_unset(value):
        return ()
    if isinstance(value, str):
        return value.strip("[]() ").split(",")
    return value if isinstance(value, Sequence) else (value,)
