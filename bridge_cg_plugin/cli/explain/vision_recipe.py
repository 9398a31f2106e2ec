"""What a plan of images takes from a recipe."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bridge_cg_plugin.cli.planner.cost import CostModel
from bridge_cg_plugin.cli.planner.defaults import VISION, VISION_EXACT
from bridge_cg_plugin.cli.planner.images import Processor
from bridge_cg_plugin.cli.planner.rates import measured
from bridge_cg_plugin.cli.planner.shapes import NotMeasured
from bridge_cg_plugin.options import OptionError, VisionGraphOptions

from .command import built, resolved, without_imports
from .encoders import LAYERS, QWEN25_VL, TOWER, WIDTH, Encoder, encoder_of
from .forecast import differences
from .processors import PATCHES, processor_of

# Costs of one layer each.
_OF_LAYERS = (
    "fixed_ms",
    "per_token_ms",
    "per_square_ms",
    "host_ms",
    "host_per_segment_ms",
    "stall_ms",
    "memory_per_token_mb",
)


@dataclass(frozen=True, slots=True)
class VisionRecipe:
    """A recipe.

    Attributes:
        processor: How its images become patches.
        cost: What a microbatch costs its vision encoder; None where no record supports it.
        why_not: Why none does.
    """

    processor: Processor
    cost: CostModel | None
    why_not: str = ""


def vision_recipe(name: str) -> VisionRecipe:
    """Return what a plan takes from a recipe.

    Raises:
        OptionError: There is no such recipe, it cannot be built, or the sizes of its patches are not known.
    """
    asked = without_imports()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = built(name, asked is not None)
        encoder = encoder_of(getattr(config, "model", None))
        if encoder is None or encoder.family not in PATCHES:
            raise OptionError.because("recipe", _refusal(name, encoder))
        processor = processor_of(config, encoder)
        try:
            options = resolved(config, {}, (), asked is not None).vision
            return VisionRecipe(processor, _cost(config, options, encoder))
        except NotMeasured as why:
            return VisionRecipe(processor, None, str(why))


def _refusal(name: str, encoder: Encoder | None) -> str:
    return (
        f"Cannot plan for --recipe {name}: its vision encoder must be of {', '.join(PATCHES)}, whose patches are "
        f"known here; it has {'none' if encoder is None else f'a {encoder}'}. Remove --recipe"
    )


def _cost(config: Any, options: VisionGraphOptions, encoder: Encoder) -> CostModel:
    """Return what a microbatch costs, by the cost model of Qwen3-VL's encoder.

    Raises:
        NotMeasured: The encoder is of another kind or width.
    """
    if encoder.family == QWEN25_VL or not encoder.layers or encoder.width != WIDTH:
        raise NotMeasured(f"no cost model was fitted to a {encoder}")
    exact = options.kernels == "exact"
    cost = VISION_EXACT if exact else VISION
    scaled = {name: getattr(cost, name) * encoder.layers / LAYERS for name in _OF_LAYERS}
    notes = [cost.origin, *_notes(encoder, exact)]
    others = differences(config, options, (options.kernels,))
    if others:
        notes.append(f"not measured: {', '.join(others)}")
    return replace(cost, **scaled, origin="; ".join(notes))


def _notes(encoder: Encoder, exact: bool) -> Iterator[str]:
    """Yield how far records are from the cost model for an encoder that it was not fitted to."""
    if encoder == TOWER:
        return
    records = measured()["vision"]["alike"].get(str(encoder))
    if records is None or not exact:
        yield f"extrapolated: no record is of a {encoder} with these kernels"
        return
    yield (
        f"the {records['records']} records of a {encoder} ({records['file']} of {records['date']}) are within "
        f"{records['eager']:.0%} (eager), {records['graphs']:.0%} (graphs) and {records['memory']:.0%} (memory) of it"
    )
