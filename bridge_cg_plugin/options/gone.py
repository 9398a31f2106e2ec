"""Options that there were once: each with what to do without it."""

from typing import Any

from .errors import OptionError
from .values import is_unset

# Of development snapshots before the first release.
SINCE = "0.1.0"
GONE = {
    "vision_cuda_graph_balance": "Remove it: images stay on their ranks.",
    "vision_cuda_graph_tuning.drop_unused_steps": "Remove it, or give vision_cuda_graph_buckets fewer buckets.",
    "vision_cuda_graph_tuning.frozen_outputs_gb": "Remove it: a frozen encoder's replays take as long as ever.",
}


def refuse_gone(field: str, value: Any) -> None:
    """Refuse a value of an option that has gone.

    Raises:
        OptionError: The option has gone, and the value asks for it.
    """
    if field in GONE and not is_unset(value):
        why = f"Cannot use {field}={value!r}: the option has gone in bridge_cg_plugin {SINCE}."
        raise OptionError.because(field, f"{why} {GONE[field]}")
