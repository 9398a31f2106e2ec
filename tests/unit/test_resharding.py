"""A checkpoint written at one layout and read at another, after graphs were captured."""

from unittest import mock

import torch
from megatron.core import dist_checkpointing
from torch import distributed

from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.helpers import VisionTECudaGraphHelper
from tests.ranks import run_ranks

from .mixes import IMAGES, MIXED, VIDEO
from .towers import DEFAULTS, assert_close, new_tower, results

TP2 = {"tensor_model_parallel_size": 2}
MIXES = (IMAGES, MIXED, VIDEO)


def train_and_save(folder):
    """Replay, move the weights as an optimizer does, and save; every rank saves its parts."""
    model = new_tower()
    graphs = captured(model)
    results(model, MIXED)
    assert graphs.statistics().replays == 1
    move_weights(model)
    with no_gpu():
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))


def move_weights(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def no_gpu():
    return mock.patch.multiple(torch.cuda, current_device=lambda: "cpu", synchronize=lambda: None)


def captured(model):
    options = VisionGraphOptions(**DEFAULTS)
    helper = VisionTECudaGraphHelper(model, model.config, options=options)
    helper.create_cudagraphs()
    return helper.graphs


def read_and_replay(folder):
    model = new_tower(seed=5)  # other weights than those saved
    graphs = captured(model)
    with no_gpu():
        state = dist_checkpointing.load(model.sharded_state_dict(), str(folder))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and not [name for name in missing if not name.endswith("_extra_state")]
    found = [results(model, rows) for rows in MIXES]
    assert graphs.statistics().replays == 3 and graphs.statistics().fallbacks == {}
    return distributed.get_rank(), found


def test_weights_of_two_ranks_are_replayed_by_one(tmp_path):
    for name in ("saved", "first", "second"):
        (tmp_path / name).mkdir()
    run_ranks(2, train_and_save, tmp_path / "first", tmp_path / "saved", **TP2)
    whole = new_tower()
    move_weights(whole)
    for _, found in run_ranks(2, read_and_replay, tmp_path / "second", tmp_path / "saved"):
        for (outputs, gradients), rows in zip(found, MIXES, strict=True):
            expected, wanted = results(whole, rows)
            assert_close(outputs, expected, 1e-4)
            assert_close(gradients, wanted, 1e-4)
