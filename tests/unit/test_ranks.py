"""Ranks that share an encoder's layers: equal to one rank, and on graphs together or not at all."""

import io
import logging
import re
from collections import Counter
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import distributed

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import CaptureError, OtherRankFailed
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.reports import BucketStatistics, RegionStatistics, metrics_of_ranks
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.encoders.qwen3_vl import QWEN3_VL
from bridge_cg_plugin.upstream.hooks import train_loop
from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_helper
from bridge_cg_plugin.upstream.parallel.process_groups import consensus_of, shared_group, tensor_group
from bridge_cg_plugin.upstream.parallel.watchdog import meet_ranks
from bridge_cg_plugin.vision.encoder import OtherAttention
from tests.ranks import run_ranks

from .mixes import IMAGES, MIXED, TOO_MANY_TOKENS, VIDEO
from .towers import DEFAULTS, VisionGraphOptions, assert_close, loss_of, new_tower, results, split_dim
from .towers import forward as run_tower

TP2 = {"tensor_model_parallel_size": 2}
TOO_LARGE = [(1, 20, 20)]


def helper_on(model, **options):
    return encoder_helper(model, model.config, options=VisionGraphOptions(**{**DEFAULTS, **options}))


def full_results(model, rows):
    """Return outputs and this rank's gradients with the place of each in the whole parameter."""
    outputs, gradients = results(model, rows)
    return outputs, list(gradients), [split_dim(parameter) for parameter in model.parameters()]


def replay_mixes():
    model = new_tower(heads=2)
    helper = helper_on(model)
    helper.create_cudagraphs()
    found = [full_results(model, rows) for rows in (IMAGES, MIXED, VIDEO)]
    assert helper.graphs.statistics().replays == 3
    return found


def test_a_tower_over_several_ranks_equals_the_tower_of_one(ranks_of):
    ranks = ranks_of("mixes")
    whole = new_tower(heads=2)
    for index, rows in enumerate((IMAGES, MIXED, VIDEO)):
        outputs, gradients = results(whole, rows)
        places = ranks[0][index][2]
        assert any(dim is not None for dim in places)
        for found, _, _ in (rank[index] for rank in ranks):
            assert_close(found, outputs, 1e-4)
        parts = zip(*(rank[index][1] for rank in ranks), places, strict=True)
        joined = [own[0] if dim is None else torch.cat(own, dim) for *own, dim in parts]
        assert_close(joined, gradients, 1e-4)


# Every way to speak to another rank.
MESSAGES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter_tensor", "broadcast"),
    *("all_to_all", "all_to_all_single", "barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv", "gather"),
)


def messages_of_a_step():
    """Return what is said in a forward and backward of each mix, eager and replayed, and in a microbatch too large."""
    model = new_tower()
    said = []

    def count(name, original):
        def message(*args, **kwargs):
            said[-1][name] += 1
            return original(*args, **kwargs)

        return message

    helper = helper_on(model)
    with ExitStack() as stack:
        for name in MESSAGES:
            original = getattr(distributed, name)
            stack.enter_context(mock.patch.object(distributed, name, count(name, original)))
        for captured in (False, True):
            if captured:
                said.append(Counter())
                helper.create_cudagraphs()
            for rows in (IMAGES, MIXED, VIDEO, TOO_LARGE):
                said.append(Counter())
                results(model, rows)
    statistics = helper.graphs.statistics()
    assert (statistics.replays, dict(statistics.fallbacks)) == (3, {"too_many_tokens": 1})
    return said


def test_a_step_says_nothing_that_eager_does_not(ranks_of):
    for said in ranks_of("messages"):
        eager, capture, replayed = said[:4], said[4], said[5:]
        assert all(each.total() for each in eager) and capture["all_reduce"] > 0
        assert replayed == eager


# Where something fails -> whose method it is.
PLACES = {
    "choose_attention": lambda graphs: graphs.workload.kernels,
    "_digest": lambda graphs: graphs.workload,
    "record": lambda graphs: graphs,
    "new_memory": lambda graphs: graphs.executor,
    "record_forward": lambda graphs: graphs.executor,
}


