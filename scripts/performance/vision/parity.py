"""Parity of replays with eager: many mixes of images and video from the same captures, or from what they ask for."""

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper
from bridge_cg_plugin.vision.batch import VisionBatch
from bridge_cg_plugin.vision.host_grids import as_grid
from scripts.performance.measuring.measure import on_gpu
from scripts.performance.models import tower

FORWARD_LIMIT = 2e-3
NOISE_FACTOR = 1.5
DETERMINISTIC_LIMIT = 2e-3
BUCKETS = (4, 240, 768, 784, 1024, 2304, 3136, 4096, 6720, 8192)
MAX_FRAMES = 64
# Tokens of the largest bucket under deterministic algorithms.
LARGEST_DETERMINISTIC = 2304
# Rounds over all mixes until each is replayed from what was recorded for it.
MOST_ROUNDS = 8
ON_DEMAND = "_on_demand"

Record = dict[str, Any]


def mixes() -> dict[str, list[tuple[int, int, int]]]:
    """Return named grids: edges of every limit first, then random mixes with a fixed seed."""
    cases = {
        "one_image": [(1, 28, 28)],
        "one_merge_unit": [(1, 2, 2)],
        "many_merge_units": [(1, 2, 2)] * 60,
        "exactly_a_bucket": [(1, 32, 32)],
        "bucket_plus_one_unit": [(1, 32, 32), (1, 2, 2)],
        "below_a_bucket": [(1, 48, 46)],
        "four_equal": [(1, 28, 28)] * 4,
        "wide_and_tall": [(1, 2, 200), (1, 200, 2)],
        "eight_mixed": [
            (1, h, w) for h, w in ((16, 24), (28, 28), (32, 20), (48, 48), (12, 12), (40, 30), (24, 36), (20, 20))
        ],
        "video": [(16, 20, 20)],
        "long_video_small_frames": [(60, 8, 8)],
        "video_and_images": [(4, 16, 20), (1, 28, 28), (1, 10, 14)],
        "image_then_video": [(1, 28, 28), (8, 12, 12)],
        "max_frames": [(1, 4, 6)] * MAX_FRAMES,
        "max_frames_plus_one": [(1, 4, 6)] * (MAX_FRAMES + 1),
        "too_many_tokens": [(1, 92, 92)],
        "largest_bucket": [(1, 64, 128)],
        "one_big_many_small": [(1, 64, 64), *[(1, 4, 4)] * 30],
    }
    rng = random.Random(7)
    for index in range(6):
        grid = [(1, 2 * rng.randint(2, 8), 2 * rng.randint(2, 8)) for _ in range(rng.randint(2, 16))]
        cases[f"small_{index}"] = grid
    for index in range(10):
        count = rng.randint(1, 12)
        grid = [(rng.choice((1, 1, 1, 2)), 2 * rng.randint(1, 16), 2 * rng.randint(1, 16)) for _ in range(count)]
        cases[f"random_{index}"] = grid
    return cases


