"""Packs that documents make, and the best choice of bounds and buckets for them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.cli.planner.documents import (
    first_fit,
    first_fit_decreasing,
    padded_packs,
)
from bridge_cg_plugin.cli.planner.plan import expect, percentiles, plan_packs

from .plan_inputs import COSTS, documents, packs


@given(documents)
def test_first_fit_is_bridges(lengths):
    from megatron.bridge.data.packing import algorithms

    assert first_fit(lengths, 500) == [tuple(pack) for pack in algorithms.first_fit(lengths, 500)]
    assert first_fit_decreasing(lengths, 500) == [tuple(p) for p in algorithms.first_fit_decreasing(lengths, 500)]


@given(packs, st.integers(1, 128))
def test_padding_is_a_document_of_its_own(found, multiple):
    for pack, padded in zip(found, padded_packs(found, multiple), strict=True):
        assert sum(padded) % multiple == 0 and 0 <= sum(padded) - sum(pack) < multiple
        assert padded[: len(pack)] == pack and len(padded) - len(pack) in (0, 1)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=300))
def test_percentiles_are_values_that_so_many_do_not_exceed(values):
    found = percentiles(values)
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99), (1.0, found.max)):
        assert value in values
        assert sum(v <= value for v in values) >= share * len(values)
        assert sum(v < value for v in values) < share * len(values)


@given(packs, st.integers(1, 50))
def test_a_choice_accounts_for_every_pack(found, bound):
    tokens = max(map(sum, found))
    choice = expect(Counter(found), COSTS, bound, (tokens,)).expected
    eager = sum(count for _, count in choice.fallbacks)
    assert choice.on_graphs == pytest.approx(1 - eager / len(found))
    many = sum(len(pack) > bound for pack in found)
    assert dict(choice.fallbacks).get("too_many_documents", 0) <= many <= eager
    assert 0 <= choice.padding < 1


@given(packs)
def test_the_best_choice_is_the_best_of_all_that_were_looked_at(found):
    plan = plan_packs(found, COSTS)
    assert plan.best in plan.choices
    assert plan.best.expected.ratio <= min(choice.expected.ratio for choice in plan.choices) * 1.001
    assert [c.max_packed_seqs for c in plan.choices] == sorted({c.max_packed_seqs for c in plan.choices})
    assert plan.documents.max == max(map(len, found)) and plan.packs == len(found)
