"""Rounds of verl's engines with images that deterministic kernels take."""

from collections.abc import Sequence

from bridge_cg_tools.benchmarks.loops.verl_rounds import make_rounds
from bridge_cg_tools.benchmarks.loops.verl_setup import DETERMINISTIC


def train_words(words: Sequence[str]) -> None:
    """Make all rounds, as the words of a command line say; see `worker_arguments`."""
    make_rounds(words, DETERMINISTIC)