class Comparison:
    """The tower, eager and on graphs of all buckets or of those that mixes ask for.

    Args:
        deterministic: Whether algorithms are; then larger mixes are left out.
        on_demand: Whether buckets are chosen and recorded while steps run, none before the first one.
    """

    def __init__(self, deterministic: bool, on_demand: bool = False) -> None:
        self.deterministic, self.on_demand = deterministic, on_demand
        self.model = tower.build_tower()
        self.grads = tower.MainGrads(self.model)
        buckets = tuple(b for b in BUCKETS if b <= LARGEST_DETERMINISTIC) if deterministic else BUCKETS
        chosen: dict[str, Any] = {"buckets": buckets}
        if on_demand:
            chosen = {"capture_mode": "on_demand", "max_seq_length": max(buckets), "cost_fallback": False}
        options = VisionGraphOptions(
            impl="transformer_engine", slots=1, max_frames=MAX_FRAMES, kernels="exact", strict=True, **chosen
        )
        helper = VisionTECudaGraphHelper(self.model, self.model.config, options=options)
        helper.create_cudagraphs()
        self.graphs: Any = helper.graphs

    @property
    def mode(self) -> str:
        """The mode's name in records."""
        return "plugin" + "_deterministic" * self.deterministic + ON_DEMAND * self.on_demand

    def record(self, name: str, batch: tower.Batch) -> Record | None:
        """Replay a mix and compare it with two eager runs.

        Returns:
            What was found; None of a mix that has no bucket under deterministic algorithms: eager itself would run,
            often out of memory, as deterministic attention needs much workspace.
        """
        before = dict(self.graphs.statistics().fallbacks)
        found = self.graphs._regions[0].choose(_as_vision_batch(batch))
        bucket = None if isinstance(found, Fallback) else found
        if bucket is None and self.deterministic and found is not Fallback.NOT_CAPTURED_YET:
            return None
        outputs, replayed = self._without_waiting(batch) if bucket is not None else self._run(batch)
        with self.graphs.paused():
            (first, first_grads), (_, second_grads) = self._run(batch), self._run(batch)
        fallbacks = self.graphs.statistics().fallbacks
        return {
            "case": name,
            "mode": self.mode,
            "tokens": batch.tokens,
            "images": len(batch.rows),
            "bucket": bucket and str(bucket),
            "slots": 1,
            "fallback": next((r for r, n in fallbacks.items() if n != before.get(r, 0)), None),
            "forward_rel": tower.largest_relative(outputs, first),
            "grad_rel": tower.largest_relative(replayed, first_grads),
            "grad_worst": worst_parameter(self.model, replayed, first_grads),
            "grad_noise": tower.largest_relative(second_grads, first_grads),
        }

    def _run(self, batch: tower.Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs and the gradients of one step."""
        self.grads.zero()
        outputs = tower.step(self.model, batch)
        return outputs, self.grads.copy()

    def _without_waiting(self, batch: tower.Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the same of a step that must not wait for the device."""
        self.grads.zero()
        with no_waiting():
            outputs = tower.step(self.model, batch)
        return outputs, self.grads.copy()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make each wait for the device inside an error."""
    if not on_gpu():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def measure(repeats: int, on_demand: bool = False) -> list[Record]:
    """Replay every mix so often, and compare the last replay with two eager runs.

    Args:
        repeats: How often each mix is replayed.
        on_demand: Whether mixes get their buckets while steps run, instead of all from one set of captures. Each mix is
            then a step; rounds over all of them are repeated until each has been replayed.
    """
    tower.start_process()
    comparison = Comparison(os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0", on_demand)
    batches = {name: tower.make_batch(grid, comparison.model, seed=i) for i, (name, grid) in enumerate(mixes().items())}
    if on_demand:
        for _ in range(MOST_ROUNDS):
            if not any(r["fallback"] == Fallback.NOT_CAPTURED_YET for r in round_of(comparison, batches)):
                break
    records: list[Record] = []
    for _ in range(repeats):
        records = [{**record, **provenance(repeats, 0)} for record in round_of(comparison, batches)]
    print(comparison.graphs.report())
    return records


def round_of(comparison: Comparison, batches: Mapping[str, tower.Batch]) -> list[Record]:
    """Run each mix in a step of its own; returns what was found of those that have a bucket or ask for one."""
    records = []
    for name, batch in batches.items():
        with comparison.graphs.step():
            records.append(comparison.record(name, batch))
    return [record for record in records if record is not None]


def worst_parameter(model: nn.Module, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Return the name of the parameter whose gradient differs most."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    differences = [tower.relative(a, e) for a, e in zip(actual, expected, strict=True)]
    return names[differences.index(max(differences))]


def _as_vision_batch(batch: tower.Batch) -> VisionBatch:
    return VisionBatch(batch.pixels, batch.grid, as_grid(batch.grid.cpu()))


def failures(records: list[Record]) -> list[str]:
    """Return what misses its limit."""
    missed = []
    noise = max((r["grad_noise"] for r in records if not _is_deterministic(r)), default=0.0)
    for r in records:
        deterministic = _is_deterministic(r)
        limit = DETERMINISTIC_LIMIT if deterministic else NOISE_FACTOR * max(r["grad_noise"], noise)
        if not r["forward_rel"] <= FORWARD_LIMIT:
            missed.append(f"{r['mode']} {r['case']}: forward {r['forward_rel']:.2e} > {FORWARD_LIMIT:.0e}")
        if not r["grad_rel"] <= limit:
            missed.append(f"{r['mode']} {r['case']}: gradient {r['grad_rel']:.2e} > {limit:.2e}")
        if r["fallback"] == Fallback.NOT_CAPTURED_YET:
            missed.append(f"{r['mode']} {r['case']}: no bucket was recorded for it")
    return missed


def _is_deterministic(record: Record) -> bool:
    return str(record["mode"]).startswith("plugin_deterministic")


def without_modes(records: Iterable[Record], on_demand: bool) -> list[Record]:
    """Return the records of the other modes than those that are measured with or without buckets on demand."""
    return [record for record in records if record["mode"].endswith(ON_DEMAND) != on_demand]
