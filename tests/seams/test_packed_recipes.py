"""Graphs of packed documents on Bridge's recipes."""

import pytest

from bridge_cg_plugin.options import OptionError, facts_of, packed_options
from bridge_cg_plugin.options.sources import collect
from bridge_cg_plugin.recipes import with_graphs
from bridge_cg_plugin.upstream.hooks import recipe_names
from bridge_cg_plugin.upstream.seams.patches import bridge_release

from .test_recipes import PACKED_BASES, every_packed_base, gpus_of, launched

pytestmark = pytest.mark.skipif(
    not recipe_names.PATCHES[0].seam.expected_in(bridge_release()),
    reason="the recipes are those of a later megatron-bridge",
)


def packed(base):
    return with_graphs(base, vision=False, max_packed_seqs=PACKED_BASES[base])


@every_packed_base
def test_the_options_are_of_whole_layers(bridge, base):
    config = packed(base)
    options = packed_options(config.model)
    assert options.max_packed_seqs == PACKED_BASES[base] and config.model.cuda_graph_modules == []
    assert config.rng.te_rng_tracker and config.model.use_te_rng_tracker


@every_packed_base
def test_bridges_own_recipe_packs_without_graphs(bridge, base):
    config = getattr(bridge, base)()
    launched(config, gpus_of(bridge, base))
    data = config.dataset
    assert getattr(data, "enable_offline_packing", False) or data.enable_in_batch_packing
    assert config.model.cuda_graph_impl == "none"


@every_packed_base
def test_validation_includes_the_plugins(bridge, base):
    config = packed(base)
    config.model.hidden_dropout = 0.1
    with pytest.raises(OptionError, match="hidden_dropout"):
        launched(config, gpus_of(bridge, base))


def test_a_hybrid_a_dense_model_and_a_vision_language_model_are_among_them(bridge):
    configs = {base: packed(base) for base in PACKED_BASES}
    hybrid = {base: facts_of(collect(config)).mamba for base, config in configs.items()}
    assert hybrid == {name: name.startswith("nemotron") for name in PACKED_BASES}
    assert type(configs["qwen3_8b_sft_config"].model).__name__ == "GPTModelProvider"
    vision_language = configs["qwen3_vl_8b_sft_config"]
    assert hasattr(vision_language.model, "vision_cuda_graph_impl")
    assert PACKED_BASES["qwen3_vl_8b_sft_config"] >= vision_language.train.micro_batch_size > 1


def test_the_vision_encoder_may_be_on_graphs_too(bridge):
    config = bridge.qwen3_vl_8b_packed_graphs_sft_config()
    assert config.model.vision_cuda_graph_impl == "none"
    config = with_graphs("qwen3_vl_8b_sft_config", max_packed_seqs=8)
    assert config.model.vision_cuda_graph_impl == "transformer_engine"
    launched(config, gpus_of(bridge, "qwen3_vl_8b_sft_config"))
    assert packed_options(config.model).enabled
