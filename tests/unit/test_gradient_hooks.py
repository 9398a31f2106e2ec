"""Which of a replay's gradients autograd gets to know of: hooks cost host time where nothing waits for them."""

import pytest
import torch
from torch import nn

from .test_gradients import FITTING, TOO_LARGE, DataParallel, eager_loss, region_loss
from .toy import Toy, assert_same, toy_batch, toy_region


class Waiting:
    """A reduction that waits when told to."""

    def __init__(self) -> None:
        self.now = False
        self.batches: list[tuple[nn.Parameter, ...]] = []

    def waits(self) -> bool:
        return self.now

    def arrived(self, parameters) -> None:
        self.batches.append(tuple(parameters))


def setup(only=None):
    eager, model = Toy(), Toy()
    model.load_state_dict(eager.state_dict())
    reference, parallel, reduction = DataParallel(eager, only), DataParallel(model, only), Waiting()
    return reference, parallel, reduction, toy_region(model, slots=3, reduction=reduction)


def test_no_hook_fires_while_nobody_waits():
    reference, parallel, reduction, region = setup()
    for seed in range(3):
        eager_loss(reference, toy_batch(FITTING, seed)).backward()
        region_loss(region, toy_batch(FITTING, seed)).backward()
        assert_same(parallel.main_grads, reference.main_grads)
    assert parallel.fired == []
    assert reduction.batches == []
    assert all(p.grad is None for p in parallel.model.parameters())


def test_every_hook_fires_in_the_microbatch_that_is_waited_for():
    reference, parallel, reduction, region = setup()
    for seed, waits in enumerate([False, True, False]):
        reduction.now = waits
        parallel.fired.clear()
        eager_loss(reference, toy_batch(FITTING, seed)).backward()
        region_loss(region, toy_batch(FITTING, seed)).backward()
        assert len(parallel.fired) == (6 if waits else 0)
    assert_same(parallel.main_grads, reference.main_grads)
    assert reduction.batches == []


def test_a_reduction_that_waits_only_after_the_forward_is_told_once():
    reference, parallel, reduction, region = setup()
    eager_loss(reference, toy_batch(FITTING)).backward()
    loss = region_loss(region, toy_batch(FITTING))
    reduction.now = True
    loss.backward()
    assert_same(parallel.main_grads, reference.main_grads)
    assert [set(batch) for batch in reduction.batches] == [set(parallel.model.parameters())]


@pytest.mark.parametrize("order", [(FITTING, TOO_LARGE), (TOO_LARGE, FITTING)])
def test_replay_and_eager_in_one_backward(order):
    reference, parallel, _, region = setup()
    sum(eager_loss(reference, toy_batch(item, seed)) for seed, item in enumerate(order)).backward()
    sum(region_loss(region, toy_batch(item, seed)) for seed, item in enumerate(order)).backward()
    assert_same(parallel.main_grads, reference.main_grads)


def test_parameters_without_main_grad_get_their_gradient():
    reference, parallel, _, region = setup(only=("mix.weight", "out.bias"))
    for seed in range(2):
        eager_loss(reference, toy_batch(FITTING, seed)).backward()
        region_loss(region, toy_batch(FITTING, seed)).backward()
    for ours, theirs in zip(parallel.model.parameters(), reference.model.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert_same([g for g in parallel.main_grads if g is not None], [g for g in reference.main_grads if g is not None])


def test_inputs_get_their_gradient_beside_the_anchor():
    _, _, _, region = setup()
    batch = toy_batch(FITTING)
    batch.x.requires_grad_()
    region_loss(region, batch).backward()
    assert batch.x.grad is not None
    assert batch.x.grad.any()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_users_hook_put_on_after_capture_fires(register):
    _, parallel, _, region = setup()
    seen = []
    parameter = parallel.model.out.weight
    handle = getattr(parameter, register)(lambda *_: seen.append(1))
    region_loss(region, toy_batch(FITTING)).backward()
    assert seen == [1]
    assert len(parallel.fired) == 6
    handle.remove()
    region_loss(region, toy_batch(FITTING)).backward()
    assert len(parallel.fired) == 6


def test_a_users_hook_put_on_before_capture_fires():
    model, seen, reduction = Toy(), [], Waiting()
    parallel = DataParallel(model)
    model.out.weight.register_hook(lambda *_: seen.append(1))
    region = toy_region(model, reduction=reduction)
    region_loss(region, toy_batch(FITTING)).backward()
    assert seen == [1]
    assert len(parallel.fired) == 6
