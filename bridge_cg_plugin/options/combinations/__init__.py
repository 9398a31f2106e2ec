"""Combinations that each are fine alone and cannot work together, all in one place, each with its reason."""

from ..facts import Facts
from ..graph_options import GraphOptions
from ..vision import VisionGraphOptions
from .language_model import IMAGES, LANGUAGE_MODEL
from .offload import OFFLOAD
from .packed import FP8, PACKED
from .rule import Combination
from .vision import VISION

__all__ = ["COMBINATIONS", "Combination", "check_combinations", "check_options"]

COMBINATIONS = (*LANGUAGE_MODEL, *IMAGES, *VISION, *PACKED, *FP8, *OFFLOAD)


def check_options(options: GraphOptions, facts: Facts | None = None, *, harmless: bool = True) -> None:
    """Refuse options that cannot work together, or with the rest of a configuration.

    Args:
        options: The options.
        facts: What else is known.
        harmless: Whether combinations that upstream runs, as if the option had not been given, are refused too.

    Raises:
        OptionError: A combination cannot work.
    """
    for combination in COMBINATIONS:
        if harmless or not combination.harmless:
            combination.check(options, facts or Facts())


def check_combinations(vision: VisionGraphOptions) -> None:
    """Refuse vision options that each are fine and together are not.

    Raises:
        OptionError: A combination cannot work.
    """
    check_options(GraphOptions(vision=vision))
