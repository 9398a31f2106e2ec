"""Options of regions whose activations leave the device, which vision and packed-sequence graphs share."""

from typing import Any, Protocol

from .declaration import option
from .values import positive_number, some_of, whole_number

# Parts of a model whose saved tensors can be offloaded, and what can be recomputed in the backward.
OFFLOAD_MODULES = ("attention", "mlp", "layernorm", "merger", "other")
RECOMPUTE = ("layernorm", "gelu", "linear")


class ActivationOptions(Protocol):
    """The options that say where a region's activations are, declared by the functions below."""

    @property
    def offload(self) -> tuple[str, ...] | None:
        """Parts whose activations go to the host."""

    @property
    def recompute(self) -> tuple[str, ...] | None:
        """What the backward recomputes."""

    @property
    def offload_above_gb(self) -> float | None:
        """Device memory of a slot in GiB to keep to."""

    @property
    def offload_min_bytes(self) -> int:
        """Smallest activation that leaves."""


def offload_option(details: str = "") -> Any:
    """Declare which parts' activations go to page-locked host memory in the forward and come back in the backward."""
    return option(
        None,
        some_of(OFFLOAD_MODULES),
        "LIST",
        f"parts whose activations are offloaded to the host: {', '.join(OFFLOAD_MODULES)}; all or none",
        details,
    )


def recompute_option(details: str = "") -> Any:
    """Declare what the backward's graph recomputes instead of keeping it."""
    return option(
        None,
        some_of(RECOMPUTE),
        "LIST",
        f"what the backward recomputes: {', '.join(RECOMPUTE)}; all or none",
        details,
    )


def offload_above_option(details: str = "") -> Any:
    """Declare the device memory of one slot in GiB that a mix of both, chosen from measured costs, keeps to."""
    return option(
        None,
        positive_number,
        "GIB",
        "device memory of a slot; offloading and recompute keep below it",
        details,
    )


def offload_min_bytes_option() -> Any:
    """Declare the smallest activation that is offloaded or recomputed."""
    return option(1 << 20, whole_number(0), "BYTES", "smallest activation that is offloaded or recomputed", tuning=True)


def moves_activations(options: ActivationOptions) -> bool:
    """Whether activations are offloaded or recomputed."""
    return offloads(options) or bool(options.recompute)


def offloads(options: ActivationOptions) -> bool:
    """Whether activations may be copied to the host."""
    return bool(options.offload) or options.offload_above_gb is not None
