"""Rounds of verl's engine with adapters, the reference being the policy without them."""

from collections.abc import Sequence

from scripts.performance.loops.verl_rounds import make_rounds
from scripts.performance.loops.verl_setup import LORA


def train_words(words: Sequence[str]) -> None:
    """Make all rounds, as the words of a command line say; see `worker_arguments`."""
    make_rounds(words, LORA)
