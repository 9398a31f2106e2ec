"""Graph options as flags of any command line, in the spelling of Bridge's performance scripts. Needs argparse only."""

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import offload as offloading
from .activations import OFFLOAD_MODULES, RECOMPUTE
from .errors import OptionError
from .language_model import IMPL, INFERENCE, MODULES, SCOPE
from .offload import CORE_FIELDS, SHARED_FIELDS
from .packed import PACKED_FIELDS
from .values import words
from .vision import PROVIDER_FIELDS, SCOPE_FIELD

OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag.

    Attributes:
        name: Its name with underscores and without dashes in front; also the attribute of the parsed arguments.
        field: The field that it sets.
        value: What it takes, for the help.
        meaning: What it says, for the help.
        aliases: Further names.
    """

    name: str
    field: str
    value: str
    meaning: str
    aliases: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling, with underscores and with dashes."""
        names = (self.name, *self.aliases)
        return tuple(dict.fromkeys(f"--{name}" for n in names for name in (n, n.replace("_", "-"))))


def _vision(option: str, value: str, meaning: str) -> Flag:
    field = PROVIDER_FIELDS[option]
    return Flag(name=field, field=field, value=value, meaning=meaning)


def _packed(option: str, value: str, meaning: str) -> Flag:
    field = PACKED_FIELDS[option]
    return Flag(name=field, field=field, value=value, meaning=meaning)


def _activations(flag: Callable[[str, str, str], Flag]) -> tuple[Flag, ...]:
    """Return the flags of regions whose activations leave the device."""
    return (
        flag("offload", "LIST", f"parts whose activations go to the host: {', '.join(OFFLOAD_MODULES)}; all or none"),
        flag("recompute", "LIST", f"what the backward makes again: {', '.join(RECOMPUTE)}; all or none"),
        flag("memory_target_gb", "GIB", "device memory of a slot that a mix of offloading and recompute keeps to"),
        flag("offload_min_bytes", "BYTES", "smallest activation that is offloaded or made again"),
        flag("offload_host_gb", "GIB", "most page-locked host memory of a process"),
    )


def _offload(option: str, value: str, meaning: str) -> Flag:
    return Flag(name=f"{OFFLOAD}_{option}", field=CORE_FIELDS[option], value=value, meaning=meaning)


