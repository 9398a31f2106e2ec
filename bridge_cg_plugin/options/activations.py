"""Options of regions whose activations leave the device, which vision and packed-sequence graphs share."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .errors import OptionError
from .values import positive_number, whole_number, words

# Parts of a model whose saved tensors can be offloaded, and what can be made again in the backward.
OFFLOAD_MODULES = ("attention", "mlp", "layernorm", "merger", "other")
RECOMPUTE = ("layernorm", "gelu", "linear")


class ActivationOptions(Protocol):
    """The fields that say where a region's activations are; see `VisionGraphOptions`."""

    @property
    def offload(self) -> tuple[str, ...] | None:
        """Parts whose activations go to the host."""

    @property
    def recompute(self) -> tuple[str, ...] | None:
        """What the backward makes again."""

    @property
    def memory_target_gb(self) -> float | None:
        """Device memory of a slot in GiB to keep to."""

    @property
    def offload_min_bytes(self) -> int:
        """Smallest activation that leaves."""

    @property
    def offload_host_gb(self) -> float | None:
        """Most page-locked host memory in GiB."""


def moves_activations(options: ActivationOptions) -> bool:
    """Whether activations are offloaded or made again."""
    return bool(options.offload or options.recompute) or options.memory_target_gb is not None


def some_of(choices: Sequence[str]) -> Callable[[str, Any], tuple[str, ...]]:
    """Return a parser of lists of `choices`; "all" stands for all of them, "none" for an empty list."""

    def parse(field: str, value: Any) -> tuple[str, ...]:
        names = words(value)
        if names in (("all",), ("none",)):
            return tuple(choices) if names == ("all",) else ()
        for name in names:
            if name not in choices:
                raise OptionError(field, value, f"{', '.join(choices)}, all, or none", f"Remove {name!r}.")
        return names

    return parse


# Option -> parser.
PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "offload": some_of(OFFLOAD_MODULES),
    "recompute": some_of(RECOMPUTE),
    "memory_target_gb": positive_number,
    "offload_min_bytes": whole_number(0),
    "offload_host_gb": positive_number,
}


def check_region(options: ActivationOptions, whole: bool, fields: dict[str, str], modules: Sequence[str]) -> None:
    """Refuse to move activations of regions that are as small as a part of a layer.

    Args:
        options: What was asked for.
        whole: Whether all layers are one region.
        fields: Option -> field.
        modules: What the field of modules says.

    Raises:
        OptionError: Activations shall move, and regions are parts of layers.
    """
    for option in ("offload", "recompute", "memory_target_gb"):
        given = getattr(options, option)
        if given and not whole:
            raise OptionError(
                fields[option],
                list(given) if isinstance(given, tuple) else given,
                f"None with {fields['modules']}={list(modules)}",
                "Capture all layers as one region: in a part of a layer a copy has nothing to run beside.",
            )
