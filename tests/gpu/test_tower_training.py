"""Bridge's pretrain(), unmodified, of Qwen2.5-VL and Gemma 3 with vision graphs; every run is a process of its own."""

import math

import pytest

from bridge_cg_tools.benchmarks.records.results import loss_distance

from .tower_training import BUCKETS
from .trainings import Training

STEPS, WARM_UP, MICROBATCHES = 8, 3, 4  # cuda_graph_warmup_steps is 3, the global batch 4


def run(mode, model, number=1):
    return Training(mode, (f"tower={model}",), STEPS, module="tests.gpu.tower_training", number=number)


@pytest.mark.parametrize(
    ("eager", "again", "graphs"),
    [(run("eager", model), run("eager", model, 2), run("graphs", model)) for model in BUCKETS],
    ids=BUCKETS,
)
def test_training_on_graphs_goes_as_eager(trained, eager, again, graphs):
    eager, again, graphs = trained(eager), trained(again), trained(graphs)
    spread, worst = (loss_distance(run["losses"], eager["losses"]) for run in (again, graphs))
    print(
        f"losses {eager['losses'][0]:.4f} to {eager['losses'][-1]:.4f}; two eager runs {spread:.1e}, graphs {worst:.1e}"
    )
    assert all(math.isfinite(loss) for loss in graphs["losses"])
    assert eager["losses"][-1] < eager["losses"][0]
    assert worst <= max(2 * spread, 5e-3)
    assert graphs["graphs"]["fallbacks"] == {}
    assert graphs["graphs"]["warmup_microbatches"] == WARM_UP * MICROBATCHES
    assert graphs["graphs"]["replays"] == (STEPS - WARM_UP) * MICROBATCHES
    assert "eager fallbacks: none" in graphs["output"]
