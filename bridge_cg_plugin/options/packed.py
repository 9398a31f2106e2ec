"""Options of packed (thd) sequences in language-model graphs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .values import is_unset, whole_number

MAX_PACKED_SEQS = "cuda_graph_max_packed_seqs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOptions:
    """Packed-sequence graphs, typed.

    Attributes:
        max_packed_seqs: Sequences of one pack that a graph takes; None is no packed-sequence graphs.
    """

    max_packed_seqs: int | None = None

    @property
    def enabled(self) -> bool:
        """Whether packed-sequence graphs are asked for."""
        return self.max_packed_seqs is not None


def packed_options(fields: Mapping[str, Any]) -> PackedOptions:
    """Return the options that a mapping of fields says.

    Raises:
        OptionError: A value cannot work.
    """
    value = fields.get(MAX_PACKED_SEQS)
    if is_unset(value):
        return PackedOptions()
    return PackedOptions(max_packed_seqs=whole_number(1)(MAX_PACKED_SEQS, value))
