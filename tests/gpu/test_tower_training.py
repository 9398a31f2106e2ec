"""Bridge's pretrain(), unmodified, of Qwen2.5-VL and Gemma 3 with vision graphs; every run is a process of its own."""

import math
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.photographs.processes import TrainingProcess

from .tower_training import BUCKETS

STEPS = 8
LIMIT_S = 150.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the result of every model's run, eager twice and with graphs; all of them train side by side."""
    folder = tmp_path_factory.mktemp("towers")
    wanted = [(model, name) for model in BUCKETS for name in ("eager", "eager again", "graphs")]
    processes = {
        key: TrainingProcess(folder / f"{key[0]} {key[1]}.log", module="tests.gpu.tower_training") for key in wanted
    }

    def train(key):
        processes[key].wait_until_ready()
        words = ["--model", key[0], "--steps", str(STEPS)]
        return processes[key].train(key[1].split()[0], words, LIMIT_S)

    with ThreadPoolExecutor(len(wanted)) as pool:
        return dict(zip(wanted, pool.map(train, wanted), strict=True))


@pytest.mark.parametrize("model", BUCKETS)
def test_training_on_graphs_goes_as_eager(runs, model):
    eager, again, graphs = (runs[model, name] for name in ("eager", "eager again", "graphs"))
    spread = max(abs(a - b) / a for a, b in zip(eager["losses"], again["losses"], strict=True))
    worst = max(abs(a - b) / a for a, b in zip(eager["losses"], graphs["losses"], strict=True))
    times = [statistics.median(run["step_ms"][5:]) for run in (eager, graphs)]
    print(
        f"{model}: losses {eager['losses'][0]:.4f} to {eager['losses'][-1]:.4f}; two eager runs {spread:.1e}, graphs "
        f"{worst:.1e}; steps {times[0]:.0f} ms eager, {times[1]:.0f} ms on graphs, side by side with others; "
        f"{graphs['graphs']}"
    )
    assert all(math.isfinite(loss) for loss in graphs["losses"])
    assert eager["losses"][-1] < eager["losses"][0]
    assert worst <= max(2 * spread, 5e-3)
    assert graphs["graphs"]["fallbacks"] == {}
    assert graphs["graphs"]["warmup_microbatches"] == 3 * 4  # cuda_graph_warmup_steps of 4 microbatches
    assert graphs["graphs"]["replays"] == (STEPS - 3) * 4
