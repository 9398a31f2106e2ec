"""Graphs of packed documents on Bridge's recipes: chosen by `cuda_graphs` where a recipe packs."""

import pytest

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.recipes import with_graphs
from bridge_cg_plugin.upstream.hooks import recipes
from bridge_cg_plugin.upstream.hooks.graph_fields import read_options
from bridge_cg_plugin.upstream.seams.patches import bridge_release

from .test_recipes import PACKED_BASES, changed, gpus_of, launched

pytestmark = pytest.mark.skipif(
    not recipes.PATCHES[0].seam.expected_in(bridge_release()),
    reason="the recipes are those of a later megatron-bridge",
)
OFFLINE_FIELDS = {"dataset.pad_to_max_length", "dataset.offline_packing_specs.pad_cu_seqlens"}

every_packed_base = pytest.mark.parametrize("base", PACKED_BASES)


@every_packed_base
def test_a_launch_captures_all_layers_for_as_many_documents_as_warm_up_shows(bridge, base):
    config = with_graphs(base)
    launched(config, gpus_of(bridge, base))
    options = read_options(config)
    assert options.packed.max_packed_seqs == "auto" and not options.language_model.modules
    assert options.language_model.impl == "transformer_engine"
    assert config.rng.te_rng_tracker and config.model.use_te_rng_tracker


@every_packed_base
def test_packs_that_were_made_offline_are_padded_to_one_length(bridge, base):
    plain, graphs = getattr(bridge, base)(), with_graphs(base)
    for config in (plain, graphs):
        launched(config, gpus_of(bridge, base))
    offline = getattr(plain.dataset, "enable_offline_packing", False)
    assert OFFLINE_FIELDS.intersection(changed(plain, graphs)) == (OFFLINE_FIELDS if offline else set())


@every_packed_base
def test_dropout_keeps_the_language_model_eager_unless_its_graphs_were_set_explicitly(bridge, base, capsys):
    config = with_graphs(base)
    config.model.hidden_dropout = 0.1
    launched(config, gpus_of(bridge, base))
    assert not read_options(config).language_model.enabled
    table = "".join(capsys.readouterr().out.replace("[bridge-cg]", "").split())  # cells are wrapped at any place
    assert "languagemodeleager" in table and "model.hidden_dropout=" in table
    config = with_graphs(base, options="cuda_graph_impl=transformer_engine cuda_graph_max_packed_seqs=8")
    config.model.hidden_dropout = 0.1
    with pytest.raises(OptionError, match="hidden_dropout"):
        launched(config, gpus_of(bridge, base))


def test_data_that_stop_packing_after_a_preset_was_built_put_the_whole_language_model_on_graphs(bridge):
    config = bridge.qwen3_vl_8b_vision_graphs_h200_sft_config()
    config.dataset.enable_in_batch_packing = False
    launched(config, 2)
    found = read_options(config)
    assert found.language_model.impl == "full_iteration" and not found.packed.enabled
