"""Environment variables of NCCL, PyTorch and Transformer Engine that decide whether graphs and offloading can work."""

import os
import sys

from ..options import OptionError
from .registry.engine import TE_OFFLOAD

WEIGHTS_STAY = "NVTE_CPU_OFFLOAD_V1"


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


def check_offloading() -> None:
    """Check that Transformer Engine leaves weights on the device while megatron-core offloads.

    Raises:
        OptionError: It was not told so when it was imported; Bridge asks for the variable alone, at any time.
    """
    engine = sys.modules.get(TE_OFFLOAD)
    told = os.environ.get(WEIGHTS_STAY) == "1" if engine is None else engine.NVTE_CPU_OFFLOAD_V1
    if not told:
        raise OptionError(
            WEIGHTS_STAY,
            os.environ.get(WEIGHTS_STAY),
            "1 before Transformer Engine is imported, where megatron-core offloads activations",
            f"Export {WEIGHTS_STAY}=1 for every process.",
        )
