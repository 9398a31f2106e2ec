"""Qwen3.5-VL on vision graphs: Bridge's Qwen3-VL model with Qwen3.5's vision configuration, which has no deepstack."""

import pytest

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.encoders.qwen3_vl import QWEN3_VL
from bridge_cg_plugin.upstream.encoders.registry import find_encoder
from bridge_cg_plugin.upstream.hooks.helpers import VisionTECudaGraphHelper

from ..unit import vlm
from ..unit.towers import DEFAULTS, assert_close

SAMPLES = [vlm.sample(images, seed) for seed, images in enumerate(([(4, 4)], [], [(2, 4), (4, 6)]))]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_on_graphs_is_eagers(active, frozen):
    with vlm.on_cpu():
        model = vlm.build(graphs=False, deepstack=False)
    model.vision_model.requires_grad_(not frozen)
    trainer = vlm.Trainer(model, graphs=False)
    expected = trainer.step(SAMPLES)
    found = find_encoder(model)
    assert found.family is QWEN3_VL and found.model is model.vision_model
    assert found.model.config.deepstack_visual_indexes == []
    helper = VisionTECudaGraphHelper(
        [model],
        found.model.config,
        options=VisionGraphOptions(**DEFAULTS),
        executor=ReferenceExecutor(),
    )
    helper.create_cudagraphs()
    replayed = trainer.step(SAMPLES)
    assert helper.graphs.statistics().fallbacks == {}
    assert helper.graphs.statistics().replays == 2
    helper.delete_cuda_graphs()
    assert_close([loss for loss in replayed[0]], [loss for loss in expected[0]], 1e-6)
    assert_close(replayed[1], expected[1])
