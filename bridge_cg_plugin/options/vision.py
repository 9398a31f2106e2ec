"""Options of the vision encoder and its graphs: their fields on a model provider, defaults and validation."""

from dataclasses import dataclass
from typing import Any, Literal

from .activations import (
    check_region,
    moves_activations,
    offload_above_option,
    offload_host_option,
    offload_min_bytes_option,
    offload_option,
    recompute_option,
)
from .capture import capture_option
from .declaration import Group, getter, option
from .errors import OptionError
from .values import (
    Parser,
    capacities,
    factor,
    flag,
    one_of,
    parse_choice,
    part_or_auto,
    positive_number,
    whole_number,
    words,
)

MODULES = ("attn", "mlp")
CHECK_ACTIONS = ("warn", "stop")
STREAMS = ("auto", "1", "2")
# Offsets of frames are 32-bit integers.
MOST_TOKENS = 2**31 - 1
_OFFSETS = "Offsets of tokens are 32-bit integers."
# Upstream's name of the modules field, copied from the days when modules were called scope. Accepted everywhere.
SCOPE_FIELD = "vision_cuda_graph_scope"


def _parse_modules(field: str, value: Any) -> tuple[str, ...]:
    names = tuple(name for name in words(value) if name != "full")
    for name in names:
        if name not in MODULES:
            raise OptionError(field, value, _MODULES.allowed, f"Remove {name!r}.")
    return names


_MODULES = Parser("attn, mlp, both, or empty for the whole encoder", _parse_modules)


