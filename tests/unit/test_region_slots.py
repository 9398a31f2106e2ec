"""Slots of a region: who holds one, when it comes back, and what outlives it."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.errors import ReplayError

from .toy import (
    assert_equals_eager,
    assert_same,
    eager_results,
    loss_of,
    toy_batch,
    toy_region,
)


def test_a_slot_comes_back_when_its_autograd_graph_is_freed():
    region = toy_region()
    outputs = region.run(toy_batch())
    assert region.free_slots() == 0
    del outputs
    gc.collect()
    assert region.free_slots() == 1
    assert_equals_eager(region, toy_batch((4,)))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=16), st.integers(1, 3))
def test_any_schedule_of_forwards_and_backwards_equals_eager(choices, slots):
    """A choice beyond the microbatches in flight is a forward, else the backward of that one."""
    region, flight, ended = toy_region(slots=slots), [], []
    for seed, choice in enumerate(choices):
        if choice >= len(flight):
            batch = toy_batch([(2,), (2, 4), (8, 2), (4, 4, 4)][seed % 4], seed)
            outputs = region.run(batch)
            assert (outputs is None) == (len(flight) == slots)
            if outputs is not None:
                flight.append((batch, outputs))
            continue
        batch, outputs = flight.pop(choice)
        expected = eager_results(region.program.model, batch)
        assert_same(outputs, expected[0])
        wanted = [*region.program.model.parameters(), batch.x]
        ended.append(([*outputs, *torch.autograd.grad(loss_of(outputs), wanted)], [*expected[0], *expected[1]]))
    for found, expected in ended:  # later replays of the slot leave them
        assert_same(found, expected)


def test_gradients_that_are_differentiated_are_refused():
    region, other = toy_region(), toy_region()
    parameters = list(region.program.model.parameters())
    expected = eager_results(region.program.model, toy_batch())[1][:-1]
    gradients = torch.autograd.grad(loss_of(region.run(toy_batch())), parameters, create_graph=True)
    assert_same(gradients, expected)
    penalty = sum(gradient.square().sum() for gradient in gradients)
    with pytest.raises(ReplayError, match="create_graph"):
        (penalty + loss_of(other.run(toy_batch()))).backward()


def test_a_backward_for_a_batch_of_gradients_is_refused():
    region = toy_region()
    losses = loss_of(region.run(toy_batch())) * torch.ones(2)
    with pytest.raises(ReplayError, match="is_grads_batched"):
        torch.autograd.grad(losses, list(region.program.model.parameters()), torch.eye(2), is_grads_batched=True)


def test_a_late_second_backward_is_refused_and_harms_no_one():
    region, batch = toy_region(), toy_batch((4, 4), 5)
    expected = eager_results(region.program.model, batch)[1]
    stale = loss_of(region.run(toy_batch()))
    stale.backward(retain_graph=True)
    outputs = region.run(batch)
    with pytest.raises(ReplayError, match="ran twice"):
        stale.backward()
    wanted = [*region.program.model.parameters(), batch.x]
    assert_same(torch.autograd.grad(loss_of(outputs), wanted), expected)


def test_an_autograd_graph_that_outlives_its_backward_keeps_no_recording():
    region = toy_region()
    slot = weakref.ref(region._slots[0])
    kept = loss_of(region.run(toy_batch()))
    kept.backward()
    del region
    gc.collect()
    assert slot() is None
