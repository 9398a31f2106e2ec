"""How ranks share packs, as plans of packed documents and their options write it."""

import math
import re
from dataclasses import dataclass
from typing import Any

from .errors import OptionError

_WRITTEN = re.compile(r"TP(\d+)xCP(\d+)(xSP)?", re.IGNORECASE)
_ALLOWED = "TP1xCP1, or another layout: TP and CP with their ranks, xSP for sequence parallelism"


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Ranks that share packs.

    Attributes:
        tensor: Ranks of tensor parallelism.
        context: Ranks of context parallelism.
        sequence: Whether tensor-parallel ranks hold a part of the tokens each.
    """

    tensor: int = 1
    context: int = 1
    sequence: bool = False

    @property
    def shards(self) -> int:
        """Ranks that hold a part of the tokens each."""
        return self.tensor if self.sequence else 1

    @property
    def document_unit(self) -> int:
        """What a document's tokens, with its padding, are a multiple of."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def unit(self) -> int:
        """What a bucket's tokens are a multiple of, so that every rank has as many."""
        return math.lcm(self.shards * self.context, self.document_unit)

    def __str__(self) -> str:
        return f"TP{self.tensor}xCP{self.context}{'xSP' if self.sequence and self.tensor > 1 else ''}"


def parse_layout(field: str, value: Any) -> RankLayout:
    """Return a layout from its text.

    Raises:
        OptionError: It is none.
    """
    found = _WRITTEN.fullmatch(str(value).strip())
    if found is None or "0" in (found[1].lstrip("0") or "0", found[2].lstrip("0") or "0"):
        raise OptionError(field, value, _ALLOWED, "Correct it.")
    return RankLayout(int(found[1]), int(found[2]), found[3] is not None)
