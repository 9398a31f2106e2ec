"""What a plan takes from a recipe."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge_cg_plugin.cli.planner.images import Processor
from bridge_cg_plugin.cli.planner.records import DENSE, TOWER, Costs, of_encoder, of_language_model
from bridge_cg_plugin.cli.planner.shapes import NotMeasured, Ranks, language_model_of, ranks_of
from bridge_cg_plugin.options import GraphOptions, OptionError, VisionGraphOptions
from bridge_cg_plugin.options.layout import RankLayout

from .command import built, resolved, without_imports
from .encoders import Encoder, encoder_of
from .forecast import differences
from .processors import PATCHES, processor_of


@dataclass(frozen=True, slots=True)
class PackedRecipe:
    """What a plan of packed documents takes from a recipe.

    Attributes:
        layout: How its ranks share packs.
        tokens: Of a pack; None where documents are not packed offline.
        costs: What packs cost its language model.
    """

    layout: RankLayout
    tokens: int | None
    costs: Costs


@dataclass(frozen=True, slots=True)
class VisionRecipe:
    """What a plan of images takes from a recipe.

    Attributes:
        processor: How its images become patches.
        costs: What microbatches cost its vision encoder.
    """

    processor: Processor
    costs: Costs


def packed_recipe(name: str) -> PackedRecipe:
    """Return what a plan of packed documents takes from a recipe.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    config, options = _read(name)
    model = config.model
    layout = RankLayout(
        tensor=model.tensor_model_parallel_size,
        context=model.context_parallel_size,
        sequence=bool(model.sequence_parallel),
    )
    specs = getattr(getattr(config, "dataset", None), "offline_packing_specs", None)
    return PackedRecipe(layout, getattr(specs, "packed_sequence_size", None), _costs_of_packs(config, options))


def _costs_of_packs(config: Any, options: GraphOptions | None) -> Costs:
    packed = options is not None and options.packed.enabled
    modules = [module.name for module in options.language_model.modules] if options is not None and packed else []
    try:
        model = language_model_of(config.model)
    except NotMeasured as why:
        return Costs(of_language_model(DENSE, Ranks())[0], "this language model", [str(why)])
    found, ranks = of_language_model(model, ranks_of(config.model), modules)
    return Costs(found, str(model), _not_measured(ranks))


def vision_recipe(name: str) -> VisionRecipe:
    """Return what a plan of images takes from a recipe.

    Raises:
        OptionError: There is no such recipe, it cannot be built, or the sizes of its patches are not known.
    """
    config, options = _read(name)
    encoder = encoder_of(getattr(config, "model", None))
    if encoder is None or encoder.family not in PATCHES:
        raise OptionError.because("recipe", _refusal(name, encoder))
    vision = VisionGraphOptions() if options is None else options.vision
    (measured,) = of_encoder(str(encoder), vision.kernels) or of_encoder(TOWER, vision.kernels)
    others = differences(config, vision, measured.kernels, measured.attention)
    return VisionRecipe(processor_of(config, encoder), Costs([measured], str(encoder), _not_measured(others)))


def _read(name: str) -> tuple[Any, GraphOptions | None]:
    """Return a recipe's configuration and its options; None for options that training would refuse.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    asked = without_imports()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = built(name, asked is not None)
        try:
            return config, resolved(config, {}, (), asked is not None)
        except OptionError:
            return config, None


def _not_measured(others: Sequence[str]) -> list[str]:
    return [f"not measured: {', '.join(others)}"] if others else []


def _refusal(name: str, encoder: Encoder | None) -> str:
    return (
        f"Cannot plan for --recipe {name}: its vision encoder must be of {', '.join(PATCHES)}, whose patches are "
        f"known here; it has {'none' if encoder is None else f'a {encoder}'}. Remove --recipe"
    )
