"""The helper that the train loop drives: finding the encoder, slots, options."""

from types import SimpleNamespace

import pytest
from torch import nn

from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_helpers
from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import (
    VisionTECudaGraphHelper,
    get_vision_cuda_graph_seq_length,
)

from .mixes import MIXED
from .towers import assert_close, new_helper, new_tower, results


class Holder(nn.Module):
    def __init__(self, name, inner, config=None):
        super().__init__()
        setattr(self, name, inner)
        if config is not None:
            self.config = config


def test_a_model_without_an_encoder_is_left_alone():
    for model in (nn.Linear(2, 2), [nn.Linear(2, 2)], Holder("module", nn.Linear(2, 2)), []):
        before = len(active_helpers())
        helper = VisionTECudaGraphHelper(model, new_tower().config, 64, 1, 2)
        helper.create_cudagraphs()
        assert helper.graphs_created() is False
        helper.cuda_graph_set_manual_hooks()
        helper.delete_cuda_graphs()
        helper.delete_cuda_graphs()
        assert len(active_helpers()) == before


@pytest.mark.parametrize("with_config", [True, False])
def test_a_helper_on_wrapped_chunks(with_config):
    tower = new_tower()
    chunk = Holder("module", Holder("vision_model", tower, tower.config if with_config else None))
    expected = results(tower, MIXED)
    helper = new_helper(tower, [chunk])
    helper.create_cudagraphs()
    assert helper in active_helpers()
    assert_close(results(tower, MIXED)[1], expected[1])
    assert helper.graphs.statistics().replays == 1
    helper.delete_cuda_graphs()
    assert helper not in active_helpers()
    assert not helper.graphs_created()
    assert "forward" not in tower.__dict__


def test_a_helper_reads_the_options_of_the_models_provider():
    tower = new_tower()
    for name, value in {
        "vision_cuda_graph_impl": "transformer_engine",
        "vision_cuda_graph_buckets": [32, 64],
        "vision_cuda_graph_scope": ["mlp"],
    }.items():
        setattr(tower.config, name, value)
    helper = VisionTECudaGraphHelper(tower, tower.config)
    assert helper.options.buckets == (32, 64) and helper.options.scope == ("mlp",)
    helper.create_cudagraphs()
    assert helper.graphs_created()
    helper.delete_cuda_graphs()


def test_the_seq_length_for_upstreams_log_line():
    assert get_vision_cuda_graph_seq_length(SimpleNamespace(max_vision_cuda_graph_seq_length=512)) == 512
    assert get_vision_cuda_graph_seq_length(SimpleNamespace(num_position_embeddings=256)) == 256
    assert get_vision_cuda_graph_seq_length(SimpleNamespace(), 77) == 77


def test_an_encoder_is_released_whose_helper_went_with_the_run(capsys):
    """Nobody holds the helper of a run that ended with an error; the encoder is on its graphs still."""
    model = new_tower()
    made = [new_helper(model)]
    made[0].create_cudagraphs()
    first = made.pop().graphs
    again = new_helper(model)
    assert not first.captured and again in active_helpers() and "CUDA graphs" in capsys.readouterr().out
    again.delete_cuda_graphs()
    assert "forward" not in vars(model) and not model._forward_pre_hooks
