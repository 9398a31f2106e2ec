"""What upstream changes of a model while it trains without changing what the model computes."""

from collections.abc import Callable
from typing import Any

from ..graphs.changes.state import Exempt
from ..graphs.changes.values import look_not_into
from .seams.contract import PLACES, held_now
from .seams.own_code import own_code

# A schedule passes layers the microbatch's number and a pipeline stage its input, which graphs get as a tensor. When
# attention first gets lengths, it forgets the names of those that it does not pass on. A configuration holds functions
# of the loop.
BOOKKEEPING = frozenset(
    (
        *("current_microbatch", "is_first_microbatch", "input_tensor", "kept_packed_seq_params"),
        *("timers", "grad_scale_func", "finalize_model_grads_func"),
        *("no_sync_func", "grad_sync_func", "param_sync_func"),
    )
)
look_not_into("megatron.core.timers", "megatron.core.process_groups_config")
# The all-to-all dispatcher keeps `probs` and `routing_map` of a pass, for one; statistics and caches are globals.
PACKAGES = frozenset(("megatron", "transformer_engine"))
# Where hooks are made that are part of a module's forward, or that gather parameters, for which replays wait, or that
# collect outputs in those calls alone that ask for them.
OWN_HOOKS = (
    "megatron.bridge.peft.lora_layers",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.transformer.moe.experts",
    "megatron.core.transformer.moe.shared_experts",
    "transformers.utils.output_capturing",
)


def own_hook(hook: Callable[..., Any]) -> bool:
    """Whether a module's hook is upstream's own, or the plugin's."""
    function = getattr(hook, "func", hook)  # of a partial
    module = getattr(function, "__module__", None) or ""
    return module in OWN_HOOKS or module.partition(".")[0] == __name__.partition(".")[0]


EXEMPT = Exempt(BOOKKEEPING, own_hook, PACKAGES, held_now, PLACES, own_code)