FLAGS = (
    Flag(
        name=IMPL,
        field=IMPL,
        value="IMPL",
        meaning="language-model graphs: none, local, transformer_engine or full_iteration",
    ),
    Flag(
        name=MODULES,
        field=MODULES,
        value="LIST",
        meaning="parts of a layer to capture: attn, mlp, moe, moe_router, moe_preprocess, mamba; [] is the whole layer",
    ),
    Flag(name=SCOPE, field=SCOPE, value="LIST", meaning=f"deprecated: write --{MODULES}, or --{IMPL} full_iteration"),
    Flag(name=INFERENCE, field=INFERENCE, value="SCOPE", meaning="inference graphs: none, layer or block"),
    _vision("impl", "IMPL", "vision-encoder graphs: none or transformer_engine"),
    _vision("modules", "LIST", "attn or mlp: that part of every layer; [] is the whole encoder"),
    Flag(
        name=SCOPE_FIELD,
        field=SCOPE_FIELD,
        value="LIST",
        meaning=f"deprecated: write --{PROVIDER_FIELDS['modules']}",
    ),
    _vision("buckets", "LIST", "capacities in tokens, ascending, or auto"),
    _vision("headroom", "FACTOR", "how far automatic buckets reach beyond the largest microbatch of warm-up steps"),
    _vision("max_seq_length", "TOKENS", "tokens of the largest bucket"),
    _vision("slots", "N", "microbatches between forward and backward at once, or auto"),
    _vision("max_frames", "N", "most images and video frames of one microbatch, or auto"),
    _vision("memory_gb", "GIB", "limit of one slot's graph memory"),
    _vision("exact_below", "TOKENS", "up to here only graphs of exactly the microbatch's size"),
    _vision("kernels", "KIND", "auto, exact or fast"),
    _vision("attention", "KIND", "auto, transformer_engine, cudnn or flash"),
    _vision("streams", "N", "streams that a graph's kernels are on: auto, 1 or 2"),
    _vision("gradient_accumulation_fusion", "BOOL", "weight gradients are added to main_grad inside the GEMM"),
    _vision(
        "gradient_hooks", "WHEN", "gradient hooks fire always, or data parallelism is told where it waits (awaited)"
    ),
    _vision("cost_fallback", "BOOL", "a microbatch runs eager where that was measured to be faster than its replay"),
    _vision(
        "balance",
        "PART",
        "images move between data-parallel ranks where that saves this part of the largest's, or time (auto)",
    ),
    *_activations(_vision),
    _vision("evaluation", "BOOL", "evaluation runs on graphs too"),
    _vision("strict", "BOOL", "a failed capture stops the run"),
    _vision("check_interval", "STEPS", "every how many steps a microbatch is also run eager and compared; 0 is never"),
    _vision("check_tolerance", "X", "largest relative difference that the check accepts"),
    _vision("check_action", "ACTION", "when the check fails: warn or stop"),
    _vision(
        "deepstack_gradient_allreduce",
        "BOOL",
        "under sequence parallelism, gradients of deepstack features are summed over the tensor-parallel ranks",
    ),
    Flag(
        name="max_packed_seqs",
        field=PACKED_FIELDS["max_packed_seqs"],
        value="N",
        meaning="graphs of packed sequences, of up to this many documents",
        aliases=(PACKED_FIELDS["max_packed_seqs"],),
    ),
    _packed("buckets", "LIST", "capacities in tokens of packs, ascending, or auto"),
    _packed("max_seqlen", "TOKENS", "tokens of the longest document that a graph takes"),
    _packed("slots", "N", "packs between forward and backward at once, or auto"),
    *_activations(_packed),
    _packed("evaluation", "BOOL", "evaluation of packs runs on graphs too"),
    _packed("strict", "BOOL", "a failed capture of packed-sequence graphs stops the run"),
    Flag(
        name=SHARED_FIELDS["parts"],
        field=SHARED_FIELDS["parts"],
        value="LIST",
        meaning=f"parts whose activations go to the host, of encoder and language model: {', '.join(OFFLOAD_MODULES)}; "
        "all or none",
    ),
    Flag(
        name=SHARED_FIELDS["min_bytes"],
        field=SHARED_FIELDS["min_bytes"],
        value="BYTES",
        meaning=f"smallest activation that --{SHARED_FIELDS['parts']} sends there",
    ),
    Flag(
        name=OFFLOAD,
        field=CORE_FIELDS["modules"],
        value="LIST",
        meaning=f"offload inputs of parts of the language model's layers: {', '.join(offloading.MODULES)}; none is off",
    ),
    _offload("min_tensor_size", "ELEMENTS", "smallest tensor that is offloaded"),
    _offload("delay_until_cuda_graph", "BOOL", "offloading waits for the graph's replay"),
    _offload("delta_bytes_across_pp_ranks", "BYTES", "how much less each pipeline stage offloads than the one before"),
    _offload("fraction", "X", "part of the eligible groups that is offloaded, 0 to 1"),
    _offload("max_inflight", "N", "offloads of one group that nobody waited for yet"),
)


def add_flags(parser: argparse.ArgumentParser, replace: bool = False) -> None:
    """Add every flag, in both spellings, to a parser. A flag that was not given is None.

    Args:
        parser: Any parser.
        replace: Whether a flag that the parser has already gives way.

    Raises:
        argparse.ArgumentError: The parser has one of these flags already, and `replace` is false.
    """
    before = parser.conflict_handler
    parser.conflict_handler = "resolve" if replace else before
    group = parser.add_argument_group("CUDA graphs")
    for flag in FLAGS:
        group.add_argument(*flag.spellings, dest=flag.name, metavar=flag.value, help=flag.meaning)
    parser.conflict_handler = before


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that parsed arguments set, as they were written."""
    found: dict[str, Any] = {}
    for flag in FLAGS:
        value = getattr(arguments, flag.name, None)
        if value is not None:
            found.update(_offload_fields(value) if flag.name == OFFLOAD else {flag.field: value})
    return found


def take_flags(tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a command line's flags set, and the tokens that are none of these flags.

    Raises:
        OptionError: A flag has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    try:
        arguments, rest = parser.parse_known_args(list(tokens))
    except argparse.ArgumentError as error:
        raise OptionError(
            str(error.argument_name), " ".join(tokens), "a flag and its value", f"{error.message}."
        ) from None
    return given_flags(arguments), rest


def clear_flags(arguments: argparse.Namespace, names: Iterable[str]) -> argparse.Namespace:
    """Return a copy of parsed arguments in which the named ones were not given."""
    return argparse.Namespace(**{**vars(arguments), **dict.fromkeys(names)})


def unknown_flag(token: str, known: Iterable[str]) -> OptionError:
    """Return the error for a token that looks like a flag and is none, with the nearest one."""
    name, _, value = token.partition("=")
    near = difflib.get_close_matches(name.replace("-", "_"), [k.replace("-", "_") for k in known], n=1)
    allowed = f"--{near[0].lstrip('_')}" if near else "a flag of --help"
    return OptionError(name, value, allowed, "There is no such flag.")


def _offload_fields(value: Any) -> Mapping[str, Any]:
    off = words(value) in ((), ("none",))
    return {CORE_FIELDS["enabled"]: not off, CORE_FIELDS["modules"]: [] if off else value}
