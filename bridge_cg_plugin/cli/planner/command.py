"""The command `bridge-cg plan`: how many documents of a pack graphs take. Buckets are captured when training asks."""

import argparse
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bridge_cg_plugin.attention_bounds import pack_buckets, refuse_pack
from bridge_cg_plugin.graphs.buckets import EXACT_BELOW, Bucket, choose
from bridge_cg_plugin.graphs.fallback import Fallback

from ..answers import AnswerError, Tell, table
from ..checks import at_least_one
from .documents import Documents, Pack, first_fit_shuffle, in_batch, padded_documents, padded_packs, read_documents


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


ALONE = RankLayout()
# A smaller bound is faster: the smallest is taken that leaves at most this share of packs eager beside the largest.
LEFT_EAGER = 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """A document bound, and what to expect of it.

    Attributes:
        max_packed_seqs: Documents of one pack that a graph takes.
        on_graphs: Share of packs that replays.
        fallbacks: How many packs run eager, by reason.
    """

    max_packed_seqs: int
    on_graphs: float
    fallbacks: tuple[tuple[Fallback, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What packs of a dataset look like, and what to set.

    Attributes:
        packs: How many packs it rests on.
        sizes: P50, P90, P99 and the largest of documents and tokens of a pack, and of its longest document.
        choices: Every bound that was looked at, ascending.
        best: The recommended one.
        layout: How ranks share packs.
    """

    packs: int
    sizes: Mapping[str, tuple[int, ...]]
    choices: tuple[Choice, ...]
    best: Choice
    layout: str = str(RankLayout())


PARTS = (0.5, 0.9, 0.99, 1.0)


def percentiles(values: Iterable[int]) -> tuple[int, ...]:
    """Return the percentiles `PARTS` of at least one value: the smallest that so many of them do not exceed."""
    ordered = sorted(values)
    return tuple(ordered[max(math.ceil(part * len(ordered)) - 1, 0)] for part in PARTS)


def plan_packs(packs: Sequence[Pack], layout: RankLayout = ALONE) -> PackedPlan:
    """Find a document bound.

    Args:
        packs: Document lengths of every pack, which are multiples of what the layout asks for.
        layout: How ranks share packs.

    Raises:
        AnswerError: There is no pack.
    """
    if not packs:
        raise AnswerError("Cannot plan without packs: the data holds fewer documents than one microbatch takes.")
    sizes = {
        "documents": percentiles(map(len, packs)),
        "tokens": percentiles(map(sum, packs)),
        "longest document": percentiles(map(max, packs)),
    }
    most, alike = sizes["documents"][-1], Counter(packs)
    bounds = {*sizes["documents"], *(1 << n for n in range(2, most.bit_length() + 1))}
    choices = [expect(alike, bound, layout) for bound in sorted(bounds)]
    enough = max(choice.on_graphs for choice in choices) - LEFT_EAGER
    best = next(choice for choice in choices if choice.on_graphs >= enough)
    return PackedPlan(len(packs), sizes, tuple(choices), best, str(layout))


def place(pack: Pack, buckets: Sequence[Bucket], layout: RankLayout = ALONE) -> Bucket | Fallback:
    """Return the first bucket that takes a pack, or why none does."""
    tokens = sum(pack)
    refuse = partial(refuse_pack, pack, tokens, EXACT_BELOW, shards=layout.shards, ranks=layout.context)
    return choose(tokens, buckets, refuse)


def expect(packs: Counter[Pack], bound: int, layout: RankLayout = ALONE) -> Choice:
    """Return what a document bound gives.

    Args:
        packs: Document lengths of each, and how many are alike.
        bound: Documents of one pack that a graph takes.
        layout: How ranks share packs.
    """
    fallbacks: Counter[Fallback] = Counter()
    for pack, count in packs.items():
        found = place(pack, pack_buckets([sum(pack)], bound), layout)
        if isinstance(found, Fallback):
            fallbacks[found] += count
    return Choice(bound, 1 - fallbacks.total() / packs.total(), tuple(sorted(fallbacks.items())))


def add_arguments(plan: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Add what can be planned, and its arguments, to a parser; returns the parser of each."""
    kinds = plan.add_subparsers(dest="kind", required=True, metavar="packed")
    packed = kinds.add_parser("packed", help="how many documents of a pack graphs take, from a dataset's lengths")
    packed.add_argument("data", type=Path, help="histogram .json, .jsonl, .parquet, .arrow, Bridge's packed files")
    named = "a recipe of Bridge's or a preset: its layout and packing"
    packed.add_argument("recipe", nargs="?", default=argparse.SUPPRESS, metavar="RECIPE", help=named)
    packed.add_argument("--recipe", metavar="RECIPE", help="the same")
    packed.add_argument("--pack-size", type=at_least_one, help="tokens of a pack, unless recipe or file have packs")
    packed.add_argument("--truncate", action="store_true", help="cut documents to the pack's size")
    packed.add_argument("--field", help="column or key with a document's length or tokens")
    packed.add_argument("--json", action="store_true", help="print one JSON object")
    return kinds.choices


def run(arguments: argparse.Namespace, tell: Tell) -> int:
    """Make a plan and print it by `tell`; returns the exit status."""
    plan = plan_of_documents(arguments)
    tell(json.dumps({**asdict(plan), "set": settings(plan)}) if arguments.json else render(plan))
    return 0


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents become packs.

    Attributes:
        layout: How ranks share packs.
        multiple: What every document is padded to a multiple of.
        size: Tokens of a pack; None where nobody says.
        together: Documents that in-batch packing joins; None where a pack has a size.
    """

    layout: RankLayout = ALONE
    multiple: int = 1
    size: int | None = None
    together: int | None = None


def plan_of_documents(arguments: argparse.Namespace) -> PackedPlan:
    """Return the plan for a dataset's documents.

    Raises:
        OptionError: The recipe cannot be planned for.
        AnswerError: The input cannot be planned from.
    """
    found = read_documents(arguments.data, arguments.field)
    packing = Packing(size=arguments.pack_size)
    if arguments.recipe is not None:
        packing = packing_of(arguments.recipe.lower(), arguments.pack_size)
    _refuse_unused(arguments, found, packing)
    unit = packing.layout.document_unit
    for length in (length for pack in found.packs for length in pack):
        if length % unit:
            raise AnswerError(
                f"Cannot plan from {arguments.data}: a document has {length} tokens, and {packing.layout} shares "
                f"multiples of {unit}. Pack again with pad_seq_to_mult={unit}."
            )
    packs = list(found.packs) or _packed(found.lengths, packing, arguments.truncate)
    return plan_packs(padded_packs(packs, packing.layout.unit), packing.layout)


def packing_of(recipe: str, size: int | None) -> Packing:
    """Return how a recipe packs documents.

    Args:
        recipe: Its name.
        size: Tokens of a pack in the place of the recipe's.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    from ..explain.recipes import built, without_imports

    without_imports()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = built(recipe)
    model, dataset = config.model, config.dataset
    specs = getattr(dataset, "offline_packing_specs", None)
    layout = RankLayout(
        tensor=model.tensor_model_parallel_size,
        context=model.context_parallel_size,
        sequence=bool(model.sequence_parallel),
    )
    multiple = getattr(specs, "pad_seq_to_mult", None) or 1
    if getattr(dataset, "enable_in_batch_packing", False) and size is None:
        return Packing(layout, multiple, together=config.train.micro_batch_size)
    return Packing(layout, multiple, size or getattr(specs, "packed_sequence_size", None))


def _packed(lengths: tuple[int, ...], packing: Packing, truncate: bool) -> list[Pack]:
    size, multiple = packing.size, math.lcm(packing.multiple, packing.layout.document_unit)
    if size is not None and size % multiple:
        raise AnswerError(f"Cannot pack into {size} tokens: they must be a multiple of {multiple}, which ranks share.")
    if size is not None and truncate:
        lengths = tuple(min(length, size) for length in lengths)
    lengths = padded_documents(lengths, multiple)
    if packing.together is not None:
        return in_batch(lengths, packing.together)
    if size is None:
        raise AnswerError("Cannot pack without --pack-size: write the tokens of a pack, or a --recipe that says it.")
    return first_fit_shuffle(lengths, size)


def _refuse_unused(arguments: argparse.Namespace, found: Documents, packing: Packing) -> None:
    """Refuse arguments that have no effect on these data.

    Raises:
        AnswerError: Names the argument and why.
    """
    unused = (
        (bool(found.packs), ("pack_size", "truncate", "field"), "the file holds packs"),
        (packing.size is None, ("truncate",), "packs have no size to cut to"),
        (not found.fields, ("field",), "the file has lengths without fields"),
    )
    for name, why in ((name, why) for holds, names, why in unused if holds for name in names):
        if vars(arguments)[name] not in (None, False):
            raise AnswerError(f"Cannot use --{name.replace('_', '-')}: {why}. Remove it.")


def settings(plan: PackedPlan) -> dict[str, int]:
    """Return the provider field that a plan recommends."""
    return {"cuda_graph_max_packed_seqs": plan.best.max_packed_seqs}


def render(plan: PackedPlan) -> str:
    """Return a plan as lines for a person."""
    rows = [(name, *map(str, sizes)) for name, sizes in plan.sizes.items()]
    lines = [
        *table([(f"{plan.packs} packs", "P50", "P90", "P99", "max"), *rows]),
        "",
        *table([_HEADER, *_choices(plan)]),
    ]
    return "\n".join([*lines, *(f"model.{name}={value}".replace(" ", "") for name, value in settings(plan).items())])


_HEADER = ("documents", "on graphs", "eager because")


def _choices(plan: PackedPlan) -> list[tuple[str, ...]]:
    return [
        (
            f"{choice.max_packed_seqs}{' <' if choice is plan.best else ''}",
            f"{choice.on_graphs:.1%}",
            ", ".join(f"{reason} {count}" for reason, count in choice.fallbacks) or "none",
        )
        for choice in plan.choices
    ]
