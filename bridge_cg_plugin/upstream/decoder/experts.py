"""megatron-core's experts inside a graph: every token goes to its experts by counts that stay on the device."""

import importlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...graphs.recordings.capture import is_capturing
from ...language.experts import device
from ...language.experts.device import Tables
from ...language.experts.exchange import ExpertExchange, needed
from ...language.experts.linear import combine_linear, dispatch_linear, multiply, weighted_swiglu
from ...language.experts.rows import find_rows, row_weights
from ...offload import never_offload
from ...offload.registry import derive
from ...options import OptionError
from ...options.facts import BALANCING, BALANCING_TYPE, EXPERTS, FUSION, ROUTERS
from ...options.language_model import MODULES
from ...switches import EXPERT_BOUNDS, switched_on
from ...upstream_types import UpstreamModule
from ..kernels.recompute import WithoutOutput, recomputed, runs_again
from ..seams.contract import EXCHANGE, EXPERT_PRODUCTS, WEIGHTS
from ..seams.own_code import foreign, foreign_function, refuse_own_code
from ..seams.registry import seam
from ..wrappers import overridden
from .layers import check_router, is_pure, unmet

BIAS = seam("packed_expert_bias").target.rpartition(".")[2]
LOGGED = seam("packed_router_metrics")
REMEDY = f"Set {MODULES}=attn,moe_router, where experts stay eager."


def _refuse_router(router: UpstreamModule) -> None:
    """Refuse a router that is not recorded with all layers.

    Raises:
        OptionError: It is of a kind, or set in a way, that is not recorded; names it.
    """
    check_router(router)
    config = router.config
    check_fields(config, ROUTERS)
    kinds = [router.routing_type] if isinstance(router.routing_type, str) else router.routing_type
    if other := set(kinds) - set(BALANCING):
        allowed = f"{', '.join(BALANCING)} with experts inside the graph"
        raise OptionError(BALANCING_TYPE, min(other), allowed, REMEDY)
    if router.is_aux_loss_enabled() and config.moe_router_fusion:
        allowed = "False with a router's loss inside the graph"
        raise OptionError(FUSION, True, allowed, f"Set it to False, or set {MODULES}=attn,moe_router.")


