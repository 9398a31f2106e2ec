"""Options of offloading: the one that stands for all regions and layers, and megatron-core's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .activations import OFFLOAD_MODULES, some_of
from .errors import OptionError
from .values import is_unset, parse_flag, real_number, whole_number, words

MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Activation offloading to host memory, typed.

    `parts` is what a person says; the regions that the plugin captures take it over, and so do megatron-core's own
    options, which the others here are, for layers of the language model that the plugin does not capture.

    Attributes:
        parts: Parts of a model whose activations are offloaded, wherever that can be done; None says nothing.
        min_bytes: Smallest activation that is offloaded; None leaves everybody's default.
        enabled: Whether the inputs of `modules` are offloaded.
        modules: Parts of a layer whose input is offloaded.
        min_tensor_size: Smallest tensor, in elements, that is offloaded.
        delay_until_cuda_graph: Whether offloading waits for the graph's replay.
        delta_bytes_across_pp_ranks: How many bytes less each pipeline stage offloads than the one before.
        fraction: Part of the eligible groups that is offloaded.
        max_inflight: Offloads of one group that nobody waited for yet; None is no limit.
    """

    parts: tuple[str, ...] | None = None
    min_bytes: int | None = None
    enabled: bool = False
    modules: tuple[str, ...] = ()
    min_tensor_size: int = 1024 * 1024
    delay_until_cuda_graph: bool = False
    delta_bytes_across_pp_ranks: int = 0
    fraction: float = 1.0
    max_inflight: int | None = None


# Option -> field of a model provider, the plugin's own.
SHARED_FIELDS: dict[str, str] = {"parts": "activation_offload", "min_bytes": "activation_offload_min_bytes"}
# Option -> field of megatron-core's TransformerConfig.
CORE_FIELDS: dict[str, str] = {
    "enabled": "fine_grained_activation_offloading",
    "modules": "offload_modules",
    "min_tensor_size": "min_offloaded_tensor_size",
    "delay_until_cuda_graph": "delay_offload_until_cuda_graph",
    "delta_bytes_across_pp_ranks": "delta_offload_bytes_across_pp_ranks",
    "fraction": "activation_offload_fraction",
    "max_inflight": "fine_grained_offloading_max_inflight_offloads",
}
OFFLOAD_FIELDS = {**SHARED_FIELDS, **CORE_FIELDS}


def offload_options(fields: Mapping[str, Any]) -> OffloadOptions:
    """Return the options that a mapping of fields says.

    Raises:
        OptionError: A value cannot work.
    """
    given = {option: fields.get(field) for option, field in OFFLOAD_FIELDS.items()}
    return OffloadOptions(
        **{
            option: _PARSERS[option](OFFLOAD_FIELDS[option], value)
            for option, value in given.items()
            if not is_unset(value)
        }
    )


def _parse_modules(field: str, value: Any) -> tuple[str, ...]:
    names = words(value)
    for name in names:
        if name not in MODULES:
            raise OptionError(field, value, ", ".join(MODULES), f"Remove {name!r}.")
    return names


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "parts": some_of(OFFLOAD_MODULES),
    "min_bytes": whole_number(0),
    "enabled": parse_flag,
    "modules": _parse_modules,
    "min_tensor_size": whole_number(0),
    "delay_until_cuda_graph": parse_flag,
    "delta_bytes_across_pp_ranks": whole_number(0),
    "fraction": real_number("a number from 0 to 1", lambda number: 0 <= number <= 1),
    "max_inflight": whole_number(0),
}