def capture_breaking_on(rank, place, error, strict=False):
    """Let one piece of planning or capturing raise an error on one rank."""
    model = new_tower()
    helper = helper_on(model, strict=strict)
    graphs = helper.graphs

    def fail(*unused, **options):
        raise error

    if distributed.get_rank() == rank:
        setattr(PLACES[place](graphs), place, fail)
    heard, raised = [], None
    handler = logging.Handler()
    handler.emit = lambda entry: heard.append(entry.getMessage())
    logging.getLogger("bridge_cg_plugin").addHandler(handler)
    try:
        helper.create_cudagraphs()
    except CaptureError as failure:
        raised = str(failure)
    logging.getLogger("bridge_cg_plugin").removeHandler(handler)
    return {
        "captured": graphs.captured,
        "failure": graphs.failure,
        "heard": heard,
        "raised": raised,
        "outputs": results(model, MIXED)[0],
        "fallbacks": dict(graphs.statistics().fallbacks),
    }


def test_one_rank_that_cannot_capture_makes_both_eager_with_one_message(ranks_of):
    ranks = ranks_of("rank 0 fails")
    assert [rank["captured"] for rank in ranks] == [False, False]
    assert [len(rank["heard"]) for rank in ranks] == [1, 0]
    said = ranks[0]["heard"][0]
    assert "made to fail" in said and "This was rank 0; ranks 0, 1 stay together." in said
    assert ranks[1]["failure"].startswith("OtherRankFailed: rank 0 failed: OutOfMemoryInCapture: made to fail")


def capture_with_cudnn_on(ranks):
    """Let some ranks alone be able to call cuDNN's attention directly."""
    model = new_tower()
    helper = helper_on(model)
    refusal = None if distributed.get_rank() in ranks else "made to be missing"
    kernels = helper.graphs.workload.kernels
    kernels.family = replace(QWEN3_VL, direct_attention=OtherAttention(refusal=lambda: refusal))
    said = io.StringIO()
    with redirect_stdout(said):
        helper.create_cudagraphs()
    buckets = [str(bucket) for bucket in helper.graphs.statistics().buckets]
    return helper.graphs.failure, kernels.attention, buckets, said.getvalue()


@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=str)
def test_ranks_that_share_layers_attend_by_the_same_kernels(ranks_of, ranks):
    first, second = ranks_of(f"cuDNN on {ranks}")
    assert first[:3] == second[:3]
    assert first[:2] == (None, "cudnn" if ranks == (0, 1) else "transformer_engine")
    said = "ranks that share layers would attend by different kernels; attention stays Transformer Engine's"
    assert (said in first[3]) == (len(ranks) == 1)


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_any_type_anywhere_in_a_capture_makes_both_ranks_eager(ranks_of, place):
    first, second = ranks_of(place)
    error = "KeyError in bucket 256/16/256: 'made to fail'" if place == "record_forward" else "KeyError: 'made to fail'"
    assert first["failure"].startswith("OtherRankFailed: rank 1 failed: ") and error in first["failure"]
    assert error in second["failure"]
    outputs, _ = results(new_tower(), MIXED)
    for rank in (first, second):
        assert not rank["captured"] and rank["fallbacks"] == {"capture_failed": 1}
        assert_close(rank["outputs"], outputs, 1e-4)


def test_strict_stops_every_rank_with_the_failing_ones_reason(ranks_of):
    ranks = ranks_of("strict")
    assert all("made to fail" in rank["raised"] for rank in ranks)
    assert "rank 1 failed" in ranks[0]["raised"]


def sees_other_images_under_context_parallelism():
    model = new_tower()
    helper = helper_on(model, buckets="auto")
    rows = IMAGES if distributed.get_rank() == 0 else [(1, 16, 16)]
    loss_of(run_tower(model, rows)).backward()
    helper.create_cudagraphs()
    loss_of(run_tower(model, rows)).backward()
    return helper.graphs.statistics().replays, tuple(map(str, helper.graphs.workload.buckets))


def test_context_parallel_ranks_may_have_buckets_of_their_own(tmp_path):
    """With `vision_dp_when_cp` each encodes images of its own; nothing waits for another rank."""
    (first, other), (second, others) = run_ranks(
        2, sees_other_images_under_context_parallelism, tmp_path, context_parallel_size=2
    )
    assert first == second == 1 and other != others


