import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.replays.gradients import SMALL, GradientSinks, ParameterHooks, SmallGradients

from .toy import Toy, assert_same, loss_of, poison, toy_batch, toy_region


class DataParallel:
    """What Megatron's data parallelism does to a module's parameters: `main_grad`, and a hook that fills it."""

    def __init__(self, model, only=None) -> None:
        self.model, self.fired, self.arrived = model, [], []
        self._nodes = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or (only is not None and name not in only):
                continue
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float64)
            parameter.grad_added_to_main_grad = False
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(self._hook(name, parameter))
            self._nodes.append(node)

    def _hook(self, name, parameter):
        def hook(*unused):
            self.fired.append(name)
            self.arrived.append(parameter.grad is not None)
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        return hook

    @property
    def main_grads(self):
        return [getattr(p, "main_grad", None) for p in self.model.parameters()]

    @property
    def flags(self):
        return [p.grad_added_to_main_grad for p in self.model.parameters() if hasattr(p, "main_grad")]


def pair():
    """Return an eager model under data parallelism, and a region over its copy under the same."""
    eager, model = Toy(), Toy()
    model.load_state_dict(eager.state_dict())
    reference, parallel = DataParallel(eager), DataParallel(model)
    return reference, parallel, toy_region(model, slots=3)


def eager_loss(reference, batch):
    return loss_of(reference.model(batch.x, batch.offsets))


def region_loss(region, batch):
    """Replay, or run eager the way the vision code does."""
    outputs = region.run(batch)
    if outputs is None:
        outputs = region.program.model(batch.x, batch.offsets)
    return loss_of(outputs)


FITTING, TOO_LARGE = (2, 4), (10, 8)


@pytest.mark.parametrize(
    "lengths",
    [
        [FITTING] * 3,
        [FITTING, TOO_LARGE, FITTING],
        [TOO_LARGE, FITTING, TOO_LARGE],
        [TOO_LARGE, TOO_LARGE],
        [(2,), (4,), (16,), FITTING],
    ],
)
def test_microbatches_accumulate_as_in_eager(lengths):
    reference, parallel, region = pair()
    for seed, item in enumerate(lengths):
        eager_loss(reference, toy_batch(item, seed)).backward()
        poison(region, float("nan"))
        region_loss(region, toy_batch(item, seed)).backward()
        assert_same(parallel.main_grads, reference.main_grads)
        assert parallel.flags == [False] * 6


@pytest.mark.parametrize("order", [(FITTING, TOO_LARGE), (TOO_LARGE, FITTING), (FITTING, TOO_LARGE, FITTING)])
@pytest.mark.parametrize("flip", [False, True])
def test_replay_and_eager_in_one_backward(order, flip):
    reference, parallel, region = pair()
    sum(eager_loss(reference, toy_batch(item, seed)) for seed, item in enumerate(order)).backward()
    losses = [region_loss(region, toy_batch(item, seed)) for seed, item in enumerate(order)]
    sum(reversed(losses) if flip else losses).backward()
    assert_same(parallel.main_grads, reference.main_grads)
    assert parallel.flags == [False] * 6


def test_forwards_first_then_backwards_in_either_kind():
    reference, parallel, region = pair()
    items = [FITTING, TOO_LARGE, (2, 2), FITTING]
    for seed, item in enumerate(items):
        eager_loss(reference, toy_batch(item, seed)).backward()
    for loss in [region_loss(region, toy_batch(item, seed)) for seed, item in enumerate(items)]:
        loss.backward()
    assert_same(parallel.main_grads, reference.main_grads)


def test_every_hook_fires_once_for_each_backward_with_a_gradient():
    _, parallel, region = pair()
    names = sorted(n for n, _ in region.program.model.named_parameters())
    for seed in range(2):
        parallel.fired.clear()
        region_loss(region, toy_batch(FITTING, seed)).backward()
        assert sorted(parallel.fired) == names
    assert all(parallel.arrived)


def test_hooks_fire_once_when_one_backward_covers_several_replays():
    _, parallel, region = pair()
    sum(region_loss(region, toy_batch(FITTING, seed)) for seed in range(3)).backward()
    assert sorted(parallel.fired) == sorted(n for n, _ in region.program.model.named_parameters())


def test_the_flag_is_set_when_hooks_fire():
    _, parallel, region = pair()
    seen = []
    parameter = region.program.model.mix.weight
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(lambda *unused: seen.append(parameter.grad_added_to_main_grad))
    region_loss(region, toy_batch()).backward()
    assert seen == [True]


def test_main_grad_is_added_to_not_overwritten():
    reference, parallel, region = pair()
    for side in (reference, parallel):
        for gradient in side.main_grads:
            gradient.fill_(3.0)
    eager_loss(reference, toy_batch()).backward()
    region_loss(region, toy_batch()).backward()
    assert_same(parallel.main_grads, reference.main_grads)


