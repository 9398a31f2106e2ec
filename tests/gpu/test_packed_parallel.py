"""Packed documents over two GPUs: tensor, context and expert parallelism, against eager on the same ranks."""

from importlib.util import find_spec

import pytest

from tests.gpu import packed_layouts as bench

MISSING = [name for name in ("mamba_ssm", "causal_conv1d") if find_spec(name) is None]
LAYOUTS = (*bench.LAYOUTS, *bench.EXPERTS, *(() if MISSING else bench.HYBRIDS))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    return dict(bench.measured(LAYOUTS, tmp_path_factory.mktemp("layouts")))


@pytest.fixture(params=LAYOUTS)
def found(layouts, request):
    value = layouts[request.param]
    assert not isinstance(value, str), value
    return value


def test_graphs_give_what_eager_gives_to_the_bit(found):
    for rank in found["ranks"]:
        if "from_fp32" not in rank:
            assert all(far == [0.0, 0.0] for far in rank["far"].values()), rank["far"]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("EP")])
def test_experts_in_graphs_are_as_near_to_fp32_as_eagers(layouts, name):
    assert not isinstance(layouts[name], str), layouts[name]
    for rank in layouts[name]["ranks"]:
        print(f"from fp32, losses and gradients: {rank['from_fp32']}")
        assert len(rank["far"]) == 30 and bench.inexact(rank) == []


def test_all_ranks_replay_or_run_eager_together(found):
    first, second = found["ranks"]
    assert first["fallbacks"] == second["fallbacks"] == dict.fromkeys(first["beyond"], 1)
    assert first["replays"] == second["replays"] == len(first["far"]) + 1


def test_a_rank_that_cannot_capture_makes_both_eager(found):
    assert [rank["failing"] for rank in found["ranks"]] == [bench.FAILED] * 2


def test_graphs_are_faster(found):
    for rank in found["ranks"]:
        for tokens, ms in rank["ms"].items():
            assert ms["plugin"] < ms["eager"], f"{tokens} tokens: {ms}"
