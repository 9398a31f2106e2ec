"""Rounds of verl's engines with images that deterministic kernels take."""

from collections.abc import Sequence

from scripts.performance.loops.verl_rounds import make_rounds
from scripts.performance.loops.verl_setup import DETERMINISTIC


def train_words(words: Sequence[str]) -> None:
    """Make all rounds, as the words of a command line say; see `worker_arguments`."""
    make_rounds(words, DETERMINISTIC)