def test_sinks_of_a_memory_probe_leave_no_hook_on_parameters():
    parallel = DataParallel(Toy())
    GradientSinks(list(parallel.model.parameters()))
    assert all(not p._backward_hooks for p in parallel.model.parameters())


def test_hooks_on_parameters_go_with_the_recordings():
    _, parallel, region = pair()
    assert all(len(p._backward_hooks) == 1 for p in parallel.model.parameters())
    region.reset()
    assert all(not p._backward_hooks for p in parallel.model.parameters())


def test_capture_adds_nothing_to_main_grad():
    _, parallel, _ = pair()
    assert all(not g.any() for g in parallel.main_grads)
    assert parallel.fired == []


def test_main_grad_zeroed_between_steps():
    reference, parallel, region = pair()
    for step in range(3):
        for side in (reference, parallel):
            for gradient in side.main_grads:
                gradient.zero_()
        eager_loss(reference, toy_batch(seed=step)).backward()
        region_loss(region, toy_batch(seed=step)).backward()
        assert_same(parallel.main_grads, reference.main_grads)


def test_another_main_grad_tensor_after_capture_falls_back():
    _, parallel, region = pair()
    weight = region.program.model.mix.weight
    weight.main_grad = torch.zeros_like(weight.main_grad)
    eager_loss(parallel, toy_batch()).backward()
    expected, weight.main_grad = weight.main_grad, torch.zeros_like(weight.main_grad)
    region_loss(region, toy_batch()).backward()
    assert_same([weight.main_grad], [expected])
    assert not region.statistics.fallbacks


def test_main_grad_given_after_capture_falls_back():
    region = toy_region()
    parallel = DataParallel(region.program.model)
    loss_of(region.run(toy_batch())).backward()
    assert all(g.any() for g in parallel.main_grads) and not region.statistics.fallbacks


def test_parameters_without_main_grad_get_theirs_beside_ones_with():
    eager, model = Toy(), Toy()
    model.load_state_dict(eager.state_dict())
    only = ("mix.weight", "pair.bias")
    reference, parallel = DataParallel(eager, only), DataParallel(model, only)
    region = toy_region(model)
    for seed in range(2):
        eager_loss(reference, toy_batch(seed=seed)).backward()
        region_loss(region, toy_batch(seed=seed)).backward()
    assert_same(parallel.main_grads, reference.main_grads)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


def test_frozen_parameters_get_nothing():
    eager, model = Toy(), Toy()
    model.load_state_dict(eager.state_dict())
    for each in (eager, model):
        each.mix.requires_grad_(False)
    reference, parallel = DataParallel(eager), DataParallel(model)
    region = toy_region(model)
    eager_loss(reference, toy_batch()).backward()
    region_loss(region, toy_batch()).backward()
    assert_same(parallel.main_grads, reference.main_grads)
    assert model.mix.weight.grad is None


def test_plain_gradients_accumulate_without_aliasing():
    eager, region = Toy(), toy_region()
    region.program.model.load_state_dict(eager.state_dict())
    kept = []
    for seed in range(3):
        loss_of(eager(toy_batch(seed=seed).x, toy_batch(seed=seed).offsets)).backward()
        region_loss(region, toy_batch(seed=seed)).backward()
        found = [p.grad for p in region.program.model.parameters()]
        assert_same(found, [p.grad for p in eager.parameters()])
        assert len({g.data_ptr() for g in found}) == len(found)
        kept.append((found[0].data_ptr(), found[0].clone()))
    assert not torch.equal(kept[0][1], kept[2][1])


def test_a_plain_gradient_set_aside_outlives_the_next_backward():
    region = toy_region()
    region_loss(region, toy_batch(seed=0)).backward()
    aside = [p.grad for p in region.program.model.parameters()]
    values = [g.clone() for g in aside]
    region.program.model.zero_grad(set_to_none=True)
    region_loss(region, toy_batch(seed=1)).backward()
    assert_same(aside, values)


def test_a_backward_that_fails_leaves_no_flag_behind():
    """Else the next eager gradient would be taken for one that main_grad has already."""
    reference, parallel, region = pair()
    batch = toy_batch(FITTING)
    inner = batch.x * 1.0
    inner.register_hook(_fail)
    with pytest.raises(RuntimeError, match="made to fail"):
        region_loss(region, type(batch)(inner, batch.offsets)).backward()
    for gradient in parallel.main_grads:
        gradient.zero_()
    eager_loss(reference, toy_batch(TOO_LARGE)).backward()
    region_loss(region, toy_batch(TOO_LARGE)).backward()
    assert_same(parallel.main_grads, reference.main_grads)


def _fail(gradient):
    raise RuntimeError("made to fail")


