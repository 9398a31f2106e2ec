"""Options of the vision encoder and its graphs, and what they have in common with those of packs."""

import importlib.metadata
from dataclasses import dataclass, replace
from typing import Any, Literal

from .declaration import (
    Group,
    OptionError,
    Parser,
    capacities,
    flag,
    known_names,
    one_of,
    option,
    positive_number,
    some_of,
    whole_number,
    words,
)

# Parts of a model whose saved tensors can be offloaded, and what can be recomputed in the backward.
OFFLOAD_MODULES = ("attention", "mlp", "layernorm", "merger", "other")
RECOMPUTE = ("layernorm", "gelu", "linear")
PARTS_NAMED = f"{', '.join(OFFLOAD_MODULES)}; all or none"


class CapturedOptions:
    """What options of vision graphs and of packs have in common.

    Attributes:
        buckets: Token counts, or "auto".
        grows: Whether named buckets, too, are captured when microbatches ask for them. No option.
        offload: Parts whose activations go to the host.
        recompute: What the backward recomputes.
        offload_above_gb: Device memory of a slot in GiB to keep to.
    """

    __slots__ = ()
    buckets: tuple[int, ...] | Literal["auto"]
    grows: bool
    offload: tuple[str, ...] | None
    recompute: tuple[str, ...] | None
    offload_above_gb: float | None

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


# Default, parser and help of options that vision graphs and packs share: what goes to page-locked host memory in
# the forward and comes back in the backward, what the backward recomputes, and the GiB that a mix of both keeps to.
OFFLOADED = None, some_of(OFFLOAD_MODULES), f"parts whose activations are offloaded to the host: {PARTS_NAMED}"
RECOMPUTED = None, some_of(RECOMPUTE), f"what the backward recomputes: {', '.join(RECOMPUTE)}; all or none"
TARGET = None, positive_number, "device memory of a slot; offloading and recompute keep below it"

# The package behind `vision_cuda_graph_attention=flash`.
FLASH_ATTENTION = "flash-attn-4"
SCOPE = ("attn", "mlp")
# Offsets of frames are 32-bit integers.
MOST_TOKENS = 2**31 - 1
_OFFSETS = "Offsets of tokens are 32-bit integers."
SCOPE_FIELD = "vision_cuda_graph_scope"


def _parse_scope(field: str, value: Any) -> tuple[str, ...]:
    return known_names(field, value, tuple(name for name in words(value) if name != "full"), SCOPE, _SCOPE.allowed)


