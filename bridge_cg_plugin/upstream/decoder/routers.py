"""megatron-core's routers inside the graph of all layers: losses and statistics of the real tokens alone."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...options import OptionError
from ...options.experts import BALANCING, BALANCING_TYPE, FUSION, ROUTERS
from ...options.language_model import MODULES
from ...upstream_types import UpstreamModule
from ..attributes import overridden
from ..seams.own_code import refuse_own_code
from ..seams.registry import seam
from .layers import check_router, is_pure, unmet

BIAS = seam("packed_expert_bias").target.rpartition(".")[2]
LOGGED = seam("packed_router_metrics")
REMEDY = f"Set {MODULES}=attn,moe_router, where experts stay eager."


class CapturedRouter:
    """A layer's router while all layers are recorded.

    Args:
        router: megatron-core's.

    Raises:
        OptionError: It is of a kind, or set in a way, that is not recorded; names it.
        Refused: Somebody replaced what masks or counts its tokens.
    """

    def __init__(self, router: UpstreamModule) -> None:
        check_router(router)
        refuse_own_code(router, BIAS, "routing")
        config = router.config
        check_fields(config, ROUTERS)
        kinds = [router.routing_type] if isinstance(router.routing_type, str) else router.routing_type
        if other := set(kinds) - set(BALANCING):
            allowed = f"{', '.join(BALANCING)} with experts inside the graph"
            raise OptionError(BALANCING_TYPE, min(other), allowed, REMEDY)
        if router.is_aux_loss_enabled() and config.moe_router_fusion:
            allowed = "False with a router's loss inside the graph"
            raise OptionError(FUSION, True, allowed, f"Set it to False, or set {MODULES}=attn,moe_router.")
        self._router, self._masked = router, not is_pure(router)

    def route(self, hidden: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities and the routing map, `[tokens, experts]` each.

        Args:
            hidden: `[tokens, 1, width]`.
            used: `[1]` int32, how many tokens are no padding: losses and statistics count these.
        """
        routed: tuple[Tensor, Tensor]
        if not self._masked:
            routed = self._router(hidden)
            return routed
        with self._counted(used):
            routed = self._router(hidden, _padding(hidden.shape[0], used))
        return routed

    def _counted(self, used: Tensor) -> AbstractContextManager[None]:
        """Let statistics of a bias of experts count real tokens; upstream's own mask for them does not fit the map."""
        if not getattr(self._router, "enable_expert_bias", False):
            return nullcontext()

        def count(routing_map: Tensor, *unused: Any, **unused_too: Any) -> None:
            if torch.is_grad_enabled():
                real = routing_map & ~_padding(routing_map.shape[0], used)
                self._router.local_tokens_per_expert += real.sum(dim=0)

        return overridden(self._router, BIAS, count)


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

    Args:
        routers: The routers.
        others: Other tensors that passes change.
    """
    before = {tensor: tensor.clone() for tensor in (*statistics_of(routers), *others)}
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for tensor in (*statistics_of(routers), *others):
            if tensor in before:
                tensor.copy_(before[tensor])
            else:
                tensor.zero_()


def statistics_of(routers: Sequence[nn.Module]) -> list[Tensor]:
    """Return the tensors themselves of what routers count, and of the losses of all routers that megatron-core logs."""
    counts = (getattr(router, "local_tokens_per_expert", None) for router in routers)
    return [*(count for count in counts if count is not None), *(_logged() if routers else ())]


def _logged() -> list[Tensor]:
    """Return the sums of routers' losses that megatron-core logs."""
    tracker = getattr(importlib.import_module(LOGGED.module), LOGGED.target)()
    return [entry.values for entry in tracker.metrics.values()]


def _padding(tokens: int, used: Tensor) -> Tensor:
    """Return which tokens are padding, `[tokens, 1]` bool."""
    return (torch.arange(tokens, device=used.device) >= used)[:, None]
