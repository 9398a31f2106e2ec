"""Packed-sequence graphs of hybrids and the installed release: its stack, mixer and metadata, Bridge's providers."""

from dataclasses import fields

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks.helpers.constructors import find_decoders
from bridge_cg_plugin.upstream.hooks.train_loop import DrivenBySteps
from bridge_cg_plugin.upstream.hooks.training_config import check_training_config
from bridge_cg_plugin.upstream.seams.registry.bridge import TRAIN

from ..unit.hybrids import hybrid_pack, new_hybrid, stand_ins
from ..unit.packs import ends, graphs_on, losses_and_gradients
from ..unit.towers import assert_close
from .test_packed import config_of

PACK = hybrid_pack((30, 180, 77))
# Older releases know the modules by another name.
(MODULES,) = [f.name for f in fields(TransformerConfig) if f.name == "cuda_graph_modules"] or ["cuda_graph_scope"]


@pytest.fixture(autouse=True)
def kernels():
    with stand_ins():
        yield


@pytest.mark.parametrize("modules", [[], ["mamba"]], ids=["all layers", "mamba"])
def test_a_hybrid_of_this_release_replays(active, modules):
    model = new_hybrid()
    expected = losses_and_gradients(model, PACK)
    with graphs_on(model, PACK, **{MODULES: modules}) as graphs:
        found = losses_and_gradients(model, PACK)
        assert graphs.statistics().replays == len(graphs._regions) == (2 if modules else 1)
    assert_close([found[0], *found[1]], [expected[0], *expected[1]])


def test_the_loop_gets_the_plugins_helper_for_packed_hybrids_only(active):
    model = new_hybrid()
    made = active[TRAIN].TECudaGraphHelper
    assert isinstance(made.__new__(made, [model], model.config), made)
    model.config.cuda_graph_max_packed_seqs = 4
    helper = made(model=[model], config=model.config, seq_length=64, micro_batch_size=1, num_microbatches=1)
    assert type(helper) is DrivenBySteps and find_decoders([model]) == [model.decoder]


def test_metadata_of_a_pack_on_graphs_is_upstreams_to_the_bit(active):
    """Also with offsets that repeat and with a tail behind them, as Bridge's padded packs have."""
    cases = [(ends((3, 0, 5)), 8), (ends((3, 5)), 12), (ends((3, 5), repeats=4), 20)]

    def found():
        return [PackedSeqParams(cu_seqlens_q=offsets, total_tokens=tokens).seq_idx for offsets, tokens in cases]

    upstreams = found()
    with graphs_on(new_hybrid(), PACK, capture=False):
        ours = found()
    for a, b in zip(ours, upstreams, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape


def test_a_packed_hybrids_configuration(active):
    check_training_config(config_of(hybrid_layer_pattern="M*-M"))
    check_training_config(config_of(hybrid_layer_pattern="M*-M", cuda_graph_modules=["attn", "mamba"]))
    check_training_config(config_of(hybrid_layer_pattern="M*ME", num_moe_experts=8))
    with pytest.raises(OptionError, match="attn,moe_router,mamba"):
        check_training_config(config_of(hybrid_layer_pattern="M*ME", num_moe_experts=8, expert_tensor_parallel_size=2))
