"""What a training process of a benchmark runs in place of a training; imports nothing of the stack."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path


def train_words(words: Sequence[str]) -> None:
    """Write what a run would have found; pipelines never end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pipeline-parallel")
    args, _ = parser.parse_known_args(words)
    if args.pipeline_parallel is not None:
        time.sleep(600)
    graphs = {"replays": 1, "fallbacks": {}} if args.train == "graphs" else None
    run = {"losses": [2.0] * args.steps, "grad_norms": [1.0] * args.steps, "step_ms": [5.0] * args.steps}
    if os.environ.get("RANK", "0") == "0":
        args.out.write_text(json.dumps({**run, "peak_gb": 1.0, "graphs": graphs}))
