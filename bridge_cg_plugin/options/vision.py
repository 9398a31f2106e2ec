"""Options of the vision encoder and its graphs: their fields on a model provider, defaults and validation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from .activations import PARSERS as ACTIVATION_PARSERS
from .activations import check_region, moves_activations
from .errors import OptionError
from .values import (
    factor,
    is_unset,
    parse_capacities,
    parse_choice,
    parse_flag,
    part_or_auto,
    positive_number,
    whole_number,
    words,
)

IMPLEMENTATIONS = ("none", "transformer_engine")
MODULES = ("attn", "mlp")
CHECK_ACTIONS = ("warn", "stop")
KERNELS = ("auto", "exact", "fast")
ATTENTION = ("auto", "transformer_engine", "cudnn", "flash")
GRADIENT_HOOKS = ("awaited", "always")
STREAMS = ("auto", "1", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionGraphOptions:
    """Options of the vision encoder, nearly all of its CUDA graphs, typed and checked.

    Attributes:
        impl: "none" or "transformer_engine" (upstream's name for "captured by the helper that the train loop drives").
        modules: () for the whole encoder as one region, or ("attn",) or ("mlp",) for that part of every layer.
        max_seq_length: Tokens (patches) of the largest bucket; None takes what warm-up steps saw, times `headroom`.
        buckets: Capacities in tokens, ascending, or "auto": chosen from what warm-up steps saw.
        headroom: Without `max_seq_length`, how far automatic buckets reach beyond the largest microbatch that warm-up
            steps saw, as a factor, where memory allows it.
        slots: Microbatches between forward and backward at once, or "auto": the pipeline's depth.
        max_frames: Most images and video frames in one microbatch that a graph takes, or "auto".
        memory_gb: Upper limit of a slot's graph memory in GiB that `buckets="auto"` plans for; None is no limit.
        exact_below: Microbatches of up to this many tokens use a graph of exactly their size or none. Below it matrix
            libraries choose kernels by the number of rows, so padding would change eager's rounding; 0 pads them too.
        kernels: "exact" replaces eager's kernels only by ones that round as they do; "fast" also by ones that add up a
            row in another order: gradients then differ from eager's by rounding even where eager repeats itself.
            "auto" is "exact" where deterministic algorithms are asked for, "fast" otherwise. Outputs are equal in all.
        attention: What calls cuDNN's attention over several frames: "transformer_engine", or "cudnn" for the plugin
            itself through the package nvidia-cudnn-frontend, with the bucket's own frame count and frame size. "auto"
            is "cudnn" where that is possible. "flash" is the same, but for frames of hundreds of tokens and more
            FlashAttention's kernels of the package flash-attn-4, faster ones that round otherwise than eager's.
        streams: Streams that a graph's kernels are on: 2 takes weight gradients and what else no later kernel waits for
            off the chain of the others; "auto" is 2 for buckets whose kernels leave much of the GPU idle, where
            activations stay in the graph's memory. Outputs and gradients are the same.
        gradient_accumulation_fusion: Whether weight gradients are added to `main_grad` inside the GEMM, in fp32; else
            they are first rounded to the weight's dtype, as eager does without Megatron's option of this name.
        gradient_hooks: Who gets to know that a parameter's gradient is in `main_grad`: "awaited" is data parallelism's
            reduction alone, in the microbatches whose gradients it waits for, "always" is autograd in all of them, so
            that hooks fire. Hooks that a user puts on a parameter fire always; those on its node of the autograd graph
            need "always".
        cost_fallback: Whether a training microbatch runs eager where that was measured to be faster than its bucket's
            replay. Never under deterministic algorithms or tensor parallelism, where ranks and runs must decide alike.
        balance: Part of the patches of the rank that has the most which moving images to other data-parallel ranks
            must save for them to move, in each microbatch; "auto" moves them where that saves more time than it takes,
            both as measured in the run; None moves nothing.
        offload: Parts of the encoder whose activations go to page-locked host memory inside the forward's graph and
            come back inside the backward's; None is none of them, or any of them under `memory_target_gb`.
        recompute: What the backward's graph makes again instead of keeping it: outputs of LayerNorm, of GELU, of linear
            layers (queries, keys and values, and the MLP's first layer); None as for `offload`.
        memory_target_gb: Device memory of one slot in GiB that a mix of both, chosen from measured costs, keeps to;
            `offload` and `recompute` then say what it may use. None does all that they say.
        offload_min_bytes: Smallest activation that is offloaded or made again.
        offload_host_gb: Most page-locked host memory of a process in GiB; None is its share of what the host has.
        evaluation: Whether evaluation runs on forward-only graphs.
        strict: Whether a failed capture stops the run instead of going on eager.
        check_interval: Every how many steps a microbatch is also run eager and compared; 0 is never.
        check_tolerance: Largest relative L2 difference the check accepts, of outputs and of any gradient.
        check_action: "warn" or "stop" when the check fails.
        deepstack_gradient_allreduce: Whether the gradients of Qwen3-VL's deepstack features are summed over the
            tensor-parallel ranks under sequence parallelism, eager and on graphs. Upstream leaves them partial.
    """

    impl: Literal["none", "transformer_engine"] = "none"
    modules: tuple[str, ...] = ()
    max_seq_length: int | None = None
    buckets: tuple[int, ...] | Literal["auto"] = "auto"
    headroom: float = 1.25
    slots: int | Literal["auto"] = "auto"
    max_frames: int | Literal["auto"] = "auto"
    memory_gb: float | None = None
    exact_below: int = 256
    kernels: Literal["auto", "exact", "fast"] = "auto"
    attention: Literal["auto", "transformer_engine", "cudnn", "flash"] = "auto"
    streams: Literal["auto", 1, 2] = "auto"
    gradient_accumulation_fusion: bool = True
    gradient_hooks: Literal["awaited", "always"] = "awaited"
    cost_fallback: bool = True
    balance: float | Literal["auto"] | None = None
    offload: tuple[str, ...] | None = None
    recompute: tuple[str, ...] | None = None
    memory_target_gb: float | None = None
    offload_min_bytes: int = 1 << 20
    offload_host_gb: float | None = None
    evaluation: bool = True
    strict: bool = False
    check_interval: int = 0
    check_tolerance: float = 0.05
    check_action: Literal["warn", "stop"] = "warn"
    deepstack_gradient_allreduce: bool = False

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
        """Whether activations are offloaded or made again."""
        return moves_activations(self)


# Options that have an effect without graphs too.
WITHOUT_GRAPHS = ("deepstack_gradient_allreduce",)
# Option -> field of a model provider. The first and the third are upstream's own.
PROVIDER_FIELDS: dict[str, str] = {
    "impl": "vision_cuda_graph_impl",
    "modules": "vision_cuda_graph_modules",
    "max_seq_length": "max_vision_cuda_graph_seq_length",
    **{
        f.name: f"vision_cuda_graph_{f.name}"
        for f in fields(VisionGraphOptions)
        if f.name not in ("impl", "modules", "max_seq_length", *WITHOUT_GRAPHS)
    },
    **{name: f"vision_{name}" for name in WITHOUT_GRAPHS},
}

# Upstream's name of the modules field, copied from the days when modules were called scope. Accepted everywhere.
SCOPE_FIELD = "vision_cuda_graph_scope"


def vision_options(source: Any, merge_unit: int = 4, unit: str = "one embedding") -> VisionGraphOptions:
    """Read and check the vision options of a model provider, a config object or a mapping of provider fields.

    Args:
        source: Object or mapping that may hold the fields of `PROVIDER_FIELDS`; absent ones take their default.
        merge_unit: Patches that belong together; capacities must be multiples of it.
        unit: What they are, for messages.

    Raises:
        OptionError: A value cannot work.
    """
    get: Callable[[str], Any] = (
        (lambda name: source.get(name)) if isinstance(source, Mapping) else (lambda name: getattr(source, name, None))
    )
    given = {option: get(field) for option, field in PROVIDER_FIELDS.items()}
    parsed = {
        option: _PARSERS[option](PROVIDER_FIELDS[option], value)
        for option, value in given.items()
        if not is_unset(value)
    }
    scope = _parse_modules(SCOPE_FIELD, get(SCOPE_FIELD))
    modules = parsed.setdefault("modules", scope)
    if scope and set(scope) != set(modules):
        raise OptionError(
            SCOPE_FIELD, list(scope), f"{PROVIDER_FIELDS['modules']}={list(modules)} alone", f"Remove {SCOPE_FIELD}."
        )
    options = VisionGraphOptions(**parsed)
    if options.enabled:
        _check_capacities(options, merge_unit, unit)
        check_region(options, options.whole_encoder, PROVIDER_FIELDS, options.modules)
    return options


def _parse_impl(field: str, value: Any) -> str:
    return parse_choice(field, value, IMPLEMENTATIONS, "Upstream's other implementations have no vision graphs.")


def _parse_modules(field: str, value: Any) -> tuple[str, ...]:
    names = tuple(name for name in words(value) if name != "full")
    for name in names:
        if name not in MODULES:
            raise OptionError(field, value, "attn, mlp, both, or empty for the whole encoder", f"Remove {name!r}.")
    return names


def _parse_streams(field: str, value: Any) -> Any:
    name = parse_choice(field, value, STREAMS)
    return name if name == "auto" else int(name)


def _one_of(choices: Sequence[str]) -> Callable[[str, Any], str]:
    return lambda field, value: parse_choice(field, value, choices)


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "impl": _parse_impl,
    "modules": _parse_modules,
    "max_seq_length": whole_number(1),
    "buckets": parse_capacities,
    "headroom": factor,
    "slots": whole_number(1, "auto"),
    "max_frames": whole_number(1, "auto"),
    "memory_gb": positive_number,
    "exact_below": whole_number(0),
    "kernels": _one_of(KERNELS),
    "attention": _one_of(ATTENTION),
    "streams": _parse_streams,
    "gradient_accumulation_fusion": parse_flag,
    "gradient_hooks": _one_of(GRADIENT_HOOKS),
    "cost_fallback": parse_flag,
    "balance": part_or_auto,
    **ACTIVATION_PARSERS,
    "evaluation": parse_flag,
    "strict": parse_flag,
    "check_interval": whole_number(0),
    "check_tolerance": positive_number,
    "check_action": _one_of(CHECK_ACTIONS),
    "deepstack_gradient_allreduce": parse_flag,
}


def _check_capacities(options: VisionGraphOptions, merge_unit: int, unit: str) -> None:
    field, multiples = PROVIDER_FIELDS["buckets"], f"{merge_unit}, the patches of {unit}"
    longest, longest_field = options.max_seq_length, PROVIDER_FIELDS["max_seq_length"]
    if longest is not None and (longest < merge_unit or longest % merge_unit):
        raise OptionError(longest_field, longest, f"a multiple of {multiples}", "Round it up.")
    if options.buckets == "auto":
        return
    for capacity in options.buckets:
        if capacity < merge_unit or capacity % merge_unit:
            raise OptionError(field, capacity, f"multiples of {multiples}", "Round it up.")
    if longest is not None and options.buckets[-1] > longest:
        raise OptionError(
            field, options.buckets[-1], f"at most {longest_field}={longest}", "Raise that field or drop the bucket."
        )
