"""A training without a GPU, for test_forks.py: what a process imported before it came here, and whose child it is."""

import sys

BEFORE = set(sys.modules)

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from examples.photographs import cpu  # noqa: E402
from examples.photographs.libraries import LIBRARIES, OBSTACLE  # noqa: E402


def train_words(words: Sequence[str]) -> None:
    """Train the demo's tower through the reference executor, as the words of a command line say."""
    parser = argparse.ArgumentParser(prog="forked_training")
    parser.add_argument("--train", choices=("eager", "graphs"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    losses, helper = cpu.train(args.train == "graphs", args.steps)
    found = {
        "losses": losses,
        "replays": helper.graphs.statistics().replays if helper is not None else 0,
        "parent": os.getppid(),
        "libraries": sorted(BEFORE & set(LIBRARIES)),
        "obstacle": OBSTACLE,
        "variable": os.environ.get("OF_THIS_RUN"),
        "server's": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
    }
    args.out.write_text(json.dumps(found))
