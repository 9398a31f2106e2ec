"""What a plan of packed documents takes from a recipe."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

from bridge_cg_plugin.cli.planner.cost import CostModel
from bridge_cg_plugin.cli.planner.rates import cost_of, language_model_rates, scaled
from bridge_cg_plugin.cli.planner.shapes import NotMeasured, language_model_of, ranks_of
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.layout import RankLayout

from .command import built, resolved, without_imports
from .sizes import vocabulary_of


@dataclass(frozen=True, slots=True)
class PackedRecipe:
    """A recipe.

    Attributes:
        layout: How its ranks share packs.
        tokens: Of a pack; None where documents are not packed offline.
        cost: What a pack costs its language model; None where its sizes are not known.
        why_not: Why they are not.
    """

    layout: RankLayout
    tokens: int | None
    cost: CostModel | None
    why_not: str = ""


def packed_recipe(name: str) -> PackedRecipe:
    """Return what a plan takes from a recipe.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    asked = without_imports()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = built(name, asked is not None)
        model = config.model
        layout = RankLayout(
            tensor=model.tensor_model_parallel_size,
            context=model.context_parallel_size,
            sequence=bool(model.sequence_parallel),
        )
        specs = getattr(getattr(config, "dataset", None), "offline_packing_specs", None)
        tokens = getattr(specs, "packed_sequence_size", None)
        try:
            return PackedRecipe(layout, tokens, _cost(config, asked is not None))
        except NotMeasured as why:
            return PackedRecipe(layout, tokens, None, str(why))


def _cost(config: Any, stands_in: bool) -> CostModel:
    """Return what a pack costs, extrapolated where the model is far from all records.

    Raises:
        NotMeasured: A size is not known.
    """
    model, ranks, rates = (
        language_model_of(config.model, vocabulary_of(config)),
        ranks_of(config.model),
        language_model_rates(),
    )
    whole = _has_experts_inside(config, stands_in)
    try:
        return scaled(model, ranks, rates, whole)
    except NotMeasured as why:
        cost = cost_of(model, ranks, rates, whole)
        return replace(cost, origin=f"{cost.origin}, extrapolated: {why}")


def _has_experts_inside(config: Any, stands_in: bool) -> bool:
    """Whether a recipe's graphs of packs have whole layers; also where it has no such graphs."""
    try:
        options = resolved(config, {}, (), stands_in)
    except OptionError:
        return True
    return not (options.packed.enabled and options.language_model.modules)
