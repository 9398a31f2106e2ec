"""The cost models that plans and forecasts go by where no other is given, from the project's records."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge_cg_plugin.options.layout import RankLayout

from .cost import CostModel, Fit
from .rates import cost_of, language_model_rates, left_out, measured, scaled
from .shapes import LanguageModel, NotMeasured, Ranks

# 16 dense layers, which most records of packed documents are of.
DENSE = LanguageModel(attention=16, mlps=16, hidden=2048, queries=2048, keys=1024, mlp=6144, vocabulary=32_768)


def _vision(kernels: str) -> tuple[CostModel, Fit]:
    found: Mapping[str, Any] = measured()["vision"][kernels]
    cost, fit = CostModel(**found["cost"]), Fit(**{**found["fit"], "tokens": tuple(found["fit"]["tokens"])})
    return replace(cost, origin=f"{cost.origin}; {left_out(fit.graphs, fit.eager)}"), fit


def default_packed(layout: RankLayout) -> CostModel:
    """Return what a pack costs `DENSE` over ranks, without what they send where that was not measured."""
    rates, ranks = language_model_rates(), Ranks(tensor=layout.tensor, context=layout.context, sequence=layout.sequence)
    try:
        return scaled(DENSE, ranks, rates)
    except NotMeasured as why:
        cost = cost_of(DENSE, ranks, rates)
        return replace(cost, origin=f"{cost.origin}, extrapolated: {why}")


VISION, VISION_FIT = _vision("default")
# With kernels="exact", whose records are of one stream.
VISION_EXACT, VISION_EXACT_FIT = _vision("exact")
DEFAULTS = {"packed": default_packed(RankLayout()), "vision": VISION}
