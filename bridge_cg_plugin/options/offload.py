"""Options of offloading: the one that stands for all regions and layers, and megatron-core's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .declaration import Group, option
from .values import Parser, flag, known_names, positive_number, real_number, some_of, whole_number, words

# Parts of a model whose saved tensors can be offloaded, and what can be recomputed in the backward.
OFFLOAD_MODULES = ("attention", "mlp", "layernorm", "merger", "other")
RECOMPUTE = ("layernorm", "gelu", "linear")


class CapturedOptions:
    """What options of vision graphs and of packs have in common.

    Attributes:
        buckets: Token counts, or "auto".
        grows: Whether named buckets, too, are captured when microbatches ask for them. No option.
        offload: Parts whose activations go to the host.
        recompute: What the backward recomputes.
        offload_above_gb: Device memory of a slot in GiB to keep to.
        offload_min_bytes: Smallest activation that leaves.
    """

    __slots__ = ()
    buckets: tuple[int, ...] | Literal["auto"]
    grows: bool
    offload: tuple[str, ...] | None
    recompute: tuple[str, ...] | None
    offload_above_gb: float | None
    offload_min_bytes: int

    @property
    def named_buckets(self) -> tuple[int, ...]:
        """The buckets that are named; none of automatic ones."""
        return () if self.buckets == "auto" else self.buckets

    @property
    def on_demand(self) -> bool:
        """Whether buckets are recorded when microbatches ask for them."""
        return self.grows or self.buckets == "auto"

    @property
    def offloads(self) -> bool:
        """Whether activations may be copied to the host."""
        return bool(self.offload) or self.offload_above_gb is not None

    @property
    def moves_activations(self) -> bool:
        """Whether activations are offloaded or recomputed."""
        return self.offloads or bool(self.recompute)


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
SHARED = "activation_offload"


def _parse_modules(field: str, value: Any) -> tuple[str, ...]:
    return known_names(field, value, words(value), MODULES, f"any of {', '.join(MODULES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """Activation offloading to host memory, typed. What each option means is in its declaration.

    `parts` is what a user sets; the regions that the plugin captures take it over, and so do megatron-core's own
    options, which the others here are, for layers of the language model that the plugin does not capture.
    """

    parts: tuple[str, ...] | None = option(
        None,
        some_of(OFFLOAD_MODULES),
        "LIST",
        f"parts of the whole model whose activations are offloaded to the host: {', '.join(OFFLOAD_MODULES)}; "
        "all or none",
        field=SHARED,
    )
    enabled: bool = option(
        False,
        flag,
        "BOOL",
        "offload inputs of `offload_modules`",
        "The flag `--offload` sets both fields",
        field="fine_grained_activation_offloading",
        flags=(),
        since="0.5",
    )
    modules: tuple[str, ...] = option(
        (),
        Parser(", ".join(MODULES), _parse_modules),
        "LIST",
        f"offload inputs of parts of the language model's layers: {', '.join(MODULES)}; none is off",
        field="offload_modules",
        flags=("offload",),
        since="0.5",
    )
    min_tensor_size: int = option(
        1024 * 1024,
        whole_number(0),
        "ELEMENTS",
        "smallest tensor that is offloaded",
        field="min_offloaded_tensor_size",
        flags=("offload_min_tensor_size",),
        since="0.5",
    )
    delay_until_cuda_graph: bool = option(
        False,
        flag,
        "BOOL",
        "start copies of experts after the next layer's replay",
        "Of `expert_fc1` and `moe_act`, with captured `attn` or `moe_router`",
        field="delay_offload_until_cuda_graph",
        flags=("offload_delay_until_cuda_graph",),
        since="0.6",
    )
    delta_bytes_across_pp_ranks: int = option(
        0,
        whole_number(0),
        "BYTES",
        "bytes that each pipeline stage offloads less than the stage before",
        field="delta_offload_bytes_across_pp_ranks",
        flags=("offload_delta_bytes_across_pp_ranks",),
        since="0.6",
    )
    fraction: float = option(
        1.0,
        real_number("a number from 0 to 1", lambda number: 0 <= number <= 1),
        "X",
        "fraction of eligible groups to offload, 0 to 1",
        field="activation_offload_fraction",
        flags=("offload_fraction",),
        since="0.6",
    )
    max_inflight: int | None = option(
        None,
        whole_number(0),
        "N",
        "most pending offloads of one group",
        "None is no limit; with captured attention 0 or None",
        field="fine_grained_offloading_max_inflight_offloads",
        flags=("offload_max_inflight",),
        since="0.5",
    )


OFFLOAD = Group(name="offload", kind=OffloadOptions)
OFFLOAD_FIELDS = OFFLOAD.fields
# Option -> field of a model provider, the plugin's own, and of megatron-core's TransformerConfig.
SHARED_FIELDS = {one.name: one.field for one in OFFLOAD.options if not one.since}
CORE_FIELDS = {one.name: one.field for one in OFFLOAD.options if one.since}


def offload_options(fields: Mapping[str, Any]) -> OffloadOptions:
    """Return the options that a mapping of fields sets.

    Raises:
        OptionError: A value cannot work.
    """
    return OffloadOptions(**OFFLOAD.read(fields))
