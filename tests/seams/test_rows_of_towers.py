"""Language models of Bridge's models around other encoders: their layers over padded rows replay as one region."""

from unittest import mock

import pytest

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.options.facts import Facts
from bridge_cg_plugin.upstream.hooks.any_loop import LOOPS
from bridge_cg_plugin.upstream.hooks.helpers import constructors as helpers
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from examples.photographs.small_tower import start_single_process

from ..unit import bridge_towers as towers
from ..unit.towers import assert_close, bridges_step
from ..unit.vlm import wrapper

IMAGES = [[(8, 8)], [(4, 6), (10, 8)], [], [(2, 2)]]
MODELS = [
    pytest.param(towers.build_qwen25_vl, towers.qwen25_sample, IMAGES, id="qwen2.5-vl"),
    pytest.param(towers.build_gemma3_vl, towers.gemma3_sample, [1, 2, 0, 3], id="gemma3-vl"),
    pytest.param(towers.build_glm45v, towers.glm45v_sample, IMAGES, id="glm-4.5v"),
    pytest.param(towers.build_qwen3_omni, towers.qwen3_omni_sample, IMAGES, id="qwen3-omni"),
]
OFF = {"vision_cuda_graph_impl": "none", "cuda_graph_warmup_steps": 1, "use_te_rng_tracker": True}


@pytest.fixture(autouse=True)
def process(active, monkeypatch):
    start_single_process()
    monkeypatch.setattr(helpers, "default_executor", lambda *_, **__: ReferenceExecutor())
    yield
    LOOPS.end_bridges()


def results(model, samples):
    """Train one step; returns the losses and the gradients by parameter."""
    model.zero_grad(set_to_none=True)

    def work():
        losses = []
        for sample in samples:
            losses.append(towers.loss_of(model, sample))
            losses[-1].backward()
        return losses

    losses = bridges_step([model], model.config, work)
    return [loss.detach() for loss in losses], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("build", "sample", "sizes"), MODELS)
def test_losses_and_gradients_are_eagers(build, sample, sizes):
    eager, graphs = build(**OFF), build(**OFF, cuda_graph_impl="full_iteration")
    if not Facts(model=graphs.config).rows:
        pytest.skip("this release's layers take masks")
    for step in range(3):
        samples = [sample(size, 10 * step + seed) for seed, size in enumerate(sizes)]
        expected, found = results(eager, samples), results(graphs, samples)
        assert_close(found[0], expected[0], 1e-6)
        names = [name for name, gradient in expected[1].items() if gradient.norm() > 1e-5]
        assert len(names) > 10
        assert_close([found[1][name] for name in names], [expected[1][name] for name in names], 2e-5)
    schedule = mock.MagicMock()
    wrapper(schedule, warmup_steps=0)(model=[graphs])  # megatron-core would capture the whole step
    schedule.assert_called_once_with(model=[graphs])
    (layers,) = active_graphs()
    statistics = layers.statistics()
    assert (layers.workload.group, statistics.fallbacks) == ("language_model_cuda_graph", {})
    assert (statistics.warmup_microbatches, statistics.replays) == (4, 8)
