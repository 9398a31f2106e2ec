"""Packed-sequence graphs and Bridge: the train loop's helper, batch steps, providers, configurations."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch

import bridge_cg_plugin
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks.batches import PACK_OFFSETS
from bridge_cg_plugin.upstream.hooks.helpers.constructors import decoder_helpers, find_decoders
from bridge_cg_plugin.upstream.hooks.train_loop import DrivenBySteps
from bridge_cg_plugin.upstream.seams.registry.bridge import TRAIN
from bridge_cg_plugin.upstream.seams.registry.engine import GPT_STEP

from ..unit.packs import new_model


def test_the_loop_gets_the_plugins_helper_for_packs(active):
    model = new_model()
    model.config.cuda_graph_max_packed_seqs = 4
    helper = active[TRAIN].TECudaGraphHelper(
        model=[model], config=model.config, seq_length=64, micro_batch_size=1, optimizers=[], num_microbatches=1
    )
    assert type(helper) is DrivenBySteps and not helper.graphs_created()
    assert "forward" not in vars(model.decoder)


def test_the_loop_gets_upstreams_helper_otherwise(active):
    made = active[TRAIN].TECudaGraphHelper
    bridge_cg_plugin.deactivate()
    upstreams = active[TRAIN].TECudaGraphHelper
    assert made is not upstreams and made.__mro__[1] is upstreams
    config = SimpleNamespace(cuda_graph_impl="transformer_engine")
    assert isinstance(made.__new__(made, [], config), upstreams)
    assert inspect.signature(made.__init__) == inspect.signature(upstreams.__init__)


def test_the_loop_calls_nothing_that_the_helper_lacks(active):
    train = active[TRAIN]
    source = inspect.getsource(inspect.unwrap(train.train)) + inspect.getsource(
        inspect.unwrap(train._delete_cuda_graphs)
    )
    called = set(re.findall(r"(?<!vision_)\bcuda_graph_helper\.(\w+)", source))
    assert called >= {"graphs_created", "create_cudagraphs"}
    for name in called:
        assert hasattr(DrivenBySteps, name), name


@pytest.mark.parametrize(
    "names", [("language_model",), ("module", "module"), ("module", "module", "language_model"), ()]
)
def test_the_decoder_is_found_under_any_wrapper(names):
    model = new_model()
    held = model
    for name in reversed(names):
        holder = torch.nn.Module()
        setattr(holder, name, held)
        held = holder
    assert find_decoders([torch.nn.Linear(2, 2), held]) == [model.decoder]


def fake_batch():
    offsets = torch.tensor([[0, 5, 12, -1, -1]], dtype=torch.int32)
    return {
        "tokens": torch.zeros(1, 12, dtype=torch.long),
        "cu_seqlens_q": offsets[:, :3].clone(),
        "cu_seqlens_kv": offsets[:, :3].clone(),
        "cu_seqlens": offsets,
        "max_seqlen_q": torch.tensor([[7]]),
    }


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens"])
def test_the_step_announces_offsets_that_it_moves(active, name):
    from bridge_cg_plugin.upstream.hooks import batches

    patch = next(p for p in batches.PATCHES if p.module == GPT_STEP)

    def get_batch_from_iterator(data_iterator):
        return {key: value.to("meta") for key, value in next(data_iterator).items()}

    moved = patch.make(get_batch_from_iterator)(iter([fake_batch()]))[name]
    before = PACK_OFFSETS.device_reads
    assert PACK_OFFSETS.values(moved.squeeze()[:3]) == (0, 5, 12)
    assert PACK_OFFSETS.device_reads == before
    assert active[GPT_STEP].get_batch_from_iterator.__wrapped__ is not None


def test_a_model_that_cannot_work_is_refused_by_the_helper_too(active):
    model = new_model(hidden_dropout=0.1)
    model.config.cuda_graph_max_packed_seqs = 4
    with pytest.raises(OptionError, match="hidden_dropout"):
        decoder_helpers([model], model.config, num_microbatches=1)
