"""Bridge's pretrain(), unmodified, of models around other encoders with graphs; every run is its own process."""

import math
from itertools import permutations

import pytest

from scripts.performance.records import loss_distance

from .towers import TOWERS
from .trainings import Training

STEPS, WARM_UP, MICROBATCHES = 12, 3, 4  # cuda_graph_warmup_steps is 3, the global batch 4
LOSSES, GRADIENT_NORMS = 5e-3, 2e-2


def run(mode, model, number=1):
    return Training(mode, (f"tower={model}",), STEPS, module="tests.gpu.tower_training", number=number)


@pytest.mark.parametrize(
    ("model", "eager", "graphs"),
    [
        (model, tuple(run("eager", model, number + 1) for number in range(tower.eager_runs)), run("graphs", model))
        for model, tower in TOWERS.items()
    ],
    ids=TOWERS,
)
def test_training_on_graphs_goes_as_eager(trained, model, eager, graphs):
    runs, graphs = list(map(trained, eager)), trained(graphs)
    eager = runs[0]
    print(f"losses {eager['losses'][0]:.4f} to {eager['losses'][-1]:.4f}")
    for figure, tolerance in (("losses", LOSSES), ("grad_norms", GRADIENT_NORMS)):
        spread = max(loss_distance(one[figure], other[figure]) for one, other in permutations(runs, 2))
        worst = loss_distance(graphs[figure], eager[figure])
        print(f"{figure}: {len(runs)} eager runs {spread:.1e}, graphs {worst:.1e}")
        assert all(math.isfinite(value) for value in graphs[figure])
        assert worst <= max(2 * spread, tolerance)
    assert eager["losses"][-1] < eager["losses"][0]
    print(*(line for line in graphs["output"].splitlines() if "eager's by" in line or "proofs:" in line), sep="\n")
    replays = (STEPS - WARM_UP) * MICROBATCHES
    assert graphs["graphs"]["fallbacks"] == {}
    assert graphs["graphs"]["warmup_microbatches"] == WARM_UP * MICROBATCHES
    assert graphs["graphs"]["replays"] == replays
    tower, last = TOWERS[model], graphs["step_graphs"][-1]
    assert (last["replays"], last["eager"]) == (tower.encoders * replays, 0)
    assert "eager fallbacks: none" in graphs["output"]
    rows = graphs["language_model_graphs"]
    print(f"language model: {rows['replays']} replays in {sorted(rows['buckets'])}")
    assert set(rows["fallbacks"]) <= {"not_captured_yet"}  # a length that warm-up did not show
    assert rows["replays"] + sum(rows["fallbacks"].values()) == replays and rows["replays"] > replays // 2
