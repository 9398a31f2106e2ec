"""Environment variables of NCCL and PyTorch that decide whether capture can work."""

import os

from ..options import OptionError


def check_process() -> None:
    """Check the environment variables that decide whether capture can work.

    Raises:
        OptionError: Expandable segments are on and NCCL registers graph memory, which hangs or crashes later.
    """
    allocator = ",".join(os.environ.get(n, "") for n in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if (
        "expandable_segments:true" in allocator.replace(" ", "").lower()
        and os.environ.get("NCCL_GRAPH_REGISTER") != "0"
    ):
        raise OptionError(
            "NCCL_GRAPH_REGISTER",
            os.environ.get("NCCL_GRAPH_REGISTER"),
            "0 while PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True",
            "Export NCCL_GRAPH_REGISTER=0 or switch expandable segments off.",
        )
