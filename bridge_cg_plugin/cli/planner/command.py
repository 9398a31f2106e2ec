"""The command `bridge-cg plan`."""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bridge_cg_plugin.options import OptionError

from ..answers import Tell, table
from ..checks import at_least_one
from .documents import (
    ALGORITHMS,
    Documents,
    Pack,
    PlanError,
    in_batch,
    padded_documents,
    padded_packs,
    read_documents,
)
from .plan import PackedPlan, RankLayout, plan_packs

IN_BATCH, MICRO_BATCH = "in_batch", 4
PACKING = "first_fit_shuffle"


def add_arguments(plan: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Add what can be planned, and its arguments, to a parser; returns the parser of each."""
    kinds = plan.add_subparsers(dest="kind", required=True, metavar="packed")
    packed = kinds.add_parser("packed", help="how many documents of a pack graphs take, from a dataset's lengths")
    packed.add_argument("data", type=Path, help="histogram .json, .jsonl, .parquet, .arrow, Bridge's packed files")
    packed.add_argument(
        "--recipe", type=str.lower, metavar="NAME", help="a recipe of Bridge's or a preset: its layout and packing"
    )
    packed.add_argument("--pack-size", type=at_least_one, help="tokens of a pack, unless recipe or file have packs")
    packed.add_argument("--packing", choices=ALGORITHMS, help=f"how documents are packed; the recipe's, or {PACKING}")
    packed.add_argument(
        "--micro-batch-size",
        type=at_least_one,
        help=f"documents of a microbatch, for in_batch; the recipe's, or {MICRO_BATCH}",
    )
    packed.add_argument("--truncate", action="store_true", help="cut documents to the pack's size")
    packed.add_argument("--field", help="column or key with a document's length or tokens")
    packed.add_argument("--json", action="store_true", help="print one JSON object")
    return kinds.choices


def run(arguments: argparse.Namespace, tell: Tell) -> int:
    """Make a plan and print it by `tell`; returns 2 for input that is refused, else 0."""
    try:
        plan = plan_of_documents(arguments)
    except (OptionError, PlanError) as error:
        print(error, file=sys.stderr)
        return 2
    tell(json.dumps({**asdict(plan), "set": settings(plan)}) if arguments.json else render(plan))
    return 0


def plan_of_documents(arguments: argparse.Namespace) -> PackedPlan:
    """Return the plan for a dataset's documents.

    Raises:
        OptionError: The recipe cannot be planned for.
        PlanError: The input cannot be planned from.
    """
    found = read_documents(arguments.data, arguments.field)
    _refuse_unused(arguments, found)
    layout, multiple = RankLayout(), 1
    if arguments.recipe is not None:
        layout, multiple = _take_recipe(arguments)
    for length in (length for pack in found.packs for length in pack):
        if length % layout.document_unit:
            raise PlanError(
                f"Cannot plan from {arguments.data}: a document has {length} tokens, and {layout} shares multiples "
                f"of {layout.document_unit}. Pack again with pad_seq_to_mult={layout.document_unit}."
            )
    packs = list(found.packs) or _packed(found.lengths, arguments, math.lcm(multiple, layout.document_unit))
    return plan_packs(padded_packs(packs, layout.unit), layout)


def _take_recipe(arguments: argparse.Namespace) -> tuple[RankLayout, int]:
    """Set what a recipe says of packing where the command line does not; returns how its ranks share packs, and of what
    its documents are padded to multiples.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    from ..explain.recipes import built, without_imports

    without_imports()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = built(arguments.recipe)
    model, dataset = config.model, config.dataset
    specs = getattr(dataset, "offline_packing_specs", None)
    if getattr(dataset, "enable_in_batch_packing", False) and arguments.pack_size is None:
        arguments.packing = arguments.packing or IN_BATCH
        arguments.micro_batch_size = arguments.micro_batch_size or config.train.micro_batch_size
    if arguments.packing != IN_BATCH and arguments.pack_size is None:
        arguments.pack_size = getattr(specs, "packed_sequence_size", None)
    layout = RankLayout(
        tensor=model.tensor_model_parallel_size,
        context=model.context_parallel_size,
        sequence=bool(model.sequence_parallel),
    )
    return layout, getattr(specs, "pad_seq_to_mult", None) or 1


def _packed(lengths: tuple[int, ...], arguments: argparse.Namespace, multiple: int) -> list[Pack]:
    packing, size = arguments.packing or PACKING, arguments.pack_size
    if size is not None and size % multiple:
        raise PlanError(f"Cannot use --pack-size {size}: it must be a multiple of {multiple}, which ranks share.")
    if size is not None and arguments.truncate:
        lengths = tuple(min(length, size) for length in lengths)
    lengths = padded_documents(lengths, multiple)
    if packing == IN_BATCH:
        return in_batch(lengths, arguments.micro_batch_size or MICRO_BATCH)
    if size is None:
        raise PlanError("Cannot pack without --pack-size: write the tokens of a pack.")
    return ALGORITHMS[packing](lengths, size)


_OF_DOCUMENTS = ("pack_size", "packing", "micro_batch_size", "truncate", "field")


def _refuse_unused(arguments: argparse.Namespace, found: Documents) -> None:
    """Refuse arguments that have no effect on these data.

    Raises:
        PlanError: Names the argument and why.
    """
    in_batch_packing, size = arguments.packing == IN_BATCH, arguments.pack_size
    unused = (
        (bool(found.packs), _OF_DOCUMENTS, "the file holds packs"),
        (
            not in_batch_packing and arguments.recipe is None,
            ("micro_batch_size",),
            f"only --packing {IN_BATCH} has microbatches of documents",
        ),
        (
            in_batch_packing and not arguments.truncate,
            ("pack_size",),
            f"--packing {IN_BATCH} has none without --truncate",
        ),
        (in_batch_packing and size is None, ("truncate",), "there is no --pack-size to cut to"),
        (not found.fields, ("field",), "the file has lengths without fields"),
    )
    for name, why in ((name, why) for holds, names, why in unused if holds for name in names):
        if vars(arguments)[name] not in (None, False):
            raise PlanError(f"Cannot use --{name.replace('_', '-')}: {why}. Remove it.")


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