def failures_of_ranks():
    """Agree three times: all succeed, rank 1 fails, all succeed again."""
    rank = distributed.get_rank()
    consensus = consensus_of(distributed.group.WORLD)
    agreed = consensus.agree(lambda: (float("inf"), -1.0)[rank])

    def fails():
        if rank == 1:
            raise ValueError("no buckets\nof any kind")
        return 0.0

    try:
        consensus.agree(fails)
        caught = None
    except (ValueError, OtherRankFailed) as error:
        caught = f"{type(error).__name__}: {error}"
    return agreed, caught, consensus.agree(float).same


def test_what_ranks_agree_on(ranks_of):
    ranks = ranks_of("agreements")
    assert all((agreed.smallest, agreed.largest, agreed.same) == (-1.0, float("inf"), False) for agreed, _, _ in ranks)
    told = "OtherRankFailed: rank 1 failed: ValueError: no buckets"
    assert [caught for _, caught, _ in ranks] == [told, "ValueError: no buckets\nof any kind"]
    assert all(same for _, _, same in ranks)


def groups_of_the_tower():
    model = new_tower()
    sizes = [group and group.size() for group in (tensor_group(model), shared_group(model))]
    return sizes, shared_group(model) is model.pg_collection.tp


# What is run one after the other by the same two ranks: starting them takes longer than any of it.
SCENARIOS = {
    "mixes": replay_mixes,
    "messages": messages_of_a_step,
    "rank 0 fails": partial(capture_breaking_on, 0, "record_forward", torch.OutOfMemoryError("made to fail")),
    "strict": partial(capture_breaking_on, 1, "record_forward", RuntimeError("made to fail"), True),
    "agreements": failures_of_ranks,
    "groups": groups_of_the_tower,
    **{f"cuDNN on {ranks}": partial(capture_with_cudnn_on, ranks) for ranks in ((1,), (0, 1))},
    **{place: partial(capture_breaking_on, 1, place, KeyError("made to fail")) for place in PLACES},
}


def run_scenarios():
    return {name: run() for name, run in SCENARIOS.items()}


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """Return a function that returns what both ranks found in a scenario."""
    ranks = run_ranks(2, run_scenarios, tmp_path_factory.mktemp("ranks"), **TP2)
    return lambda name: [found[name] for found in ranks]


def test_the_ranks_that_stay_together(ranks_of, tmp_path):
    assert ranks_of("groups") == [([2, 2], True)] * 2
    sizes = {**TP2, "context_parallel_size": 2}
    assert run_ranks(4, groups_of_the_tower, tmp_path, **sizes) == [([2, 4], False)] * 4


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


NO_PLUGIN = (
    "Cannot train on graphs: the plugin does not run in rank 1, 2. Install it on every machine, with BRIDGE_CG_PLUGIN "
    "unset."
)


def met(without_plugin):
    if distributed.get_rank() in without_plugin:
        return ""
    try:
        meet_ranks(60.0 if not without_plugin else 1.0)
    except OptionError as error:
        return str(error)
    return "met"


def test_ranks_without_the_plugin_are_named_before_the_first_step(tmp_path):
    for number, without in enumerate(((), (1, 2))):
        (folder := tmp_path / str(number)).mkdir()
        first, *others = run_ranks(3, met, folder, without)
        assert first == ("met" if not without else NO_PLUGIN) and others == (["", ""] if without else ["met", "met"])


def log_where_the_last_rank_has_no_encoder():
    rank = distributed.get_rank()
    if rank < 2:
        model = new_tower()
        helper = helper_on(model)
        helper.create_cudagraphs()
        for rows in (IMAGES, IMAGES, TOO_MANY_TOKENS)[rank:]:
            results(model, rows)
    scalars = {}
    board = SimpleNamespace(add_scalar=lambda tag, value, step: scalars.update({tag: value})) if rank == 2 else None
    state = SimpleNamespace(
        train_state=SimpleNamespace(step=5),
        cfg=SimpleNamespace(
            logger=SimpleNamespace(log_interval=5),
            model=SimpleNamespace(vision_cuda_graph_impl="transformer_engine"),
            dist=SimpleNamespace(distributed_timeout_minutes=10),
        ),
        tensorboard_logger=board,
        wandb_logger=None,
    )
    make = next(patch.make for patch in train_loop.PATCHES if patch.name == "train_log")
    make(lambda loss_dict=None, global_state=None: None)(global_state=state)
    return scalars


def test_the_rank_with_loggers_writes_figures_of_all(tmp_path):
    first, second, last = run_ranks(3, log_where_the_last_rank_has_no_encoder, tmp_path)
    assert not first and not second
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
