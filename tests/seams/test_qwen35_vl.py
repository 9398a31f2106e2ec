"""Qwen3.5-VL on vision graphs: Bridge's Qwen3-VL model with Qwen3.5's vision configuration, which has no deepstack."""

import pytest
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.options import OptionError, VisionGraphOptions, vision_options
from bridge_cg_plugin.upstream.encoders.qwen3_vl import QWEN3_VL
from bridge_cg_plugin.upstream.encoders.registry import find_encoder
from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper

from ..unit import vlm
from ..unit.towers import DEFAULTS, assert_close

SAMPLES = [vlm.sample(images, seed) for seed, images in enumerate(([(4, 4)], [], [(2, 4), (4, 6)]))]


@pytest.mark.parametrize("modules, frozen", [((), False), ((), True), (("attn",), False), (("mlp",), False)], ids=str)
def test_a_step_on_graphs_is_eagers(active, modules, frozen):
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
        options=VisionGraphOptions(**{**DEFAULTS, "modules": modules}),
        executor=ReferenceExecutor(),
    )
    helper.create_cudagraphs()
    replayed = trainer.step(SAMPLES)
    layers = len(model.vision_model.decoder.layers)
    assert helper.graphs.statistics().fallbacks == {}
    assert helper.graphs.statistics().replays == 2 * (layers if modules else 1)
    helper.delete_cuda_graphs()
    assert_close([loss for loss in replayed[0]], [loss for loss in expected[0]], 1e-6)
    assert_close(replayed[1], expected[1])


@pytest.mark.parametrize("name", ["Qwen35VLModelProvider", "Qwen35VLMoEModelProvider"])
def test_its_providers_take_the_options_and_refuse_as_qwen3_vls(active, name):
    from megatron.bridge.models.qwen_vl import qwen35_vl_provider

    kind = getattr(qwen35_vl_provider, name)
    provider = kind(vision_cuda_graph_impl="transformer_engine", vision_cuda_graph_buckets=[64, 128])
    assert vision_options(provider, 4).buckets == (64, 128)
    with pytest.raises(OptionError, match="a multiple of 4, the patches of one embedding"):
        vision_options(kind(vision_cuda_graph_impl="transformer_engine", vision_cuda_graph_buckets=[66]), 4)
    assert not hasattr(Qwen3_5VisionConfig(), "deepstack_visual_indexes")
