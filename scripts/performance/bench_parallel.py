"""Train over several GPUs, eager twice and with vision graphs once, and write what came out as records.

    python scripts/performance/bench_parallel.py --small
    torchrun --standalone --nproc_per_node 4 scripts/performance/bench_parallel.py --layouts TP2 DP4

Every layout takes as many microbatches a step for each replica of the model, so DP2 and DP4 against one GPU are weak
scaling, and the others share one GPU's work. The first eager run and the graphed one have their GPUs to themselves; the
second eager one, whose times nobody needs, goes beside others of its kind. With --untimed all go at once.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import batched
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.photographs import gpu  # noqa: E402
from examples.photographs.layout import Layout  # noqa: E402
from examples.photographs.processes import TrainingFailed, TrainingProcess  # noqa: E402
from scripts.performance.results import output_path, provenance, put_record  # noqa: E402

LAYERS, WIDTH = 4, 2048  # of the language model; a pipeline may need more layers
LAYOUTS = {
    str(layout): layout
    for layout in (
        Layout(),
        Layout(data=2),
        Layout(tensor=2),
        Layout(pipeline=2),
        Layout(pipeline=2, chunks=2),
        Layout(context=2),
        Layout(tensor=2, pipeline=2),
        Layout(data=2, pipeline=2),
        Layout(data=4),
        Layout(tensor=4),
        Layout(pipeline=4),
    )
}
MUST = ("DP2", "TP2", "PP2", "CP2", "TP2xPP2", "DP2xPP2", "DP4")
MODES = ("eager1", "eager2", "plugin")
# Runs that go on without times share a GPU with so many of their kind.
SIDE_BY_SIDE = 3


def main(words: Sequence[str] | None = None) -> int:
    """Run the layouts and write records; returns 0 if graphs stayed inside eager's spread in all of them."""
    args = parse(words)
    if int(os.environ.get("RANK", 0)):
        return 0  # torchrun's first process starts those that train
    path = output_path(args.out, "parallel.jsonl")
    bench = Bench(args, path, gpus_here() if args.gpus is None else args.gpus)
    return 0 if all(bench.run([LAYOUTS[name] for name in args.layouts])) else 1


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=MUST, metavar="LAYOUT", help=", ".join(LAYOUTS)
    )
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of each run")
    parser.add_argument(
        "--microbatches", type=int, default=8, help="microbatches of a step, one sample each, for each model replica"
    )
    parser.add_argument("--small", action="store_true", help="a tower of 6 layers and few image sizes")
    parser.add_argument("--untimed", action="store_true", help="all runs side by side, without times")
    parser.add_argument("--gpus", type=int, help="GPUs to use; all without it")
    parser.add_argument("--logs", type=Path, help="folder for the runs' output; without it, it goes to this one's")
    parser.add_argument("--out", type=Path, help="file of records; docs/benchmarks/parallel.jsonl without it")
    return parser.parse_args(words)


def gpus_here() -> int:
    """Return how many GPUs this process sees."""
    import torch

    return torch.cuda.device_count()


