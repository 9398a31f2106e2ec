"""Train over several GPUs, eager twice and with vision graphs once, and write what came out as records.

    python scripts/performance/bench_parallel.py --small
    torchrun --standalone --nproc_per_node 4 scripts/performance/bench_parallel.py --layouts TP2 DP4

Layouts that need fewer GPUs than there are go side by side on GPUs of their own. Times count from runs that have their
GPUs to themselves; with --untimed the three runs of a layout go at once and no time is kept.
"""

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.photographs import gpu  # noqa: E402
from examples.photographs.layout import Layout  # noqa: E402
from examples.photographs.processes import TrainingFailed, TrainingProcess  # noqa: E402
from scripts.performance.results import output_path, provenance, put_record  # noqa: E402

LAYOUTS = {
    str(layout): layout
    for layout in (
        Layout(),
        Layout(data=2),
        Layout(tensor=2),
        Layout(pipeline=2),
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
    parser.add_argument("--global-batch", type=int, default=8, help="samples of a step, whatever the layout")
    parser.add_argument("--per-gpu-batch", type=int, help="samples of a step for each GPU instead: weak scaling")
    parser.add_argument("--small", action="store_true", help="a tower of 6 layers and few image sizes")
    parser.add_argument("--untimed", action="store_true", help="the runs of a layout at once, without times")
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
        self._free = [threading.Lock() for _ in range(gpus)]
        self._writing = threading.Lock()

    def run(self, layouts: Sequence[Layout]) -> list[bool]:
        """Run the layouts; returns for each whether graphs trained the same.

        Raises:
            ValueError: A layout needs more GPUs than there are.
        """
        for layout in layouts:
            if layout.gpus > len(self._free):
                raise ValueError(f"--layouts {layout}: it needs {layout.gpus} GPUs, allowed here are {len(self._free)}")
        with ThreadPoolExecutor(len(layouts)) as pool:  # all import while the first train
            placed = zip(layouts, place([layout.gpus for layout in layouts], len(self._free)), strict=True)
            return list(pool.map(lambda pair: self._layout(*pair), placed))

    def _layout(self, layout: Layout, devices: tuple[int, ...]) -> bool:
        processes: list[TrainingProcess] = []
        try:
            processes += [TrainingProcess(self._log(layout, mode), layout.gpus, devices) for mode in MODES]
            for process in processes:
                process.wait_until_ready()
            for device in devices:  # in one order, so that no two layouts wait for each other
                self._free[device].acquire()
            try:
                runs = self._train(processes, self._words(layout))
            finally:
                for device in devices:
                    self._free[device].release()
        except TrainingFailed as error:
            self._write_error(layout, error)
            return False
        finally:
            for process in processes:
                process.close()
        return self._write(layout, runs)

    def _log(self, layout: Layout, mode: str) -> Path | None:
        folder = self._args.logs
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{layout}_{mode}.log".replace(" ", "_") if folder is not None else None

    def _words(self, layout: Layout) -> list[str]:
        each = self._args.per_gpu_batch
        samples = each * layout.gpus if each else self._args.global_batch
        words = ["--steps", str(self._args.steps), "--global-batch", str(samples), *layout.words()]
        words += ["--language-model", "6x2048"] if layout.pipeline == 4 else []
        return [*words, "--small", "--loader-workers", "0"] if self._args.small else words

    def _train(self, processes: Sequence[TrainingProcess], words: list[str]) -> list[dict[str, Any]]:
        def train(process: TrainingProcess, mode: str) -> dict[str, Any]:
            return process.train("graphs" if mode == "plugin" else "eager", words)

        if not self._args.untimed:
            return [train(process, mode) for process, mode in zip(processes, MODES, strict=True)]
        with ThreadPoolExecutor(len(MODES)) as pool:
            return [{**run, "step_ms": None} for run in pool.map(train, processes, MODES)]

    def _write(self, layout: Layout, runs: list[dict[str, Any]]) -> bool:
        with self._writing:
            same = gpu.compare(runs[:-1], runs[-1], self._words(layout), self._args.steps, None)
            times = [gpu.median_ms(run) for run in runs]
            for mode, run, ms in zip(MODES, runs, times, strict=True):
                record = {**self._origin(layout, mode), "ms": ms, "losses": run["losses"]}
                record |= {"grad_norms": run["grad_norms"], "peak_gb": run["peak_gb"], "graphs": run["graphs"]}
                record["rank_peak_gb"] = [rank["peak_gb"] for rank in run.get("ranks", [run])]
                record["inside_spread"] = same if mode == "plugin" else None
                if ms is not None:
                    record["ratio"] = ms / min(times[:-1]) if mode == "plugin" else 1.0
                put_record(self._path, record)
        return same

    def _write_error(self, layout: Layout, error: TrainingFailed) -> None:
        print(f"{layout}: {error}", flush=True)
        said = str(error).strip().splitlines()
        with self._writing:
            put_record(self._path, {**self._origin(layout, "plugin"), "error": f"{said[0]}: {said[-1]}"[:300]})

    def _origin(self, layout: Layout, mode: str) -> dict[str, Any]:
        args = self._args
        case = f"{layout}{'_small' if args.small else ''}{'_weak' if args.per_gpu_batch else ''}".replace(" ", "_")
        return {"case": case, "mode": mode, **provenance(max(args.steps - gpu.SKIPPED, 0), 1234)}


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
