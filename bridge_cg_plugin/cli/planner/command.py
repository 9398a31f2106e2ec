"""`bridge-cg plan`: its arguments and what it runs."""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed
from bridge_cg_plugin.options.layout import RankLayout, parse_layout

from ..answers import Tell
from ..gpus import add_gpu
from .errors import PlanError
from .images import QWEN3_VL, VisionPlan, plan_images, read_images
from .lengths import Documents, read_documents
from .output import as_json, print_plan
from .packing import ALGORITHMS, Pack, in_batch, padded_documents, padded_packs
from .plan import PackedPlan, plan_packs
from .records import DENSE, TOWER, Costs, Ranks, of_encoder, of_language_model

if TYPE_CHECKING:
    from ..explain.recipes import PackedRecipe, VisionRecipe

IN_BATCH, MICRO_BATCH = "in_batch", 4
PACKING = "first_fit_shuffle"


def add_arguments(plan: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Add the two plans and their arguments to a parser; returns the parser of each."""
    kinds = plan.add_subparsers(dest="kind", required=True)
    packed = kinds.add_parser("packed", help="document bound and token buckets from a dataset's document lengths")
    packed.add_argument("data", type=Path, help="histogram .json, .jsonl, .parquet, .arrow, Bridge's packed files")
    packed.add_argument("--pack-size", type=int, help="tokens of a pack; needed unless the file holds packs")
    packed.add_argument("--packing", choices=ALGORITHMS, help=f"how documents are packed; {PACKING} if left out")
    packed.add_argument(
        "--micro-batch-size", type=int, help=f"documents of a microbatch, for in_batch; {MICRO_BATCH} if left out"
    )
    padded = (
        "documents are padded to a multiple of this: Bridge's pad_seq_to_mult; twice the ranks of context parallelism "
        "if left out"
    )
    packed.add_argument("--pad-seq-to-mult", type=int, metavar="N", help=padded)
    packed.add_argument("--layout", metavar="TPnxCPn", help="how ranks share packs, xSP for sequence parallelism")
    packed.add_argument(
        "--recipe", metavar="NAME", help="a recipe of Bridge's or a preset: its model, layout and pack size"
    )
    packed.add_argument("--pad-to-multiple", type=int, default=1, help="packs are padded to a multiple of this")
    packed.add_argument("--truncate", action="store_true", help="cut documents to the pack's size")
    packed.add_argument("--field", help="column or key with a document's length or tokens")
    vision = kinds.add_parser("vision", help="vision buckets from image sizes")
    vision.add_argument("data", type=Path, help='histogram .json {"640x480": count}, or .jsonl with width and height')
    vision.add_argument("--images-per-microbatch", type=int, default=1, metavar="N", help="1 if left out")
    of_images = "a recipe of Bridge's or a preset: its encoder, patches and limits of images; Qwen3-VL's if left out"
    vision.add_argument("--recipe", metavar="NAME", help=of_images)
    vision.add_argument("--max-pixels", type=int, metavar="N", help="largest image of the model's processor")
    add_gpu(vision, "the GPU: its limit of the largest bucket")
    for command in (packed, vision):
        command.add_argument("--max-memory-gb", type=float, help="limit of one slot's graph memory")
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return kinds.choices


def run(arguments: argparse.Namespace, tell: Tell) -> int:
    """Make a plan and print it by `tell`; returns 2 for input that is refused, else 0."""
    try:
        if arguments.max_memory_gb is not None and math.isnan(arguments.max_memory_gb):
            raise PlanError("Cannot use --max-memory-gb nan: it must be a number of GiB.")
        plan = plan_of_documents(arguments) if arguments.kind == "packed" else plan_of_images(arguments)
        if arguments.json:
            tell(json.dumps(as_json(plan)))
        else:
            print_plan(plan, tell)
    except (OptionError, PlanError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def plan_of_documents(arguments: argparse.Namespace) -> PackedPlan:
    """Return the plan for a dataset's documents.

    Raises:
        OptionError: The recipe cannot be planned for.
        PlanError: The input cannot be planned from.
    """
    found = read_documents(arguments.data, arguments.field)
    _refuse_unused(arguments, found)
    recipe = _recipe(arguments)
    layout, size = _shared(arguments, recipe)
    multiple = math.lcm(_at_least_one("--pad-to-multiple", arguments.pad_to_multiple), layout.unit)
    for pack in found.packs:
        for length in pack:
            if length % layout.document_unit:
                raise PlanError(
                    f"Cannot plan from {arguments.data}: a document has {length} tokens, and {layout} shares multiples "
                    f"of {layout.document_unit}. Pack again with pad_seq_to_mult={layout.document_unit}."
                )
    packs = padded_packs(list(found.packs) or _packed(found.lengths, arguments, layout, size), multiple)
    costs = costs_of_packs(layout) if recipe is None else recipe.costs
    return plan_packs(packs, costs, arguments.max_memory_gb, layout)


def plan_of_images(arguments: argparse.Namespace) -> VisionPlan:
    """Return the plan for a dataset's images.

    Raises:
        OptionError: The recipe cannot be planned for.
        PlanError: The input cannot be planned from.
    """
    images, recipe = read_images(arguments.data), _vision_recipe(arguments)
    processor = QWEN3_VL if recipe is None else recipe.processor
    if arguments.max_pixels is not None:
        processor = replace(processor, max_pixels=_at_least_one("--max-pixels", arguments.max_pixels))
    costs = Costs(of_encoder(TOWER, "auto"), TOWER) if recipe is None else recipe.costs
    limits = {"max_memory_gb": arguments.max_memory_gb, "gpu": arguments.gpu}
    return plan_images(images, costs, arguments.images_per_microbatch, processor, **limits)


def _vision_recipe(arguments: argparse.Namespace) -> "VisionRecipe | None":
    """Return the recipe whose images are planned for; None without one.

    Raises:
        OptionError: It does not exist, cannot be built, or has another encoder.
    """
    if arguments.recipe is None:
        return None
    from ..explain.recipes import vision_recipe

    return vision_recipe(arguments.recipe)


def _recipe(arguments: argparse.Namespace) -> "PackedRecipe | None":
    """Return the recipe that is planned for; None without one.

    Raises:
        OptionError: It does not exist or cannot be built.
    """
    if arguments.recipe is None:
        return None
    from ..explain.recipes import packed_recipe

    return packed_recipe(arguments.recipe)


def _shared(arguments: argparse.Namespace, recipe: "PackedRecipe | None") -> tuple[RankLayout, int | None]:
    """Return how ranks share packs, and a pack's tokens where they are known.

    Raises:
        PlanError: There is no such layout, or it is not the recipe's.
    """
    layout, size = None, arguments.pack_size
    try:
        if arguments.layout is not None:
            layout = parse_layout("layout", arguments.layout)
    except OptionError as error:
        raise PlanError(as_typed(error, ["--layout"])) from None
    if recipe is None:
        return layout or RankLayout(), size
    if layout not in (None, recipe.layout):
        allowed = f"{recipe.layout}, which --recipe {arguments.recipe} has"
        raise PlanError(f"Cannot use --layout {layout}: it must be {allowed}. Keep one.")
    in_batch_packing = arguments.packing == IN_BATCH
    return recipe.layout, recipe.tokens if size is None and not in_batch_packing else size


def costs_of_packs(layout: RankLayout) -> Costs:
    """Return what packs cost 16 dense layers, by records of this layout if there are any."""
    ranks = Ranks(tensor=layout.tensor, context=layout.context, sequence=layout.sequence)
    found, others = of_language_model(DENSE, ranks)
    return Costs(found, str(DENSE), [f"not measured: {', '.join(others)}"] if others else [])


def _packed(
    lengths: tuple[int, ...], arguments: argparse.Namespace, layout: RankLayout, size: int | None
) -> list[Pack]:
    packing = arguments.packing or PACKING
    multiple = layout.document_unit
    if arguments.pad_seq_to_mult is not None:
        given = _at_least_one("--pad-seq-to-mult", arguments.pad_seq_to_mult)
        if given % multiple:
            raise PlanError(f"Cannot use --pad-seq-to-mult {given}: {layout} needs a multiple of {multiple}.")
        multiple = given
    if size is not None:
        _at_least_one("--pack-size", size)
        if size % multiple:
            raise PlanError(f"Cannot use --pack-size {size}: it must be a multiple of --pad-seq-to-mult {multiple}.")
        if arguments.truncate:
            lengths = tuple(min(length, size) for length in lengths)
    lengths = padded_documents(lengths, multiple)
    if packing == IN_BATCH:
        return in_batch(lengths, MICRO_BATCH if arguments.micro_batch_size is None else arguments.micro_batch_size)
    if size is None:
        raise PlanError("Cannot pack without --pack-size: write the tokens of a pack.")
    return ALGORITHMS[packing](lengths, size)


_OF_DOCUMENTS = ("pack_size", "packing", "micro_batch_size", "truncate", "field", "pad_seq_to_mult")


def _refuse_unused(arguments: argparse.Namespace, found: Documents) -> None:
    """Refuse arguments that have no effect on these data.

    Raises:
        PlanError: Names the argument and why.
    """
    given = {name: vars(arguments)[name] for name in _OF_DOCUMENTS}
    in_batch_packing = arguments.packing == IN_BATCH
    reasons = {name: "the file holds packs" for name in given} if found.packs else {}
    if not in_batch_packing:
        reasons.setdefault("micro_batch_size", f"only --packing {IN_BATCH} has microbatches of documents")
    elif not arguments.truncate:
        reasons.setdefault("pack_size", f"--packing {IN_BATCH} takes no pack size without --truncate")
    elif arguments.pack_size is None:
        reasons.setdefault("truncate", "there is no --pack-size to cut to")
    if not found.fields:
        reasons.setdefault("field", "the file has lengths without fields")
    for name, why in reasons.items():
        if given[name] not in (None, False):
            raise PlanError(f"Cannot use --{name.replace('_', '-')}: {why}. Remove it.")


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise PlanError(f"Cannot use {name} {value}: it must be a whole number of at least 1.")
    return value
