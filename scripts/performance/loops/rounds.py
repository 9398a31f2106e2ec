"""What a run writes of its rounds, and the clock and counts that it takes them with."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OLD, REFERENCE, UPDATE = "old", "reference", "update"
PASSES = (OLD, REFERENCE, UPDATE)
GIB = 2**30
# Passes of each model before the first round, and as many calls run eager before graphs are captured. Fewer would not
# show that each size is worth a bucket of its own.
WARM_UP = 10
# Rounds that are not timed: an update's buckets are captured one by one, before the policy's next calls.
FIRST = 3


@dataclass(slots=True)
class Counts:
    """Counts of all graphs of a process so far.

    Attributes:
        replays: Microbatches on graphs.
        capture_s: Seconds of recordings.
    """

    replays: int = 0
    capture_s: float = 0.0


@dataclass(slots=True)
class Pass:
    """One pass over all microbatches of a round.

    Attributes:
        ms: Until the GPU is done, recordings included.
        capture_s: Seconds of recordings among it.
        replays: Microbatches on graphs.
    """

    ms: float = 0.0
    capture_s: float = 0.0
    replays: int = 0


@dataclass(slots=True)
class Round:
    """One round.

    Attributes:
        microbatches: Of each pass.
        passes: By name.
        loss, grad_norm: Of the update.
        away_gb: Device memory taken since all was built, while weights and the optimizer's state are away; None in
            rounds after which some of them stay.
        peak_gb: Most of it in the round.
        log_probs: Of the responses' tokens, by pass, for old and reference.
        bit_equal: Whether both are the same by eager passes over the same weights.
    """

    microbatches: int
    passes: dict[str, Pass] = field(default_factory=dict)
    loss: float = 0.0
    grad_norm: float = 0.0
    away_gb: float | None = None
    peak_gb: float = 0.0
    log_probs: dict[str, list[float]] = field(default_factory=dict)
    bit_equal: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@contextmanager
def timed(into: Round, name: str, counts: Callable[[], Counts], done: Callable[[], None]) -> Iterator[None]:
    """Take the time and the counts of a pass.

    Args:
        into: Gets the pass.
        name: Of the pass.
        counts: Returns the counts so far.
        done: Waits for the GPU.
    """
    done()
    before, began = counts(), time.perf_counter()
    yield
    done()
    ms, after = (time.perf_counter() - began) * 1e3, counts()
    into.passes[name] = Pass(ms, after.capture_s - before.capture_s, after.replays - before.replays)


def graph_counts() -> Counts:
    """Return the counts of all graphs of this process."""
    from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs

    found = Counts()
    for graphs in active_graphs():
        statistics = graphs.statistics()
        found.replays += statistics.replays
        found.capture_s += statistics.capture_seconds
    return found


@contextmanager
def eager() -> Iterator[None]:
    """Run all models of this process eager inside."""
    from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs

    with ExitStack() as stack:
        for graphs in active_graphs():
            stack.enter_context(graphs.paused())
        yield


def worker_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return what a run's process is told: what to train and how, where to write, and how many rounds."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--train", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def write_rounds(args: argparse.Namespace, run: Callable[[int], Round]) -> None:
    """Make rounds, and write what came of them.

    Args:
        args: As `worker_arguments` returns them.
        run: Makes a round, by its number.
    """
    done = []
    for number in range(args.rounds):
        done.append(run(number).as_dict())
        print(f"round {number}: {done[-1]['loss']:.6f}", flush=True)
    args.out.write_text(json.dumps({"rounds": done, **_found_on_graphs()}))


def _found_on_graphs() -> dict[str, Any]:
    """Return statistics of all graphs of this process, and how many parts of a model are on graphs."""
    from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs

    found = list(active_graphs())
    return {
        "graphs": [graphs.statistics().as_dict() for graphs in found],
        "parts": len({graphs.workload.title for graphs in found}),
    }