_SCOPE = Parser("attn, mlp, both, or empty", _parse_scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionGraphOptions(CapturedOptions):
    """Options of the vision encoder, nearly all of its CUDA graphs, typed. What each means is in its declaration.

    Attributes:
        streams: Streams that a graph's kernels run on. No option. With 2, weight gradients run in parallel with other
            kernels; "auto" is 2 for buckets of up to 4096 tokens whose activations stay on the device, else 1.
    """

    impl: Literal["none", "transformer_engine"] = option(
        "none",
        one_of(("none", "transformer_engine"), "Upstream's other implementations have no vision graphs."),
        "vision-encoder graphs: none or transformer_engine",
        "`transformer_engine` is upstream's name; the plugin captures the graphs",
    )
    scope: tuple[str, ...] = option(
        (),
        _SCOPE,
        "upstream's parts of layers to capture: attn or mlp",
        "With any value the whole encoder is one graph",
        field=SCOPE_FIELD,
    )
    buckets: tuple[int, ...] | Literal["auto"] = option(
        "auto",
        capacities,
        "bucket sizes in tokens, ascending, or auto",
        "`auto` chooses them from the microbatches of warm-up steps. `max_vision_cuda_graph_seq_length` is added to a "
        "list",
    )
    max_seq_length: int | None = option(
        None,
        whole_number(1),
        "tokens of the largest bucket",
        "Tokens are patches before merging. With None, automatic buckets have no limit",
        field="max_vision_cuda_graph_seq_length",
    )
    slots: int | Literal["auto"] = option(
        "auto",
        whole_number(1, "auto"),
        "most microbatches between forward and backward at the same time, or auto",
        "`auto` is the pipeline depth, doubled when interleaved, and at most the microbatches of a step",
    )
    max_frames: int | Literal["auto"] = option(
        "auto",
        whole_number(1, "auto"),
        "most images and video frames of one microbatch, or auto",
        "`auto` is 64, or twice the most of warm-up steps if that is more, rounded up to a multiple of 16. Automatic "
        "buckets double it for microbatches with more",
    )
    exact_below: int = option(
        256,
        whole_number(0),
        "microbatches of up to this size need a bucket of exactly their size, else they run eager",
        "For few rows, matrix libraries choose kernels by the number of rows, so padding would change the rounding. "
        "0 pads all sizes",
    )
    kernels: Literal["auto", "exact", "fast"] = option(
        "auto",
        one_of(("auto", "exact", "fast")),
        "kernels that may replace eager's: auto, exact or fast",
        "`exact` allows kernels that round as eager's do. `fast` also allows kernels that sum in another "
        "order (the backward of LayerNorm and RMSNorm), so gradients differ by rounding. Outputs equal eager's in all "
        "cases, except for encoders that are [near fp32](encoders.md), of which some then [attend by "
        "cuDNN](encoders.md#what-differs-by-encoder). `auto` is `exact` under deterministic algorithms "
        "(`NVTE_ALLOW_NONDETERMINISTIC_ALGO=0` or PyTorch's), `fast` otherwise",
    )
    attention: Literal["auto", "transformer_engine", "cudnn", "flash"] = option(
        "auto",
        one_of(("auto", "transformer_engine", "cudnn", "flash")),
        "attention over several frames: auto, transformer_engine, cudnn or flash",
        "`cudnn` calls cuDNN directly (package `nvidia-cudnn-frontend`, from 1.24 with cuDNN 9.22, else from 1.28) for "
        "the bucket's number and size of frames, with the same kernels and outputs ([design](design.md#attention)). "
        "`auto` is `cudnn` if possible. Both use Transformer Engine without the package or a GPU, under deterministic "
        "algorithms, or if eager does not use cuDNN's kernels (`NVTE_FUSED_ATTN=0`, `attention_backend`, read at "
        "capture). `flash` is "
        "`auto`, with FlashAttention in buckets for frames of 640 tokens and more (package `flash-attn-4`, "
        "`requirements/flash.txt`; Hopper GPUs). It is faster and rounds differently: outputs are as close to fp32 as "
        "eager's, but not bit-identical. For Hugging Face's "
        "[encoders](encoders.md#what-differs-by-encoder), read PyTorch for Transformer Engine. There `cudnn` rounds "
        "differently, needs a Hopper GPU or newer, and does not depend on eager's kernels; `auto` is PyTorch's with "
        "`kernels=exact`",
    )
    offload: tuple[str, ...] | None = option(
        *OFFLOADED,
        "The copies are part of the graphs ([offloading](offload.md)). `layernorm` is inputs and outputs of the "
        "layers' norms. None is no part, or any part with `vision_cuda_graph_offload_above_gb`",
    )
    recompute: tuple[str, ...] | None = option(
        *RECOMPUTED,
        "`linear` is the QKV projection and the MLP's first layer. Outputs that are not bit-identical when recomputed "
        "are kept. None as for `vision_cuda_graph_offload`",
    )
    offload_above_gb: float | None = option(
        *TARGET,
        "The mix is chosen from measured costs, within `vision_cuda_graph_offload` and `vision_cuda_graph_recompute`. "
        "None does everything that these name",
    )
    strict: bool = option(
        False, flag, "a failed capture, or a replay that differs from eager, stops the run", "Otherwise the run goes on"
    )
    deepstack_gradient_allreduce: bool = option(
        False,
        flag,
        "sum gradients of deepstack features over tensor-parallel ranks, under sequence parallelism",
        "For Qwen3-VL, eager and on graphs. Upstream does not sum them "
        "([sequence parallelism and deepstack](parallel.md#sequence-parallelism-and-deepstack))",
        field="vision_deepstack_gradient_allreduce",
    )
    grows: bool = False
    streams: Literal["auto", 1, 2] = "auto"

    @property
    def enabled(self) -> bool:
        """Whether vision graphs are asked for."""
        return self.impl != "none"


# Options that have an effect without graphs too.
WITHOUT_GRAPHS = ("deepstack_gradient_allreduce",)
VISION = Group(
    name="vision", kind=VisionGraphOptions, prefix="vision_cuda_graph_", owners="a model of the Qwen3-VL family"
)
# Option -> field of a model provider. `impl` and `max_seq_length` are upstream's own.
PROVIDER_FIELDS = VISION.fields


def has_flash_attention() -> bool:
    """Whether the package behind `vision_cuda_graph_attention=flash` is installed."""
    try:
        return bool(importlib.metadata.version(FLASH_ATTENTION))
    except importlib.metadata.PackageNotFoundError:
        return False


def vision_options(source: Any, merge_unit: int = 4, unit: str = "one embedding") -> VisionGraphOptions:
    """Read and check the vision options of a model provider, a config object or a mapping of provider fields.

    Args:
        source: Object or mapping that may hold the fields of `PROVIDER_FIELDS`; absent ones take their default.
        merge_unit: Patches that belong together; capacities must be multiples of it.
        unit: What they are, for messages.

    Raises:
        OptionError: A value cannot work.
    """
    options = VisionGraphOptions(**VISION.read(source))
    if options.enabled:
        _check_capacities(options, merge_unit, unit)
    return options


def audio_options(options: VisionGraphOptions) -> VisionGraphOptions:
    """Return options for the audio encoder of a model: those that name sizes of images are left out."""
    return replace(options, buckets="auto", max_seq_length=None, max_frames="auto", exact_below=0)


def _check_capacities(options: VisionGraphOptions, merge_unit: int, unit: str) -> None:
    field, multiples = PROVIDER_FIELDS["buckets"], f"{merge_unit}, the patches of {unit}"
    longest, longest_field = options.max_seq_length, PROVIDER_FIELDS["max_seq_length"]
    most = max(longest or 0, 0 if options.buckets == "auto" else options.buckets[-1])
    if most > MOST_TOKENS:
        field = longest_field if most == longest else field
        raise OptionError(field, most, f"at most {MOST_TOKENS}", _OFFSETS)
    if longest is not None and (longest < merge_unit or longest % merge_unit):
        raise OptionError(longest_field, longest, f"a multiple of {multiples}", "Round it up.")
    if options.buckets == "auto":
        return
    for capacity in options.buckets:
        if capacity < merge_unit or capacity % merge_unit:
            raise OptionError(field, capacity, f"a multiple of {multiples}", "Round it up.")
    if longest is not None and options.buckets[-1] > longest:
        raise OptionError(
            field, options.buckets[-1], f"at most {longest_field}={longest}", "Raise that field or drop the bucket."
        )
