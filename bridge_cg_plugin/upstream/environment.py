"""Environment variables of NCCL, PyTorch and Transformer Engine that decide whether graphs and offloading can work."""

import os

from ..announce import announce_once, warn_once
from ..options import OptionError
from ..switches import ALLOWED, EXPERT_BOUNDS, PROOF, switched_on

RELEASE_MEMORY = "BRIDGE_CG_RELEASE_MEMORY"
GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
# Graph options as words.
OPTIONS = "BRIDGE_CG_OPTIONS"
_GONE = "BRIDGE_CG_WATCHDOG_MINUTES"


def check_process() -> None:
    """Check the environment variables that decide whether capture can work; warns of one that has gone.

    Raises:
        OptionError: Expandable segments are on and NCCL registers graph memory, which hangs or crashes later; or a
            variable of the plugin has an invalid value.
    """
    for name in (PROOF, EXPERT_BOUNDS):
        _is_on(name)
    if _GONE in os.environ:
        warn_once(f"{_GONE} has gone: unset it. A replay waits dist.distributed_timeout_minutes for another rank")
    allocator = ",".join(os.environ.get(n, "") for n in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if "expandable_segments:true" in allocator.replace(" ", "").lower() and os.environ.get(GRAPH_REGISTER) != "0":
        raise OptionError(
            GRAPH_REGISTER,
            os.environ.get(GRAPH_REGISTER),
            "0 while PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True",
            "Export NCCL_GRAPH_REGISTER=0 or switch expandable segments off.",
        )


def sizes_may_share_memory() -> bool:
    """Whether recordings with exchanges between ranks may lie over each other: NCCL registers no memory of theirs."""
    may = os.environ.get(GRAPH_REGISTER) == "0"
    if not may:
        announce_once(
            "graphs with exchanges between ranks keep the memory of larger buckets beside that of smaller ones; with "
            f"{GRAPH_REGISTER}=0 all of a slot share it"
        )
    return may


def memory_may_leave() -> bool:
    """Whether memory of graphs may leave the device between steps: off until it has run on a GPU.

    Raises:
        OptionError: The variable holds what is no switch.
    """
    return _is_on(RELEASE_MEMORY)


def _is_on(name: str) -> bool:
    if (found := switched_on(name, False)) is None:
        raise OptionError(name, os.environ[name], ALLOWED, "Correct it, or unset it.")
    return found