class Bench:
    """The runs of several layouts on the GPUs of one machine.

    Args:
        args: The command line's arguments.
        path: File of records.
        gpus: GPUs to use.
    """

    def __init__(self, args: argparse.Namespace, path: Path, gpus: int) -> None:
        self._args, self._path = args, path
        self._gpus = Gpus(gpus)
        self._writing = threading.Lock()
        self._ms: dict[tuple[Layout, str], float] = {}

    def run(self, layouts: Sequence[Layout]) -> list[bool]:
        """Run the layouts; returns for each whether graphs trained the same.

        Raises:
            ValueError: A layout needs more GPUs than there are.
        """
        for layout in layouts:
            if layout.gpus > self._gpus.count:
                raise ValueError(
                    f"--layouts {layout}: it needs {layout.gpus} GPUs, allowed here are {self._gpus.count}"
                )
        jobs = list(in_order(layouts))
        places = place([layout.gpus for layout, _ in jobs], self._gpus.count)
        with ThreadPoolExecutor(len(jobs)) as pool:  # all import while the first train
            started = enumerate(zip(jobs, places, strict=True))
            futures = {job: pool.submit(self._train, turn, *job, devices) for turn, (job, devices) in started}
            # One GPU first, as others' scaling is told by it.
            first = sorted(layouts, key=lambda layout: layout.gpus > 1)
            same = {layout: self._finish(layout, futures) for layout in first}
        return [same[layout] for layout in layouts]

    def _finish(self, layout: Layout, futures: dict[tuple[Layout, str], Any]) -> bool:
        try:
            return self._write(layout, [futures[layout, mode].result() for mode in MODES])
        except TrainingFailed as error:
            self._write_error(layout, error)
            return False

    def _train(self, turn: int, layout: Layout, mode: str, devices: tuple[int, ...]) -> dict[str, Any]:
        process = TrainingProcess(self._log(layout, mode), layout.gpus, devices)
        timed = is_timed(mode) and not self._args.untimed
        try:
            with self._gpus.used(turn, devices, timed):
                process.wait_until_ready()
                began = time.monotonic()
                run = process.train("graphs" if mode == "plugin" else "eager", self._words(layout))
                print(f"{layout} {mode}: {time.monotonic() - began:.0f} s", flush=True)
        finally:
            process.close()
        return run if timed else {**run, "step_ms": None}

    def _log(self, layout: Layout, mode: str) -> Path | None:
        folder = self._args.logs
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{layout}_{mode}.log".replace(" ", "_") if folder is not None else None

    def _words(self, layout: Layout) -> list[str]:
        samples = self._args.microbatches * layout.data
        words = ["--steps", str(self._args.steps), "--global-batch", str(samples), *layout.words()]
        layers = layout.fitting_layers(LAYERS)
        words += ["--language-model", f"{layers}x{WIDTH}"] if layers != LAYERS else []
        return [*words, "--small", "--loader-workers", "0"] if self._args.small else words

    def _write(self, layout: Layout, runs: list[dict[str, Any]]) -> bool:
        with self._writing:
            same = gpu.compare(runs[:-1], runs[-1], self._words(layout), self._args.steps, None)
            times = {mode: gpu.median_ms(run) for mode, run in zip(MODES, runs, strict=True)}
            for mode, run in zip(MODES, runs, strict=True):
                record = {**self._origin(layout, mode), "ms": times[mode], "losses": run["losses"]}
                record |= {"grad_norms": run["grad_norms"], "peak_gb": run["peak_gb"], "graphs": run["graphs"]}
                record["rank_peak_gb"] = [rank["peak_gb"] for rank in run.get("ranks", [run])]
                record["microbatches"] = self._args.microbatches
                record["inside_spread"] = same if mode == "plugin" else None
                if times[mode] is not None:
                    record |= self._ratios(layout, mode, times[mode], times[MODES[0]])
                put_record(self._path, record)
        return same

    def _ratios(self, layout: Layout, mode: str, ms: float, eager_ms: float) -> dict[str, float]:
        """Return a run's time over eager's, and what its scaling keeps of one GPU's speed where that was measured."""
        self._ms[layout, mode] = ms
        ratios = {"ratio": ms / eager_ms}
        alone = self._ms.get((Layout(), mode))
        if layout == Layout(data=layout.data) and alone is not None:
            ratios["weak_scaling"] = alone / ms
            print(f"{layout} {mode}: weak scaling {alone / ms:.3f}", flush=True)
        return ratios

    def _write_error(self, layout: Layout, error: TrainingFailed) -> None:
        print(f"{layout}: {error}", flush=True)
        said = str(error).strip().splitlines()
        with self._writing:
            put_record(self._path, {**self._origin(layout, "plugin"), "error": f"{said[0]}: {said[-1]}"[:300]})

    def _origin(self, layout: Layout, mode: str) -> dict[str, Any]:
        args = self._args
        case = f"{layout}{'_small' if args.small else ''}".replace(" ", "_")
        return {"case": case, "mode": mode, **provenance(max(args.steps - gpu.SKIPPED, 0), 1234)}


class Gpus:
    """The GPUs of a machine: a timed run has its own to itself, others share one.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._turn = 0
        self._left = [SIDE_BY_SIDE] * count
        self._changed = threading.Condition()

    @contextmanager
    def used(self, turn: int, devices: tuple[int, ...], alone: bool) -> Iterator[None]:
        """Wait until all of these GPUs are free for a run whose turn it is, and hold them inside.

        Args:
            turn: Number of the run, from 0: none begins before those of lower numbers have begun.
            devices: Its GPUs.
            alone: Whether it has them to itself.
        """
        places = SIDE_BY_SIDE if alone else 1

        def may_begin() -> bool:
            return turn == self._turn and all(self._left[device] >= places for device in devices)

        with self._changed:
            self._changed.wait_for(may_begin)
            self._take(devices, places)
            self._turn += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            self._give_back(devices, places)

    def _take(self, devices: tuple[int, ...], places: int) -> None:
        for device in devices:
            self._left[device] -= places

    def _give_back(self, devices: tuple[int, ...], places: int) -> None:
        with self._changed:
            self._take(devices, -places)
            self._changed.notify_all()


def is_timed(mode: str) -> bool:
    """Whether a mode's times are wanted: of two eager runs the first one's are enough."""
    return mode != "eager2"


def in_order(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, str]]:
    """Yield the runs of layouts, some layouts' to their end before the next: what has ended is recorded."""
    for some in batched(layouts, SIDE_BY_SIDE):
        yield from ((layout, mode) for layout in some for mode in MODES if is_timed(mode))
        yield from ((layout, mode) for layout in some for mode in MODES if not is_timed(mode))


def place(sizes: Sequence[int], gpus: int) -> list[tuple[int, ...]]:
    """Return GPUs for each of several runs, those that need as many in turn on disjoint sets."""
    turns: dict[int, int] = {}
    placed = []
    for size in sizes:
        turn = turns[size] = turns.get(size, -1) + 1
        first = turn % (gpus // size) * size
        placed.append(tuple(range(first, first + size)))
    return placed


if __name__ == "__main__":
    sys.exit(main())
