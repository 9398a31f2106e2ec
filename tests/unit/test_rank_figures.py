"""What the ranks of a job say: figures of all of them where the loggers are."""

import re
from types import SimpleNamespace

import pytest
from torch import distributed

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.reports import BucketStatistics, RegionStatistics, metrics_of_ranks
from bridge_cg_plugin.upstream.hooks import train_loop
from tests.ranks import run_ranks

from .mixes import IMAGES, TOO_MANY_TOKENS
from .test_ranks import helper_on
from .towers import new_tower, results


def statistics(tokens, padding, memory, **fallbacks):
    bucket = BucketStatistics(replays=2, tokens=tokens, padding=padding)
    found = RegionStatistics(buckets={Bucket(64): bucket}, graph_bytes=memory)
    found.fallbacks.update({Fallback(reason): count for reason, count in fallbacks.items()})
    return found


def test_figures_of_ranks_are_sums_and_how_far_they_are_apart():
    ranks = [statistics(30, 10, 2**30), statistics(90, 0, 2**31, too_many_tokens=2)]
    ranks[0].pinned_bytes = 3 * 2**30
    for rank, seconds, longest in zip(ranks, (1.5, 2.25), (1.0, 2.0), strict=True):
        rank.pause_seconds, rank.longest_pause = seconds, longest
    found = metrics_of_ranks(ranks, "v")
    assert found == pytest.approx(
        {
            "v/replays": 4,
            "v/fallbacks": 2,
            "v/fallback/too_many_tokens": 2,
            "v/replayed_share": 4 / 6,
            "v/padding_share": 10 / 130,
            "v/memory_gb": 2,
            "v/pinned_gb": 3,
            "v/ranks": 2,
            "v/smallest_replayed_share": 0.5,
            "v/largest_padding_share": 0.25,
            "v/pause_s": 2.25,
            "v/longest_pause_s": 2.0,
        }
    )


def patched(name, function):
    return next(patch.make for patch in train_loop.PATCHES if patch.name == name)(function)


class Board:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars[tag] = value


def state_of(rank, step, impl="transformer_engine"):
    board = Board() if rank == distributed.get_world_size() - 1 else None
    return SimpleNamespace(
        train_state=SimpleNamespace(step=step),
        cfg=SimpleNamespace(
            logger=SimpleNamespace(log_interval=5),
            model=SimpleNamespace(vision_cuda_graph_impl=impl),
            dist=SimpleNamespace(distributed_timeout_minutes=10),
        ),
        tensorboard_logger=board,
        wandb_logger=None,
    )


def log_where_the_last_rank_has_no_encoder(impl):
    rank = distributed.get_rank()
    if rank < 2:
        model = new_tower()
        helper = helper_on(model)
        helper.create_cudagraphs()
        for rows in (IMAGES, IMAGES, TOO_MANY_TOKENS)[rank:]:
            results(model, rows)
    state = state_of(rank, 5, impl)
    patched("train_log", lambda loss_dict=None, global_state=None: None)(global_state=state)
    return state.tensorboard_logger and state.tensorboard_logger.scalars


def test_the_rank_with_loggers_writes_figures_of_all(tmp_path):
    first, second, last = run_ranks(3, log_where_the_last_rank_has_no_encoder, tmp_path, "transformer_engine")
    assert first is None and second is None
    assert last["vision_cuda_graph/ranks"] == 2
    assert last["vision_cuda_graph/replays"] == 3
    assert last["vision_cuda_graph/fallback/too_many_tokens"] == 2
    assert last["vision_cuda_graph/smallest_replayed_share"] == 0.5


def look(replays):
    return [RegionStatistics(buckets={Bucket(64): BucketStatistics(replays=replays, tokens=32 * replays)})]


@pytest.mark.parametrize("interval", [1, 40, 250])
def test_short_reports_come_with_the_first_logged_step_of_every_hundred(capsys, interval):
    for step in range(interval, 1001, interval):
        train_loop.announce_short_report("encoder", look(max(0, step - 5)), step, interval)
    said = re.findall(r"encoder, to step (\d+): (\d+) of", capsys.readouterr().out)
    steps = [int(step) for step, _ in said]
    assert steps == [step for step in range(interval, 1001, interval) if step % 100 < interval]
    assert [int(replays) for _, replays in said] == [step - 5 for step in steps]
