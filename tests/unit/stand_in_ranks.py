"""What the processes of a run do in place of training: each writes what it was told, or fails; nothing of the stack."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence

from examples.photographs.arguments import parse

TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
# Steps with which rank 1 fails and the others wait.
FAILING_STEPS = 13


def start_a_thread() -> None:
    """Be a process of several threads, as one that has imported the stack."""
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def train_words(words: Sequence[str]) -> None:
    """Write what all processes of the run were told."""
    args = parse(words)
    rank = int(os.environ["RANK"])
    if args.steps == FAILING_STEPS:
        if rank == 1:
            raise RuntimeError("rank 1 is out of memory")
        time.sleep(600)
    told = {name: os.environ.get(name) for name in TOLD} | {"threads": threading.active_count()}
    told["workers"] = multiprocessing.get_start_method()
    args.out.with_suffix(f".{rank}").write_text(json.dumps(told))
    if os.environ["WORLD_SIZE"] == "1":
        args.out.write_text(json.dumps([told]))
    elif rank == 0:
        other = args.out.with_suffix(".1")
        while not other.exists() or not other.read_text():
            time.sleep(0.05)
        args.out.write_text(json.dumps([told, json.loads(other.read_text())]))
