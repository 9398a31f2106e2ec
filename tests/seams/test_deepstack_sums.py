"""The patch that sums gradients of deepstack features: when it acts, what it leaves alone, what upstream may change."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks import qwen3_vl
from bridge_cg_plugin.upstream.seams.seam import drift
from bridge_cg_plugin.upstream.seams.source_reader import SourceReader
from examples.photographs.small_tower import start_single_process


@pytest.fixture
def modelling(active):
    return importlib.import_module(qwen3_vl.SPLIT.module)


@pytest.fixture
def group():
    start_single_process()
    return distributed.group.WORLD


def model(group=None, **config):
    fields = {"sequence_parallel": True, "vision_deepstack_gradient_allreduce": True, **config}
    return SimpleNamespace(config=SimpleNamespace(**fields), pg_collection=SimpleNamespace(tp=group))


def called(modelling, of):
    """Return what a model's forward finds under the name of upstream's split."""
    return qwen3_vl._summing(lambda self: modelling.split_deepstack_embs)(of)


def test_a_value_that_is_none_is_refused(modelling):
    with pytest.raises(OptionError, match="vision_deepstack_gradient_allreduce='maybe'"):
        called(modelling, model(vision_deepstack_gradient_allreduce="maybe"))


def test_a_gradient_that_others_hold_is_not_changed(group, monkeypatch):
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, group: tensor.add_(1))
    features = torch.randn(3, 4, requires_grad=True)
    given = torch.ones(4, 3).t()
    qwen3_vl._SumOfGradients.apply(features, group).backward(given)
    assert features.grad.eq(2).all() and given.eq(1).all()


@pytest.mark.parametrize(
    "seam, slices, reduces",
    [
        (qwen3_vl.FORWARD, "= deepstack_feature_lists", "= [reduced(f) for f in deepstack_feature_lists]"),
        (qwen3_vl.SPLIT, "in deepstack_visual_embeds:", "in map(reduced, deepstack_visual_embeds):"),
        (qwen3_vl.SPLIT, "deepstack_visual_embed[tp_slice]", "reduced(deepstack_visual_embed)[tp_slice]"),
        (qwen3_vl.SPLIT, "torch.cat(tmp_slice_tensor, dim=0)", "gathered(torch.cat(tmp_slice_tensor, dim=0))"),
    ],
)
def test_a_release_that_sums_the_gradients_itself_is_drift(seam, slices, reduces):
    found = SourceReader().find(seam)
    assert slices in found.code and drift(seam, found) == []
    (reason,) = drift(seam, replace(found, code=found.code.replace(slices, reduces)))
    assert "no longer contains" in reason