def _route(router: UpstreamModule, hidden: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and the routing map, `[tokens, experts]` each.

    Args:
        router: megatron-core's.
        hidden: `[tokens, rows, width]`.
        used: `[1]` int32, how many tokens are no padding: losses and statistics count these.
    """
    padding = () if is_pure(router) else (_padding(hidden.shape[0] * hidden.shape[1], used),)

    def count(routing_map: Tensor, *unused: Any, **unused_too: Any) -> None:
        if torch.is_grad_enabled():
            real = routing_map & ~_padding(routing_map.shape[0], used)
            router.local_tokens_per_expert += real.sum(dim=0)

    # Statistics of a bias of experts count real tokens; upstream's own mask for them does not fit the map.
    counts = padding and getattr(router, "enable_expert_bias", False)
    with overridden(router, BIAS, count) if counts else nullcontext():
        routed: tuple[Tensor, Tensor] = router(hidden, *padding)
    return routed


def check_fields(config: Any, needed: dict[str, Any]) -> None:
    """Refuse settings that are not recorded.

    Args:
        config: The model's.
        needed: Field -> what it must be where a release has it.

    Raises:
        OptionError: Names the field.
    """
    for field, found, value in unmet(config, needed):
        raise OptionError(field, found, f"{value} with experts inside the graph", REMEDY)


@contextmanager
def statistics_kept(routers: Sequence[nn.Module], others: Sequence[Tensor] = ()) -> Iterator[None]:
    """Give routers' statistics and logged losses back what they were: passes before a capture count nothing.

    It may be recorded itself.

    Args:
        routers: The routers.
        others: Other tensors that passes change.
    """
    before = {tensor: tensor.clone() for tensor in (*statistics_of(routers), *others)}
    try:
        yield
    finally:
        if torch.cuda.is_initialized() and not is_capturing():
            torch.cuda.synchronize()
        for tensor in (*statistics_of(routers), *others):
            if tensor in before:
                tensor.copy_(before[tensor])
            else:
                tensor.zero_()


def statistics_of(routers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the tensors themselves of what routers count, and of the losses of all routers that megatron-core logs."""
    if not routers:
        return []
    counts = (getattr(router, "local_tokens_per_expert", None) for router in routers)
    tracker = getattr(importlib.import_module(LOGGED.module), LOGGED.target)()
    return [*(count for count in counts if count is not None), *(entry.values for entry in tracker.metrics.values())]


@contextmanager
def needs_noted(routers: Sequence[UpstreamModule], ranks: int, needs: deque[Tensor]) -> Iterator[None]:
    """Note what an eager pass of these routers sends to each rank."""
    found: list[Tensor] = []

    def route(forward: Callable[..., tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probabilities, routing_map = forward(*args, **kwargs)
        found.append(needed(routing_map, ranks))
        return probabilities, routing_map

    with ExitStack() as stack:
        for router in routers:
            stack.enter_context(overridden(router, "forward", partial(route, router.forward)))
        yield
    if found:
        needs.append(torch.stack(found))


def _padding(tokens: int, used: Tensor) -> Tensor:
    """Return which tokens are padding, `[tokens, 1]` bool."""
    return (torch.arange(tokens, device=used.device) >= used)[:, None]


FORWARD = seam("packed_experts").target.rpartition(".")[2]
GROUPED, SEQUENTIAL = (seam(f"packed_{kind}_experts").target.partition(".")[0] for kind in ("grouped", "sequential"))
# Linear layers whose product is `x @ weight.T` and nothing else. Adapters put others in their place.
LINEAR = (
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TERowParallelLinear",
    "ColumnParallelLinear",
    "RowParallelLinear",
)
# Fields of a model's configuration, and what each must be where a release has it.
NEEDED = {"expert_tensor_parallel_size": 1, **EXPERTS}


class CapturedExperts:
    """A layer's router, experts and shared experts, computed without a read of the device.

    Args:
        layer: A transformer layer with experts.
        tables: Where experts' weights are, for as long as recordings are replayed.
        exchange: Ranks of expert parallelism; None where there is one.

    Raises:
        OptionError: They are of a kind, or set in a way, that is not recorded; names it.
    """

    def __init__(self, layer: UpstreamModule, tables: Tables, exchange: ExpertExchange | None = None) -> None:
        self._moe: UpstreamModule = layer.mlp
        config = self._moe.config
        check_fields(config, EXPERTS if switched_on(EXPERT_BOUNDS, False) else NEEDED)
        _refuse_router(self._moe.router)
        self._linear = _linear_layers(self._moe.experts)
        self._activate, self._is_swiglu = activation(config), is_swiglu(config)
        self._top_k: int = config.moe_router_topk
        self._tables, self._exchange = tables, exchange

    def recorded(self, used: Tensor, overflow: Tensor | None = None) -> AbstractContextManager[None]:
        """Let the layer compute so.

        Args:
            used: `[1]` int32, how many tokens are no padding; padding goes to no expert and gets zeros.
            overflow: `[1]` int32, counted up where bounds leave too little room; None without bounds.

        Raises:
            Refused: Somebody replaced a function of theirs.
        """
        refuse_own_code(foreign_function(home, EXPERT_PRODUCTS) for home in EXPERT_PRODUCTS)
        layers = (module for linear in self._linear for module, _ in linear)
        held = dict.fromkeys((*_holders(self._moe.experts), *layers), ("forward", "_forward_impl", WEIGHTS))
        routing = {self._moe: (FORWARD,), self._moe.token_dispatcher: EXCHANGE, self._moe.router: (BIAS, "routing")}
        refuse_own_code(foreign(owner, *names) for owner, names in (routing | held).items())

        def forward(hidden_states: Tensor, *unused: Any, **unused_too: Any) -> tuple[Tensor, None]:
            compute = partial(self._forward, used=used, overflow=overflow)
            again = self._moe.moe_layer_recompute and self._moe.training
            return recomputed(compute, hidden_states) if again else compute(hidden_states), None

        return overridden(self._moe, FORWARD, forward)

    def _forward(self, hidden: Tensor, used: Tensor, overflow: Tensor | None) -> Tensor:
        shared = self._moe.shared_experts
        if shared is not None:
            shared = recomputed(shared, hidden) if self._moe.shared_experts_recompute else shared(hidden)
        with statistics_kept([self._moe.router]) if runs_again() else nullcontext():
            probabilities, routing_map = _route(self._moe.router, hidden, used)
        lanes = room = None
        if self._exchange is not None:
            probabilities, routing_map = map(self._exchange.for_shards, (probabilities, routing_map))
            lanes = self._exchange.lanes(routing_map, used, overflow)
            tokens_of_all = routing_map.shape[0] * self._exchange.ranks
            probabilities, routing_map, used = lanes.choices(probabilities, routing_map, used)
            room = None if overflow is None else self._exchange.rows(tokens_of_all)
        rows = find_rows(routing_map, used, min(self._top_k, routing_map.shape[1]), room, overflow)
        first, second = map(_weights, self._linear)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        never_offload(rows.tokens)  # small, and read to recompute what is large
        inner = dispatch_linear(tokens, rows, first, self._tables, lanes)
        # With other ranks' tokens there is room for more rows than are in use, and what is behind them never repeats.
        if lanes is None:
            again = partial(multiply, weights=first, bounds=rows.bounds, tables=self._tables, transposed=False)
            derive(inner, "linear", (tokens, rows.tokens), again)
        between = partial(self._between, bounds=rows.bounds)
        kept = WithoutOutput() if getattr(self._moe.experts, "activation_recompute", False) else None
        if kept is not None:
            between = partial(kept.checkpoint, between)
        inner = between(inner, never_offload(row_weights(probabilities, rows)))
        out = combine_linear(inner, rows, second, self._tables, lanes).view(hidden.shape)
        if kept is not None:
            kept.discard_output_and_register_recompute(out)
        return out if shared is None else out + shared

    def _between(self, inner: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
        """Return what goes into the second linear layers: of megatron-core's function, or the kernel in its place."""

        def activate(inner: Tensor, weights: Tensor) -> Tensor:
            if self._is_swiglu and device.runs_kernels(inner):
                return weighted_swiglu(inner, weights, bounds)
            return self._activate(inner, weights[:, None])

        out = activate(inner, weights)
        if self._exchange is None:
            derive(out, "gelu", (inner, weights), activate)
        return out


# One of an expert's two linear layers: of every expert, the module with its weight, and the weight's name there.
type _Linear = Sequence[tuple[nn.Module, str]]


def _weights(linear: _Linear) -> list[nn.Parameter]:
    """Return all experts' weights as they are now: while work is recorded, what stands in for them."""
    return [getattr(module, name) for module, name in linear]


def is_swiglu(config: Any) -> bool:
    """Whether the function between an expert's linear layers is gated SiLU and nothing else."""
    changed = config.activation_func_clamp_value is not None or config.glu_linear_offset
    fp8_input = config.activation_func_fp8_input_store
    return config.gated_linear_unit and config.activation_func is functional.silu and not (changed or fp8_input)


def activation(config: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return megatron-core's function between an expert's two linear layers, which applies the router's probability.

    It takes `[rows, width]` and `[rows, 1]`, and gives `[rows, inner width]` in the first one's dtype.

    Raises:
        OptionError: megatron-core has none for these settings.
    """
    if config.bias_activation_fusion:
        return _fused_activation(config)

    def unfused(inner: Tensor, weights: Tensor) -> Tensor:
        activate: Callable[[Tensor], Tensor] = config.activation_func
        if not config.gated_linear_unit:
            return (activate(inner) * weights).to(inner.dtype)
        gate, linear = inner.chunk(2, dim=-1)
        if (most := config.activation_func_clamp_value) is not None:
            gate, linear = gate.clamp(max=most), linear.clamp(min=-most, max=most)
        gated: Tensor = activate(gate) * (linear + config.glu_linear_offset) * weights
        return gated.to(inner.dtype)

    return unfused


def _fused_activation(config: Any) -> Callable[[Tensor, Tensor], Tensor]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    fp8_input = config.activation_func_fp8_input_store
    if config.gated_linear_unit and config.activation_func is functional.silu:
        return lambda inner, weights: weighted_bias_swiglu_impl(inner, None, weights, fp8_input)
    if config.gated_linear_unit and config.activation_func is quick_gelu:
        rest = (fp8_input, config.glu_linear_offset, config.activation_func_clamp_value)
        return lambda inner, weights: weighted_bias_quick_geglu_impl(inner, None, weights, *rest)
    raise OptionError(
        "model.activation_func",
        getattr(config.activation_func, "__name__", config.activation_func),
        "gated silu or quick_gelu with bias_activation_fusion and experts inside the graph",
        REMEDY,
    )


def _linear_layers(experts: UpstreamModule) -> tuple[_Linear, _Linear]:
    """Return both linear layers.

    Raises:
        OptionError: Experts are of another kind, layers compute something else than a product, or weights differ.
    """
    kind = type(experts).__name__
    if kind not in (GROUPED, SEQUENTIAL):
        raise _refused(f"experts of {kind}", f"{GROUPED} or {SEQUENTIAL}")
    held = _holders(experts)
    names = [f"weight{number}" for number in range(experts.num_local_experts)] if kind == GROUPED else ["weight"]
    first, second = (
        [(getattr(each, layer), name) for each in held for name in names] for layer in ("linear_fc1", "linear_fc2")
    )
    for linear in (first, second):
        if other := {type(module).__name__ for module, _ in linear} - set(LINEAR):
            raise _refused(f"linear layers of {min(other)}", ", ".join(LINEAR))
        weights = _weights(linear)
        if any(weight is None for weight in weights):
            raise _refused("experts with one weight for all", "experts with a weight for each")
        if len({(w.requires_grad, w.shape, w.dtype, w.is_contiguous()) for w in weights}) > 1:
            raise _refused("weights that are not alike", "weights of one shape, all trained or none")
    return first, second


def _holders(experts: UpstreamModule) -> list[nn.Module]:
    """Return the modules that have the linear layers."""
    return [experts] if type(experts).__name__ == GROUPED else list(experts.local_experts)


def _refused(found: str, allowed: str) -> OptionError:
    why = f"the model has {found}, and it must have {allowed}"
    return OptionError.because(MODULES, f"Cannot record experts inside the graph: {why}. {REMEDY}")
