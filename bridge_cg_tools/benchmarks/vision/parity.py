"""Parity of replays with eager: many mixes of images and video from the same captures."""

import os
import random

from bridge_cg_tools.benchmarks.records.results import provenance

FORWARD_LIMIT = 2e-3
NOISE_FACTOR = 1.5
DETERMINISTIC_LIMIT = 2e-3
BUCKETS = (4, 240, 768, 784, 1024, 2304, 3136, 4096, 6720, 8192)
MAX_FRAMES = 64


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


def measure(repeats: int) -> list[dict]:
    """Replay every mix from one set of captures and compare with two eager runs."""
    import torch

    from bridge_cg_plugin.graphs.fallback import Fallback
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.hooks.vision_helper import VisionTECudaGraphHelper
    from bridge_cg_tools.benchmarks.models import tower

    tower.start_process()
    model = tower.build_tower()
    grads = tower.MainGrads(model)
    deterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    batches = {name: tower.make_batch(grid, model, seed=i) for i, (name, grid) in enumerate(mixes().items())}

    def run(batch):
        grads.zero()
        outputs = tower.step(model, batch)
        return outputs, grads.copy()

    buckets = tuple(b for b in BUCKETS if b <= 2304) if deterministic else BUCKETS
    options = VisionGraphOptions(
        impl="transformer_engine", buckets=buckets, slots=1, max_frames=MAX_FRAMES, kernels="exact", strict=True
    )
    helper = VisionTECudaGraphHelper(model, model.config, options=options)
    helper.create_cudagraphs()
    records = []
    for _ in range(repeats):
        records = []
        for name, batch in batches.items():
            before = dict(helper.graphs.statistics().fallbacks)
            found = helper.graphs._regions[0].choose(_as_vision_batch(batch))
            bucket = None if isinstance(found, Fallback) else found
            if bucket is None and deterministic:
                continue  # eager itself would run, often out of memory: deterministic attention needs much workspace
            if bucket is not None:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            grads.zero()
            outputs = tower.step(model, batch)
            torch.cuda.set_sync_debug_mode("default")
            replayed = grads.copy()
            with helper.graphs.paused():
                (first, first_grads), (_, second_grads) = run(batch), run(batch)
            fallbacks = helper.graphs.statistics().fallbacks
            reason = next((r for r, n in fallbacks.items() if n != before.get(r, 0)), None)
            records.append(
                {
                    "case": name,
                    "mode": "plugin_deterministic" if deterministic else "plugin",
                    "tokens": batch.tokens,
                    "images": len(mixes()[name]),
                    "bucket": bucket and str(bucket),
                    "slots": 1,
                    "fallback": reason,
                    "forward_rel": tower.largest_relative(outputs, first),
                    "grad_rel": tower.largest_relative(replayed, first_grads),
                    "grad_worst": worst_parameter(model, replayed, first_grads),
                    "grad_noise": tower.largest_relative(second_grads, first_grads),
                    **provenance(repeats, 0),
                }
            )
    print(helper.graphs.report())
    return records


def worst_parameter(model, actual, expected) -> str:
    """Return the name of the parameter whose gradient differs most."""
    from bridge_cg_tools.benchmarks.models import tower

    names = [name for name, p in model.named_parameters() if p.requires_grad]
    differences = [tower.relative(a, e) for a, e in zip(actual, expected, strict=True)]
    return names[differences.index(max(differences))]


def _as_vision_batch(batch):
    from bridge_cg_plugin.vision.batch import VisionBatch
    from bridge_cg_plugin.vision.host_grids import as_grid

    return VisionBatch(batch.pixels, batch.grid, as_grid(batch.grid.cpu()))


def failures(records: list[dict]) -> list[str]:
    """Return what misses its limit."""
    missed = []
    noise = max(r["grad_noise"] for r in records if r["mode"] == "plugin")
    for r in records:
        deterministic = r["mode"] == "plugin_deterministic"
        limit = DETERMINISTIC_LIMIT if deterministic else NOISE_FACTOR * max(r["grad_noise"], noise)
        if not r["forward_rel"] <= FORWARD_LIMIT:
            missed.append(f"{r['mode']} {r['case']}: forward {r['forward_rel']:.2e} > {FORWARD_LIMIT:.0e}")
        if not r["grad_rel"] <= limit:
            missed.append(f"{r['mode']} {r['case']}: gradient {r['grad_rel']:.2e} > {limit:.2e}")
    return missed
