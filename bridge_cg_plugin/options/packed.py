"""Options of packed (thd) sequences in language-model graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from .activations import PARSERS as ACTIVATION_PARSERS
from .activations import moves_activations
from .errors import OptionError
from .values import is_unset, parse_capacities, parse_flag, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOptions:
    """Packed-sequence graphs, typed.

    Attributes:
        max_packed_seqs: Documents of one pack that a graph takes; None is no packed-sequence graphs.
        buckets: Capacities in tokens, ascending, or "auto": chosen from what warm-up steps saw.
        max_seqlen: Tokens of the longest document that a graph takes; None is all that a bucket holds.
        slots: Microbatches between forward and backward at once, or "auto": the pipeline's depth.
        offload, recompute, memory_target_gb, offload_min_bytes, offload_host_gb: As in `VisionGraphOptions`, where all
            layers are one region.
        evaluation: Whether evaluation runs on forward-only graphs.
        strict: Whether a failed capture stops the run instead of going on eager.
    """

    max_packed_seqs: int | None = None
    buckets: tuple[int, ...] | Literal["auto"] = "auto"
    max_seqlen: int | None = None
    slots: int | Literal["auto"] = "auto"
    offload: tuple[str, ...] | None = None
    recompute: tuple[str, ...] | None = None
    memory_target_gb: float | None = None
    offload_min_bytes: int = 1 << 20
    offload_host_gb: float | None = None
    evaluation: bool = True
    strict: bool = False

    @property
    def enabled(self) -> bool:
        """Whether packed-sequence graphs are asked for."""
        return self.max_packed_seqs is not None

    @property
    def moves_activations(self) -> bool:
        """Whether activations are offloaded or made again."""
        return moves_activations(self)


# Option -> field of a model provider. The first keeps the name that the field has in upstream's later work.
PACKED_FIELDS: dict[str, str] = {
    "max_packed_seqs": "cuda_graph_max_packed_seqs",
    **{f.name: f"cuda_graph_packed_{f.name}" for f in fields(PackedOptions) if f.name != "max_packed_seqs"},
}
MAX_PACKED_SEQS = PACKED_FIELDS["max_packed_seqs"]

_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "max_packed_seqs": whole_number(1),
    "buckets": parse_capacities,
    "max_seqlen": whole_number(1),
    "slots": whole_number(1, "auto"),
    **ACTIVATION_PARSERS,
    "evaluation": parse_flag,
    "strict": parse_flag,
}


def packed_options(source: Any) -> PackedOptions:
    """Return the options that a mapping of fields, or an object that has them, says; absent ones take their default.

    Raises:
        OptionError: A value cannot work.
    """
    get: Callable[[str], Any] = source.get if isinstance(source, Mapping) else lambda name: getattr(source, name, None)
    given = {option: get(field) for option, field in PACKED_FIELDS.items()}
    options = PackedOptions(
        **{
            option: _PARSERS[option](PACKED_FIELDS[option], value)
            for option, value in given.items()
            if not is_unset(value)
        }
    )
    if options.buckets != "auto" and options.buckets[0] < 1:
        raise OptionError(PACKED_FIELDS["buckets"], options.buckets[0], "token counts of at least 1", "Correct it.")
    return options