@pytest.mark.parametrize("again", [False, True])
def test_a_reset_between_forward_and_backward(again):
    reference, parallel, region = pair()
    eager_loss(reference, toy_batch()).backward()
    loss = region_loss(region, toy_batch())
    region.capture() if again else region.reset()
    loss.backward()
    assert_same(parallel.main_grads, reference.main_grads)
    assert parallel.flags == [False] * 6


def test_dropping_a_region_takes_its_hooks_off_the_parameters():
    _, _, region = pair()
    model = region.program.model
    assert all(p._backward_hooks for p in model.parameters())
    region.reset()
    assert not any(p._backward_hooks for p in model.parameters())


def test_recapture_leaves_one_hook_on_each_parameter():
    _, _, region = pair()
    region.capture()
    region.capture()
    assert [len(p._backward_hooks) for p in region.program.model.parameters()] == [1] * 6


def test_a_failed_capture_leaves_no_hook_on_parameters():
    _, _, region = pair()
    region.program.fails_at = 4
    with pytest.raises(CaptureError):
        region.capture()
    assert not any(p._backward_hooks for p in region.program.model.parameters())


def test_a_zero_eager_gradient_beside_a_replay():
    reference, parallel, region = pair()
    (eager_loss(reference, toy_batch(TOO_LARGE)) * 0 + eager_loss(reference, toy_batch())).backward()
    (region_loss(region, toy_batch(TOO_LARGE)) * 0 + region_loss(region, toy_batch())).backward()
    assert_same(parallel.main_grads, reference.main_grads)


@given(
    sizes=st.lists(st.sampled_from([1, 3, 1152, 4304]), max_size=9),
    dtypes=st.sampled_from([(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16,) * 2]),
)
def test_small_gradients_round_as_if_added_alone(sizes, dtypes):
    generator = torch.Generator().manual_seed(len(sizes))
    gradients = [torch.randn(size, generator=generator).to(dtypes[1]) for size in sizes]
    main_grads = [torch.randn(size, generator=generator).to(dtypes[0]) for size in sizes]
    expected = [main.clone().add_(gradient) for main, gradient in zip(main_grads, gradients, strict=True)]
    small = SmallGradients()
    for main, gradient in zip(main_grads, gradients, strict=True):
        small.keep(main, gradient)
    small.add()
    assert all(torch.equal(main, wanted) for main, wanted in zip(main_grads, expected, strict=True))
    small.add()
    assert all(torch.equal(main, wanted) for main, wanted in zip(main_grads, expected, strict=True))


def test_gradients_of_every_size_reach_main_grad():
    model = torch.nn.ParameterDict({name: torch.zeros(size) for name, size in (("bias", 8), ("weight", SMALL + 1))})
    for parameter in model.values():
        parameter.main_grad = torch.ones_like(parameter)
    aliases = {p: torch.nn.Parameter(p.detach()) for p in model.values()}
    sinks = GradientSinks(list(model.values()))
    with sinks.attached(aliases):
        loss = sum((alias * 3).sum() for alias in aliases.values())
        torch.autograd.grad(loss, list(aliases.values()))
    assert all((p.main_grad == 4).all() for p in model.values())


def test_placeholders_are_handed_over_without_a_copy():
    model = Toy()
    model.mix.weight = torch.nn.Parameter(model.mix.weight.detach().t())  # not contiguous
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float64)
    region = toy_region(model)
    loss_of(region.run(toy_batch())).backward()
    assert all(p.grad.data_ptr() in region.sources._hooks.zeros.addresses for p in model.parameters())
    assert all(p.grad.stride() == p.stride() and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("reduction, elements", [(None, 4 * 4), (object(), 1)], ids=["autograd", "reduction"])
def test_placeholders_take_memory_only_where_autograd_gets_them(reduction, elements):
    """A reduction is notified directly; the largest weight of a tower alone is 40 MiB."""
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    hooks = ParameterHooks()
    GradientSinks(list(model.parameters()), reduction, hooks)
    (storage,) = itertools.chain(*hooks.zeros._flat.values())
    assert storage.numel() == elements


class _WithoutBiasGradient(torch.autograd.Function):
    """`x + bias` that gives the bias no gradient, as Transformer Engine does where the weight is frozen."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_a_parameter_that_is_used_and_gets_no_gradient():
    reference, parallel, region = pair()
    for one in (reference, parallel):
        mix = one.model.mix
        mix.forward = lambda x, mix=mix: _WithoutBiasGradient.apply(x @ mix.weight.T, mix.bias)
    region.capture()
    batch = toy_batch(FITTING)
    eager_loss(reference, batch).backward()
    region_loss(region, batch).backward()
    assert region.statistics.replays == 1
    assert not reference.model.mix.bias.main_grad.any()
    assert_same(parallel.main_grads, reference.main_grads)
    assert sorted(parallel.fired) == sorted(reference.fired)
    for one in (reference, parallel):
        eager_loss(one, batch).backward()
    assert_same(parallel.main_grads, reference.main_grads)