def _parse_streams(field: str, value: Any) -> Any:
    name = parse_choice(field, value, STREAMS)
    return name if name == "auto" else int(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionGraphOptions:
    """Options of the vision encoder, nearly all of its CUDA graphs, typed. What each means is in its declaration."""

    impl: Literal["none", "transformer_engine"] = option(
        "none",
        one_of(("none", "transformer_engine"), "Upstream's other implementations have no vision graphs."),
        "IMPL",
        "vision-encoder graphs: none or transformer_engine",
        "The second is upstream's name for graphs that the train loop's helper captures",
    )
    modules: tuple[str, ...] = option(
        (),
        _MODULES,
        "LIST",
        "attn or mlp: that part of every layer; [] is the whole encoder",
        f"Empty or both: the whole encoder is one region. None: what upstream's deprecated `{SCOPE_FIELD}` says",
        old=(SCOPE_FIELD, "deprecated: write --vision_cuda_graph_modules"),
        feature="vision graphs of parts of layers",
        without=((), MODULES, MODULES[::-1]),
    )
    buckets: tuple[int, ...] | Literal["auto"] = option(
        "auto",
        capacities,
        "LIST",
        "capacities in tokens, ascending, or auto",
        "`auto` chooses them from what warm-up steps saw. With a list, `max_vision_cuda_graph_seq_length` is added to "
        "it if it is set",
    )
    headroom: float = option(
        1.25,
        factor,
        "FACTOR",
        "how far automatic buckets reach beyond the largest microbatch of warm-up steps",
        "Used without `max_vision_cuda_graph_seq_length`, not with `capture_mode=on_demand`. Graphs end at that "
        "microbatch instead, with one line in the log, where warm-up steps have left no memory for more",
        tuning=True,
    )
    max_seq_length: int | None = option(
        None,
        whole_number(1),
        "TOKENS",
        "tokens of the largest bucket",
        "Tokens are patches, before merging. None takes the largest microbatch that warm-up steps saw, times the "
        "headroom, rounded up",
        field="max_vision_cuda_graph_seq_length",
    )
    slots: int | Literal["auto"] = option(
        "auto",
        whole_number(1, "auto"),
        "N",
        "microbatches between forward and backward at once, or auto",
        "`auto` is the pipeline's depth, twice that when interleaved, never more than the microbatches of a step",
        tuning=True,
    )
    max_frames: int | Literal["auto"] = option(
        "auto",
        whole_number(1, "auto"),
        "N",
        "most images and video frames of one microbatch, or auto",
        "`auto` is 64, or twice what warm-up steps saw if that is more, rounded up to 16",
        tuning=True,
    )
    buckets_max_gb: float | None = option(
        None,
        positive_number,
        "GIB",
        "limit of one slot's graph memory",
        "Automatic buckets plan for it: what a token takes is measured before capture, and a fifth of the limit is "
        "kept as margin. No effect without a GPU or in deterministic mode",
    )
    capture_mode: Literal["at_once", "on_demand"] = capture_option()
    exact_below: int = option(
        256,
        whole_number(0),
        "TOKENS",
        "up to here only graphs of exactly the microbatch's size",
        "Below it matrix libraries choose kernels by the number of rows, so padding would change eager's rounding. "
        "Other sizes run eager; 0 pads them as any other",
        tuning=True,
    )
    kernels: Literal["auto", "exact", "fast"] = option(
        "auto",
        one_of(("auto", "exact", "fast")),
        "KIND",
        "which kernels replace eager's",
        "`exact` replaces eager's kernels only by ones that round as they do; `fast` also by ones that add up a row in "
        "another order (LayerNorm's backward, with the residual's gradient in it; the patch embedding's weight "
        "gradient): gradients then differ from eager's by rounding even where eager repeats itself. Outputs are equal "
        "in all. `auto` is `exact` under deterministic algorithms (`NVTE_ALLOW_NONDETERMINISTIC_ALGO=0` or PyTorch's), "
        "`fast` otherwise",
        feature="fast kernels",
        without=("exact",),
        tuning=True,
    )
    attention: Literal["auto", "transformer_engine", "cudnn", "flash"] = option(
        "auto",
        one_of(("auto", "transformer_engine", "cudnn", "flash")),
        "KIND",
        "what calls cuDNN's attention over several frames",
        "Transformer Engine, or the plugin itself through NVIDIA's "
        "package `nvidia-cudnn-frontend` (1.29 or newer; Transformer Engine 2.20 depends on it), with the bucket's own "
        "number and size of frames ([design](design.md#attention)). The kernels and outputs are the same. `auto` is "
        "`cudnn` where that is possible. Without the package, without a GPU, under deterministic algorithms "
        "(`NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`) or where eager does not attend by cuDNN's kernels "
        "(`NVTE_FUSED_ATTN=0`, `attention_backend`; read at each capture, later changes have no effect on recordings) "
        "it is `transformer_engine`; `cudnn` is so too, with a line in the log. `flash` is as `auto`, but frames in "
        "buckets for frames of 640 tokens and more attend by FlashAttention's kernels (package `flash-attn-4`, "
        "`requirements/flash.txt`; Hopper GPUs), which are faster and round otherwise than eager's: outputs are as "
        "near to fp32 as eager's, not equal to the bit",
        tuning=True,
    )
    streams: Literal["auto", 1, 2] = option(
        "auto",
        Parser(" or ".join(STREAMS), _parse_streams),
        "N",
        "streams that a graph's kernels are on",
        "With 2, weight gradients and what else no later kernel waits for run beside the others "
        "([design](design.md#side-work)). `auto` is 2 for buckets of up to 4096 tokens whose activations stay on the "
        "device, 1 for all others. Outputs and gradients are the same",
        feature="two streams",
        without=(1,),
        tuning=True,
    )
    gradient_accumulation_fusion: bool = option(
        True,
        flag,
        "BOOL",
        "weight gradients are added to main_grad inside the GEMM",
        "In fp32; else they are first rounded to the weight's dtype, as eager does without Megatron's option of this "
        "name",
        tuning=True,
    )
    gradient_hooks: Literal["awaited", "always"] = option(
        "awaited",
        one_of(("awaited", "always")),
        "WHEN",
        "who gets to know that a gradient is in `main_grad`",
        "Data parallelism's reduction alone, in the microbatches "
        "whose gradients it waits for, or autograd in all of them, so that hooks fire. Hooks that you put on a "
        "parameter fire always; those on its `AccumulateGrad` node need `always`",
        tuning=True,
    )
    cost_fallback: bool = option(
        True,
        flag,
        "BOOL",
        "a microbatch runs eager where that was measured to be faster than its replay",
        "Training only ([design](design.md#measured-costs)). Whole encoder only; never under deterministic algorithms "
        "or tensor parallelism, where runs and ranks must decide alike",
        tuning=True,
    )
    balance: float | Literal["auto"] | None = option(
        None,
        part_or_auto,
        "PART",
        "images move between data-parallel ranks where that saves this part of the largest's, or time (auto)",
        "They are encoded there, in each microbatch in which that takes at least this part off the rank that has the "
        "most patches; `auto`: in which that saves more time than it takes, as measured in the run "
        "([balance](parallel.md#images-of-other-ranks)). None moves nothing",
    )
    offload: tuple[str, ...] | None = offload_option(
        "Host memory is page-locked; activations go there inside the forward's graph and come back inside the "
        "backward's ([offloading](offload.md)). `layernorm` are inputs and outputs of the layers' norms. None is "
        "nothing, or anything under `vision_cuda_graph_offload_above_gb`"
    )
    recompute: tuple[str, ...] | None = recompute_option(
        "Outputs of norms, of GELU, and of the projection to queries, keys and values and the MLP's first layer. What "
        "a kernel does not give back to the bit is kept. None as above"
    )
    offload_above_gb: float | None = offload_above_option(
        "The mix is chosen from measured costs; the two options above then say what it may use. None does all that "
        "they say"
    )
    offload_min_bytes: int = offload_min_bytes_option()
    offload_host_max_gb: float | None = offload_host_option()
    evaluation: bool = option(
        True, flag, "BOOL", "evaluation runs on graphs too", "These are forward-only graphs", tuning=True
    )
    strict: bool = option(False, flag, "BOOL", "a failed capture stops the run", "Else the run goes on eager")
    check_interval: int = option(
        0,
        whole_number(0),
        "STEPS",
        "every how many steps a microbatch is also run eager and compared; 0 is never",
    )
    check_tolerance: float = option(
        0.05,
        positive_number,
        "X",
        "largest relative difference that the check accepts",
        "In the L2 norm, of outputs and of any parameter's gradient",
        tuning=True,
    )
    check_action: Literal["warn", "stop"] = option(
        "warn",
        one_of(CHECK_ACTIONS),
        "ACTION",
        "when the check fails: warn or stop",
        tuning=True,
    )
    deepstack_gradient_allreduce: bool = option(
        False,
        flag,
        "BOOL",
        "under sequence parallelism, gradients of deepstack features are summed over the tensor-parallel ranks",
        "Qwen3-VL's, eager and on graphs; upstream leaves them partial "
        "([sequence parallelism and deepstack](parallel.md#sequence-parallelism-and-deepstack)). It needs no graphs, "
        "and has no effect without sequence parallelism or on a model without deepstack",
        field="vision_deepstack_gradient_allreduce",
    )

    @property
    def enabled(self) -> bool:
        """Whether vision graphs are asked for."""
        return self.impl != "none"

    @property
    def whole_encoder(self) -> bool:
        """Whether the encoder is one region."""
        return not self.modules or set(self.modules) == set(MODULES)

    @property
    def moves_activations(self) -> bool:
        """Whether activations are offloaded or recomputed."""
        return moves_activations(self)


# Options that have an effect without graphs too.
WITHOUT_GRAPHS = ("deepstack_gradient_allreduce",)
VISION = Group(
    name="vision", kind=VisionGraphOptions, prefix="vision_cuda_graph_", owners="a model of the Qwen3-VL family"
)
# Option -> field of a model provider. `impl` and `max_seq_length` are upstream's own.
PROVIDER_FIELDS = VISION.fields


def vision_options(source: Any, merge_unit: int = 4, unit: str = "one embedding") -> VisionGraphOptions:
    """Read and check the vision options of a model provider, a config object or a mapping of provider fields.

    Args:
        source: Object or mapping that may hold the fields of `PROVIDER_FIELDS`; absent ones take their default.
        merge_unit: Patches that belong together; capacities must be multiples of it.
        unit: What they are, for messages.

    Raises:
        OptionError: A value cannot work.
    """
    parsed = VISION.read(source)
    scope = _parse_modules(SCOPE_FIELD, getter(source)(SCOPE_FIELD))
    modules = parsed.setdefault("modules", scope)
    if scope and set(scope) != set(modules):
        beside = f"left out beside {PROVIDER_FIELDS['modules']}={list(modules)}"
        raise OptionError(SCOPE_FIELD, list(scope), beside, f"Remove {SCOPE_FIELD}.")
    options = VisionGraphOptions(**parsed)
    if options.enabled:
        _check_capacities(options, merge_unit, unit)
        check_region(options, options.whole_encoder, PROVIDER_FIELDS, options.modules)
    return options


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
