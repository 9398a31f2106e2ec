"""Which of a replay's gradients autograd gets to know of, and what a reduction is told instead of them."""

import pytest
import torch
from torch import nn

from .test_gradients import FITTING, TOO_LARGE, DataParallel, eager_loss, region_loss
from .toy import Toy, assert_same, loss_of, toy_batch, toy_region


class Waiting:
    """A reduction that waits when told to."""

    def __init__(self) -> None:
        self.now = False
        self.told: list[set[nn.Parameter]] = []
        self.then = lambda: None

    def waits(self) -> bool:
        return self.now

    def arrived(self, parameters) -> None:
        self.told.append(set(parameters))
        self.then()


def setup(only=None):
    eager, model = Toy(), Toy()
    model.load_state_dict(eager.state_dict())
    reference, parallel, reduction = DataParallel(eager, only), DataParallel(model, only), Waiting()
    return reference, parallel, reduction, toy_region(model, slots=3, reduction=reduction)


def test_recordings_of_two_states_tell_a_reduction_once_in_a_backward_of_both():
    _, parallel, reduction, region = setup()
    model = region.program.model
    region_loss(region, toy_batch(FITTING)).backward()
    model.note = 1
    for _ in range(2):
        region_loss(region, toy_batch(FITTING)).backward()
    reduction.now, seen = True, []
    reduction.told.clear()
    reduction.then = lambda: seen.append([gradient.clone() for gradient in parallel.main_grads])
    loss = region_loss(region, toy_batch(FITTING, 0))
    del model.note
    (loss + region_loss(region, toy_batch(FITTING, 1))).backward()
    assert region.statistics.fallbacks == {"model_changed": 1}
    assert reduction.told == [set(model.parameters())]
    assert_same(parallel.main_grads, seen[0])


def test_a_reduction_is_told_when_the_last_replay_of_a_backward_has_added_its_gradients():
    reference, parallel, reduction, region = setup()
    reduction.now = True
    sum(eager_loss(reference, toy_batch(FITTING, seed)) for seed in range(3)).backward()
    reduction.then = lambda: assert_same(parallel.main_grads, reference.main_grads)
    sum(region_loss(region, toy_batch(FITTING, seed)) for seed in range(3)).backward()
    assert reduction.told == [set(parallel.model.parameters())]


def test_replays_of_other_backwards_are_not_waited_for():
    """Under pipeline parallelism, where forwards run ahead; and where a microbatch never gets a backward."""
    _, parallel, reduction, region = setup()
    reduction.now = True
    losses = [region_loss(region, toy_batch(FITTING, seed)) for seed in range(3)]
    for count, loss in enumerate(losses[:2], 1):
        loss.backward()
        assert reduction.told == [set(parallel.model.parameters())] * count
    reduction.now = False
    losses[2].backward()
    assert len(reduction.told) == 2 and parallel.fired == []


@pytest.mark.parametrize("flip", [False, True])
def test_what_an_eager_pass_reaches_is_left_to_autograd(flip):
    """Data parallelism counts the gradients of a parameter: twice would be one too many."""
    (reference, parallel, reduction, region), order = setup(), (FITTING, TOO_LARGE, FITTING)
    reduction.now = True
    sum(eager_loss(reference, toy_batch(item, seed)) for seed, item in enumerate(order)).backward()
    losses = [region_loss(region, toy_batch(item, seed)) for seed, item in enumerate(order)]
    sum(reversed(losses) if flip else losses).backward()
    assert_same(parallel.main_grads, reference.main_grads)
    assert sorted(parallel.fired) == sorted(n for n, _ in parallel.model.named_parameters())
    assert reduction.told == [set()]


@pytest.mark.parametrize("order", [(FITTING, TOO_LARGE), (TOO_LARGE, FITTING)])
@pytest.mark.parametrize("flip", [False, True])
def test_hooks_of_an_eager_pass_learn_of_a_replay_to_come(order, flip):
    _, parallel, _, region = setup()
    later, replayed, parameter = [], [], parallel.model.out.weight
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(lambda *unused: later.append((region.adds_later({parameter}), bool(replayed))))
    batches = [toy_batch(item, seed) for seed, item in enumerate(order)]
    batches[order.index(FITTING)].x.register_hook(lambda gradient: replayed.append(1))
    losses = [region_loss(region, batch) for batch in batches]
    sum(reversed(losses) if flip else losses).backward()
    assert [to_come for to_come, _ in later] == [not done for _, done in later]
    assert not region.sources._hooks.pending.to_come()


def test_a_users_hook_put_on_after_capture_fires():
    _, parallel, _, region = setup()
    seen = []
    parameter = parallel.model.out.weight
    handle = parameter.register_hook(lambda *_: seen.append(1))
    for _ in range(3):  # eager, then on graphs
        parallel.fired.clear()
        region_loss(region, toy_batch(FITTING)).backward()
    assert seen == [1] * 3 and parallel.fired == ["out.weight"]
    assert region.statistics.fallbacks == {"parameter_hooks": 1}
    handle.remove()
    region_loss(region, toy_batch(FITTING)).backward()
    assert len(seen) == 3 and parallel.fired == ["out.weight"]
    assert region.statistics.replays == 3


@pytest.mark.parametrize("reduction", [None, Waiting()], ids=["alone", "reduced"])
@pytest.mark.parametrize("parallel", [False, True], ids=["plain", "parallel"])
def test_users_hooks_get_zeros_where_eager_does_not_call_them(parallel, reduction):
    """Of weights that only an unread output needs, and of those that nothing needs."""
    model, batch = Toy(), toy_batch(FITTING)
    model.unused = nn.Linear(2, 2)
    side = DataParallel(model) if parallel else None
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    (expected,) = torch.autograd.grad(loss_of(model(batch.x, batch.offsets)[:1]), [model.mix.weight])
    region = toy_region(model, reduction=reduction)
    loss_of(region.run(batch)[:1]).backward()
    found = {name: p.main_grad if side else p.grad for name, p in model.named_parameters()}
    assert not any(gradient.any() for name, gradient in found.items() if name.startswith(("pair", "unused")))
    assert_same([found["mix.weight"]], [expected])
