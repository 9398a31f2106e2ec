"""The command `bridge-cg plan`."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed
from bridge_cg_plugin.options.packed import RankLayout, parse_layout
from bridge_cg_plugin.recipes import GPUS

from ..answers import Tell, between, table
from ..checks import add_gpu, other_gpu
from .documents import (
    ALGORITHMS,
    QWEN3_VL,
    Documents,
    Pack,
    PlanError,
    in_batch,
    padded_documents,
    padded_packs,
    read_documents,
    read_images,
)
from .plan import PackedPlan, VisionPlan, plan_images, plan_packs
from .records import DENSE, TOWER, Costs, Ranks, of_encoder, of_language_model

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
    layout, size, costs = _shared(arguments)
    multiple = math.lcm(_at_least_one("--pad-to-multiple", arguments.pad_to_multiple), layout.unit)
    for length in (length for pack in found.packs for length in pack):
        if length % layout.document_unit:
            raise PlanError(
                f"Cannot plan from {arguments.data}: a document has {length} tokens, and {layout} shares multiples "
                f"of {layout.document_unit}. Pack again with pad_seq_to_mult={layout.document_unit}."
            )
    packs = padded_packs(list(found.packs) or _packed(found.lengths, arguments, layout, size), multiple)
    return plan_packs(packs, costs, arguments.max_memory_gb, layout)


def plan_of_images(arguments: argparse.Namespace) -> VisionPlan:
    """Return the plan for a dataset's images.

    Raises:
        OptionError: The recipe does not exist, cannot be built, or has another encoder.
        PlanError: The input cannot be planned from.
    """
    images = read_images(arguments.data)
    processor, costs = QWEN3_VL, Costs(of_encoder(TOWER, "auto"), TOWER)
    if arguments.recipe is not None:
        from ..explain.recipes import vision_recipe

        processor, costs = vision_recipe(arguments.recipe)
    if arguments.max_pixels is not None:
        processor = replace(processor, max_pixels=_at_least_one("--max-pixels", arguments.max_pixels))
    limits = {"max_memory_gb": arguments.max_memory_gb, "gpu": arguments.gpu}
    return plan_images(images, costs, arguments.images_per_microbatch, processor, **limits)


def _shared(arguments: argparse.Namespace) -> tuple[RankLayout, int | None, Costs]:
    """Return how ranks share packs, a pack's tokens where they are known, and what packs cost.

    Raises:
        OptionError: The recipe does not exist or cannot be built.
        PlanError: There is no such layout, or it is not the recipe's.
    """
    try:
        given = None if arguments.layout is None else parse_layout("layout", arguments.layout)
    except OptionError as error:
        raise PlanError(as_typed(error, ["--layout"])) from None
    if arguments.recipe is None:
        layout = given or RankLayout()
        return layout, arguments.pack_size, costs_of_packs(layout)
    from ..explain.recipes import packed_recipe

    layout, tokens, costs = packed_recipe(arguments.recipe)
    if given not in (None, layout):
        allowed = f"{layout}, which --recipe {arguments.recipe} has"
        raise PlanError(f"Cannot use --layout {given}: it must be {allowed}. Keep one.")
    size = arguments.pack_size
    return layout, tokens if size is None and arguments.packing != IN_BATCH else size, costs


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


def settings(plan: PackedPlan | VisionPlan) -> dict[str, Any]:
    """Return the provider fields that a plan recommends."""
    if isinstance(plan, VisionPlan):
        return {
            "vision_cuda_graph_buckets": list(plan.buckets),
            "vision_cuda_graph_tuning.max_frames": plan.max_frames,
        }
    return {
        "cuda_graph_max_packed_seqs": plan.best.max_packed_seqs,
        "cuda_graph_packed_buckets": list(plan.best.buckets),
    }


def render(plan: PackedPlan | VisionPlan) -> str:
    """Return a plan as lines for a person."""
    if isinstance(plan, PackedPlan):
        title, found = f"{plan.packs} packs", plan.best.expected
        sizes = {"documents": plan.documents, "tokens": plan.tokens, "longest document": plan.longest}
        shown = ["", *table([_HEADER, *_choices(plan)]), ""]
    else:
        title, found = f"{plan.microbatches} microbatches", plan.expected
        sizes = {"patches": plan.tokens, "frames": plan.frames, "largest frame": plan.largest}
        memory = "" if plan.memory_gb is None else f", {plan.memory_gb:.1f} GiB a slot"
        on_graphs = f"{found.on_graphs:.1%} on graphs, {found.padding:.1%} padding{memory}"
        shown = [f"buckets {_listed(plan.buckets)}: {on_graphs}"]
    rows = [(name, *map(str, (s.p50, s.p90, s.p99, s.max))) for name, s in sizes.items()]
    lines = [
        *table([(title, "P50", "P90", "P99", "max"), *rows]),
        *shown,
        f"expected time over eager, by measured ratios: {between(found.ratios)}",
        f"measured: {plan.origin}",
    ]
    if isinstance(plan, VisionPlan) and plan.gpu is not None:
        lines.append(_of_gpu(plan.gpu, plan.origin))
    return "\n".join([*lines, *(f"model.{name}={value}".replace(" ", "") for name, value in settings(plan).items())])


_HEADER = ("documents", "buckets", "time/eager", "on graphs", "padding", "GiB a slot", "eager because")


def _choices(plan: PackedPlan) -> list[tuple[str, ...]]:
    return [
        (
            f"{choice.max_packed_seqs}{' <' if choice is plan.best else ''}",
            _listed(choice.buckets),
            between(choice.expected.ratios),
            f"{choice.expected.on_graphs:.1%}",
            f"{choice.expected.padding:.1%}",
            "-" if choice.memory_gb is None else f"{choice.memory_gb:.1f}",
            ", ".join(f"{reason} {count}" for reason, count in choice.expected.fallbacks) or "none",
        )
        for choice in plan.choices
    ]


def _of_gpu(gpu: str, origin: str) -> str:
    limit = f"--gpu {gpu}: buckets of up to {GPUS[gpu]} patches, as with --graphs {gpu}; larger microbatches run eager"
    return limit + (f". The records are not of {gpu}: its ratios may differ" if other_gpu(origin, gpu) else "")


def _listed(buckets: Sequence[int]) -> str:
    return ", ".join(map(str, buckets))
