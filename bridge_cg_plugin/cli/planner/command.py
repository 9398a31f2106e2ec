"""The command `bridge-cg plan`."""

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed

from ..answers import Tell, table
from ..checks import at_least_one
from ..measured import ALONE, DENSE, Costs, NotMeasured, differences, layers_of, of_language_model, pack_size, ranks_of
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
from .plan import PackedPlan, RankLayout, parse_layout, plan_packs

IN_BATCH, MICRO_BATCH = "in_batch", 4
PACKING = "first_fit_shuffle"


def add_arguments(plan: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Add what can be planned, and its arguments, to a parser; returns the parser of each."""
    kinds = plan.add_subparsers(dest="kind", required=True)
    packed = kinds.add_parser("packed", help="document bound and token buckets from a dataset's document lengths")
    packed.add_argument("data", type=Path, help="histogram .json, .jsonl, .parquet, .arrow, Bridge's packed files")
    packed.add_argument("--pack-size", type=at_least_one, help="tokens of a pack; needed unless the file holds packs")
    packed.add_argument("--packing", choices=ALGORITHMS, help=f"how documents are packed; {PACKING} if left out")
    packed.add_argument(
        "--micro-batch-size",
        type=at_least_one,
        help=f"documents of a microbatch, for in_batch; {MICRO_BATCH} if left out",
    )
    padded = (
        "documents are padded to a multiple of this: Bridge's pad_seq_to_mult; twice the ranks of context parallelism "
        "if left out"
    )
    packed.add_argument("--pad-seq-to-mult", type=at_least_one, metavar="N", help=padded)
    packed.add_argument("--layout", metavar="TPnxCPn", help="how ranks share packs, xSP for sequence parallelism")
    packed.add_argument(
        "--recipe", metavar="NAME", help="a recipe of Bridge's or a preset: its model, layout and pack size"
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
        print(as_typed(error, ["--layout"]), file=sys.stderr)
        return 2
    tell(json.dumps({**asdict(plan), "set": settings(plan)}) if arguments.json else render(plan))
    return 0


def plan_of_documents(arguments: argparse.Namespace) -> PackedPlan:
    """Return the plan for a dataset's documents.

    Raises:
        OptionError: The recipe or the layout cannot be planned for.
        PlanError: The input cannot be planned from.
    """
    found = read_documents(arguments.data, arguments.field)
    _refuse_unused(arguments, found)
    layout, size, costs = _shared(arguments)
    for length in (length for pack in found.packs for length in pack):
        if length % layout.document_unit:
            raise PlanError(
                f"Cannot plan from {arguments.data}: a document has {length} tokens, and {layout} shares multiples "
                f"of {layout.document_unit}. Pack again with pad_seq_to_mult={layout.document_unit}."
            )
    packs = padded_packs(list(found.packs) or _packed(found.lengths, arguments, layout, size), layout.unit)
    return plan_packs(packs, costs, layout)


def _shared(arguments: argparse.Namespace) -> tuple[RankLayout, int | None, Costs]:
    """Return how ranks share packs, a pack's tokens where they are known, and what packs cost.

    Raises:
        OptionError: There is no such layout, or the recipe does not exist or cannot be built.
        PlanError: The layout is not the recipe's.
    """
    given = None if arguments.layout is None else parse_layout("layout", arguments.layout)
    if arguments.recipe is None:
        layout = given or RankLayout()
        return layout, arguments.pack_size, costs_of_packs(layout)
    layout, tokens, costs = _of_recipe(arguments.recipe)
    if given not in (None, layout):
        allowed = f"{layout}, which --recipe {arguments.recipe} has"
        raise PlanError(f"Cannot use --layout {given}: it must be {allowed}. Keep one.")
    size = arguments.pack_size
    return layout, tokens if size is None and arguments.packing != IN_BATCH else size, costs


def _of_recipe(name: str) -> tuple[RankLayout, int | None, Costs]:
    """Return how a recipe's ranks share packs, a pack's tokens (None: not packed offline), and what packs cost.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    from ..explain.recipes import built, resolved, without_imports

    without_imports()
    modules: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = built(name)
        with contextlib.suppress(OptionError):  # of options that training would refuse
            options = resolved(config)
            modules = [module.name for module in options.language_model.modules if options.packed.enabled]
    model, size = config.model, pack_size(config)
    layout = RankLayout(
        tensor=model.tensor_model_parallel_size,
        context=model.context_parallel_size,
        sequence=bool(model.sequence_parallel),
    )
    try:
        layers = layers_of(model)
    except NotMeasured as why:
        return layout, size, Costs(of_language_model(DENSE, {}), "this language model", [str(why)])
    found = of_language_model(layers, ranks_of(model), modules)
    return layout, size, Costs(found, layers, differences(config, {**ALONE, **found.ranks}))


def costs_of_packs(layout: RankLayout) -> Costs:
    """Return what packs cost 16 dense layers, by records of this layout if there are any."""
    fields = {
        "tensor_model_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.sequence,
    }
    ranks = ranks_of(SimpleNamespace(**fields))
    found = of_language_model(DENSE, ranks)
    return Costs(found, DENSE, [] if found.ranks == ranks else [str(layout)])


def _packed(
    lengths: tuple[int, ...], arguments: argparse.Namespace, layout: RankLayout, size: int | None
) -> list[Pack]:
    packing, multiple = arguments.packing or PACKING, arguments.pad_seq_to_mult or layout.document_unit
    if multiple % layout.document_unit:
        raise PlanError(
            f"Cannot use --pad-seq-to-mult {multiple}: {layout} needs a multiple of {layout.document_unit}."
        )
    if size is not None and size % multiple:
        raise PlanError(f"Cannot use --pack-size {size}: it must be a multiple of --pad-seq-to-mult {multiple}.")
    if size is not None and arguments.truncate:
        lengths = tuple(min(length, size) for length in lengths)
    lengths = padded_documents(lengths, multiple)
    if packing == IN_BATCH:
        return in_batch(lengths, arguments.micro_batch_size or MICRO_BATCH)
    if size is None:
        raise PlanError("Cannot pack without --pack-size: write the tokens of a pack.")
    return ALGORITHMS[packing](lengths, size)


_OF_DOCUMENTS = ("pack_size", "packing", "micro_batch_size", "truncate", "field", "pad_seq_to_mult")


def _refuse_unused(arguments: argparse.Namespace, found: Documents) -> None:
    """Refuse arguments that have no effect on these data.

    Raises:
        PlanError: Names the argument and why.
    """
    in_batch_packing, size = arguments.packing == IN_BATCH, arguments.pack_size
    unused = (
        (bool(found.packs), _OF_DOCUMENTS, "the file holds packs"),
        (not in_batch_packing, ("micro_batch_size",), f"only --packing {IN_BATCH} has microbatches of documents"),
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


def settings(plan: PackedPlan) -> dict[str, Any]:
    """Return the provider fields that a plan recommends."""
    return {
        "cuda_graph_max_packed_seqs": plan.best.max_packed_seqs,
        "cuda_graph_packed_buckets": list(plan.best.buckets),
    }


def render(plan: PackedPlan) -> str:
    """Return a plan as lines for a person."""
    sizes = {"documents": plan.documents, "tokens": plan.tokens, "longest document": plan.longest}
    rows = [(name, *map(str, (s.p50, s.p90, s.p99, s.max))) for name, s in sizes.items()]
    lines = [
        *table([(f"{plan.packs} packs", "P50", "P90", "P99", "max"), *rows]),
        *["", *table([_HEADER, *_choices(plan)]), ""],
        f"expected time over eager, by measured ratios: {plan.best.expected.ratio:.2f}",
        f"measured: {plan.origin}",
    ]
    return "\n".join([*lines, *(f"model.{name}={value}".replace(" ", "") for name, value in settings(plan).items())])


_HEADER = ("documents", "buckets", "time/eager", "on graphs", "padding", "eager because")


def _choices(plan: PackedPlan) -> list[tuple[str, ...]]:
    return [
        (
            f"{choice.max_packed_seqs}{' <' if choice is plan.best else ''}",
            ", ".join(map(str, choice.buckets)),
            f"{choice.expected.ratio:.2f}",
            f"{choice.expected.on_graphs:.1%}",
            f"{choice.expected.padding:.1%}",
            ", ".join(f"{reason} {count}" for reason, count in choice.expected.fallbacks) or "none",
        )
        for choice in plan.choices
    ]
