"""Which packs a decoder is captured for: what warm-up steps showed and what options say."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...attention_bounds import replay_cost
from ...graphs.planning.buckets import EXACT_BELOW, Bucket, raised
from ...graphs.planning.demand import Menu
from ...options import PACKED_FIELDS, OptionError, PackedOptions
from .batch import JointShape, PackedBatch, PackShape
from .fit import pack_buckets
from .program import DecoderFamily, PackedProgram

# What all packs of a recording share: which offsets they have, width of angles, width and type of hidden states.
Kind = tuple[tuple[str, ...], int, int, torch.dtype]


@dataclass(frozen=True, slots=True)
class Observed:
    """What a warm-up step's pack looked like."""

    shape: PackShape | JointShape
    width: int
    dtype: torch.dtype

    @property
    def documents(self) -> int:
        """Documents, of the rank that has most."""
        return most_documents([self.shape])

    @property
    def kind(self) -> Kind:
        """What all packs of a recording share."""
        first = self.shape.each[0]
        return first.layout, first.rotated, self.width, self.dtype


def most_documents(shapes: Iterable[PackShape | JointShape]) -> int:
    """Return the documents of the pack that has most, of the rank that has most; 0 without packs."""
    return max((len(each.lengths) for shape in shapes for each in shape.each), default=0)


class PackPlan:
    """Observes a decoder's packs and plans buckets for them.

    Args:
        options: What the user asked for.
        family: The decoder's upstream side.

    Attributes:
        observed: What was seen.

    Raises:
        OptionError: A bucket that the options name cannot be shared by the ranks.
    """

    def __init__(self, options: PackedOptions, family: DecoderFamily) -> None:
        self._options, self._family = options, family
        self.observed: list[Observed] = []
        self._check_buckets()

    def observe(self, batch: PackedBatch) -> None:
        """Take a pack of the warm-up steps into account."""
        self.observed.append(Observed(batch.shape, batch.hidden.shape[-1], batch.hidden.dtype))

    def buckets(self) -> list[Bucket]:
        """Return the buckets of the capacities that the options name."""
        return [bucket for capacity in self._options.named_buckets for bucket in self._buckets_of(capacity)]

    def _buckets_of(self, capacity: int, shapes: Iterable[PackShape | JointShape] = ()) -> list[Bucket]:
        """Return the useful buckets of a capacity, cheapest first."""
        chosen = self._options.max_packed_seqs == "auto"
        documents = raised(self.documents, most_documents(shapes)) if chosen else self.documents
        return pack_buckets([capacity], documents)

    @property
    def documents(self) -> int:
        """Most documents of a pack."""
        wanted = self._options.max_packed_seqs
        if wanted != "auto":
            return wanted or 1
        most = max((seen.documents for seen in self.observed), default=1)
        return most + most // 2 + 1

    def menu(self, program: PackedProgram) -> Menu:
        """Return what may be recorded on demand for a program."""
        return Menu(
            buckets_of=self._buckets_of,
            refuse=program.refuse,
            cost=replay_cost,
            unit=self._unit,
            exact_below=math.inf if self._family.shards > 1 else EXACT_BELOW * self._family.ranks,
            capacities=self._options.named_buckets,
            weights=self._family.weights_per_token(),
        )

    def kind(self) -> Kind:
        """Return what the packs that were seen most often share.

        Raises:
            ValueError: No pack was observed.
        """
        if not self.observed:
            raise ValueError("no packed microbatch was seen in the warm-up steps, so nothing says how packs look")
        return Counter(seen.kind for seen in self.observed).most_common(1)[0][0]

    def additions(self) -> int:
        """Return behind how many layers something is added at most."""
        return max(len(shape.additions) for seen in self.observed for shape in seen.shape.each)

    @property
    def _unit(self) -> int:
        """What a bucket's tokens are a multiple of, so that every rank has as many, and as its kernels take."""
        shards, ranks, rows = self._family.shards, self._family.ranks, self._family.rows
        return math.lcm(shards * ranks * rows, 2 * ranks if ranks > 1 else 1)

    def _check_buckets(self) -> None:
        if wrong := [tokens for tokens in self._options.named_buckets if tokens % self._unit]:
            why = "which ranks share in equal parts" if self._family.rows == 1 else "as fp8 needs on every rank"
            allowed = f"a multiple of {self._unit}, {why}"
            raise OptionError(PACKED_FIELDS["buckets"], wrong[0], allowed, "Round the size up.")
