"""The helper that the train loop drives: finding the encoder, slots, options."""

import pytest
from torch import nn

from bridge_cg_plugin.upstream.hooks.graph_helper import active_helpers
from bridge_cg_plugin.upstream.hooks.helpers import encoder_helper

from .mixes import MIXED
from .towers import assert_close, new_helper, new_tower, results


class Holder(nn.Module):
    def __init__(self, name, inner, config=None):
        super().__init__()
        setattr(self, name, inner)
        if config is not None:
            self.config = config


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
    assert helper.graphs is None
    assert "forward" not in tower.__dict__


def test_a_helper_reads_the_options_of_the_models_provider():
    tower = new_tower()
    for name, value in {
        "vision_cuda_graph_impl": "transformer_engine",
        "vision_cuda_graph_buckets": [32, 64],
        "vision_cuda_graph_scope": ["mlp"],
    }.items():
        setattr(tower.config, name, value)
    helper = encoder_helper(tower, tower.config)
    options = helper.graphs.workload.options
    assert options.buckets == (32, 64) and options.scope == ("mlp",)
    helper.create_cudagraphs()
    assert helper.graphs.captured
    helper.delete_cuda_graphs()


def test_an_encoder_is_released_whose_helper_went_with_the_run(capsys):
    model = new_tower()
    made = [new_helper(model)]
    made[0].create_cudagraphs()
    first = made.pop().graphs
    again = new_helper(model)
    assert not first.captured and again in active_helpers() and "CUDA graphs" in capsys.readouterr().out
    again.delete_cuda_graphs()
    assert "forward" not in vars(model) and not model._forward_pre_hooks
