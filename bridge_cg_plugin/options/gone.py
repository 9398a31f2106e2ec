"""Options that there were once: each with what to do without it."""

from typing import Any

from .errors import OptionError
from .values import is_unset

# Of development snapshots before the first release.
SINCE = "0.1.0"
_HOST = "Remove it: offloading takes at most four fifths of the host's memory, shared by its processes."
_LIMITS = "Remove it: a bucket is captured for the limits that microbatches ask for."
_MODE = "Remove it: automatic buckets are captured on demand, named ones at once."
GONE = {
    "activation_offload_min_bytes": "Set offload_min_bytes in the tuning mapping of each part.",
    "cuda_graph_packed_tuning.bucket_limits": _LIMITS,
    "cuda_graph_packed_tuning.capture_mode": _MODE,
    "cuda_graph_packed_tuning.max_seqlen": "Remove it: a document may be as long as its bucket.",
    "cuda_graph_packed_tuning.offload_host_max_gb": _HOST,
    "cuda_graph_packed_tuning.planned_for": "Remove it: buckets that ranks cannot share are refused in any case.",
    "vision_cuda_graph_balance": "Remove it: images stay on their ranks.",
    "vision_cuda_graph_tuning.audio": "Remove it: the audio encoder is captured with the vision encoder.",
    "vision_cuda_graph_tuning.bucket_limits": _LIMITS,
    "vision_cuda_graph_tuning.capture_mode": _MODE,
    "vision_cuda_graph_tuning.drop_unused_steps": "Remove it, or give vision_cuda_graph_buckets fewer buckets.",
    "vision_cuda_graph_tuning.frozen_outputs_gb": "Remove it: a frozen encoder's replays take as long as ever.",
    "vision_cuda_graph_tuning.gradient_hooks": "Remove it: register hooks on parameters, which replays run.",
    "vision_cuda_graph_tuning.headroom": "Remove it: automatic buckets are captured for the sizes that come.",
    "vision_cuda_graph_tuning.offload_host_max_gb": _HOST,
    "vision_cuda_graph_tuning.streams": "Remove it: the plugin chooses.",
}


def refuse_gone(field: str, value: Any) -> None:
    """Refuse a value of an option that has gone.

    Raises:
        OptionError: The option has gone, and the value asks for it.
    """
    if field in GONE and not is_unset(value):
        why = f"Cannot use {field}={value!r}: the option has gone in bridge_cg_plugin {SINCE}."
        raise OptionError.because(field, f"{why} {GONE[field]}")
