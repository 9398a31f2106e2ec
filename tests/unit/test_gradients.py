import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge

from bridge_cg_plugin.graphs.errors import CaptureError, ReplayError
from bridge_cg_plugin.graphs.replays.gradients import SMALL, GradientSinks, ParameterHooks, SmallGradients

from ..main_grads import hook_main_grads
from .toy import Toy, assert_same, loss_of, poison, toy_batch, toy_region


class DataParallel:
    """What Megatron's data parallelism does to a module's parameters: `main_grad`, and a hook that fills it."""

    def __init__(self, model, only=None) -> None:
        self.model, self.fired, self.arrived = model, [], []
        self.nodes = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or (only is not None and name not in only):
                continue
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float64)
            parameter.grad_added_to_main_grad = False
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(self._hook(name, parameter))
            self.nodes.append(node)

    def _hook(self, name, parameter):
        def hook(*unused):
            self.fired.append(name)
            self.arrived.append(parameter.grad is not None)
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        return hook

    def drop(self):
        """Take the hooks off, which end with their nodes, and leave `main_grad`."""
        self.nodes.clear()
        return self

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
        [FITTING, TOO_LARGE, TOO_LARGE, FITTING, FITTING],
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


@pytest.mark.parametrize("flip", [False, True])
def test_replay_and_eager_in_one_backward(flip):
    (reference, parallel, region), order = pair(), (FITTING, TOO_LARGE, FITTING)
    sum(eager_loss(reference, toy_batch(item, seed)) for seed, item in enumerate(order)).backward()
    losses = [region_loss(region, toy_batch(item, seed)) for seed, item in enumerate(order)]
    sum(reversed(losses) if flip else losses).backward()
    assert_same(parallel.main_grads, reference.main_grads)
    assert parallel.flags == [False] * 6


def test_every_hook_fires_once_for_each_backward_with_a_gradient():
    _, parallel, region = pair()
    names = sorted(n for n, _ in region.program.model.named_parameters())
    for seed in range(2):
        parallel.fired.clear()
        region_loss(region, toy_batch(FITTING, seed)).backward()
        assert sorted(parallel.fired) == names
    assert all(parallel.arrived)


def test_sinks_of_a_memory_probe_leave_no_hook_on_parameters():
    parallel = DataParallel(Toy())
    GradientSinks(list(parallel.model.parameters()))
    assert all(not p._backward_hooks for p in parallel.model.parameters())


def test_hooks_on_parameters_go_with_the_recordings():
    _, parallel, region = pair()
    region.capture()
    assert all(len(p._backward_hooks) == 1 for p in parallel.model.parameters())
    region.reset()
    assert all(not p._backward_hooks for p in parallel.model.parameters())


def test_another_main_grad_tensor_after_capture_falls_back():
    _, parallel, region = pair()
    weight = region.program.model.mix.weight
    weight.main_grad = torch.zeros_like(weight.main_grad)
    eager_loss(parallel, toy_batch()).backward()
    expected, weight.main_grad = weight.main_grad, torch.zeros_like(weight.main_grad)
    region_loss(region, toy_batch()).backward()
    assert_same([weight.main_grad], [expected])
    assert not region.statistics.fallbacks


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
    nodes = hook_main_grads(model.values())
    aliases = {p: torch.nn.Parameter(p.detach()) for p in model.values()}
    sinks = GradientSinks(list(model.values()))
    with sinks.attached(aliases):
        loss = sum((alias * 3).sum() for alias in aliases.values())
        torch.autograd.grad(loss, list(aliases.values()))
    assert nodes and all((p.main_grad == 4).all() for p in model.values())


def test_placeholders_are_handed_over_without_a_copy():
    model = Toy()
    model.mix.weight = nn.Parameter(model.mix.weight.detach().t())  # not contiguous
    parallel, seen = DataParallel(model), {}
    for parameter, node in zip(model.parameters(), parallel.nodes, strict=True):
        node.register_prehook(lambda gradients, p=parameter: seen.update({p: gradients[0]}))
    region = toy_region(model)
    loss_of(region.run(toy_batch())).backward()
    assert all(seen[p].data_ptr() in region.sources._hooks.zeros.addresses for p in model.parameters())
    assert all(seen[p].stride() == p.stride() and not seen[p].any() for p in model.parameters())


class Left(DataParallel):
    """Hooks that leave `.grad` to the loop, which adds to `main_grad` what is there at the end of a step."""

    def _hook(self, name, parameter):
        return lambda *unused: self.fired.append(name)


@pytest.mark.parametrize("lengths", [(FITTING, TOO_LARGE, FITTING, FITTING, TOO_LARGE), (TOO_LARGE, FITTING)])
@pytest.mark.parametrize("hooks", [None, Left, DataParallel], ids=["none", "leaving", "adding"])
def test_a_loop_that_leaves_gradients_between_microbatches(lengths, hooks):
    """Nothing is lost or counted twice in `main_grad` and `.grad` together; without hooks, each is as in eager."""
    sides = [Toy(), Toy()]
    sides[1].load_state_dict(sides[0].state_dict())
    parallel = [(hooks or DataParallel)(model) for model in sides]
    if hooks is None:
        parallel = [side.drop() for side in parallel]
    region = toy_region(sides[1])
    for step in range(2):
        for model in sides:
            model.zero_grad(set_to_none=True)
            torch._foreach_zero_([p.main_grad for p in model.parameters()])
        for seed, item in enumerate(lengths):
            batch = toy_batch(item, 10 * step + seed)
            loss_of(sides[0](batch.x, batch.offsets)).backward()
            region_loss(region, batch).backward()
            assert_same(*(list(map(_collected, model.parameters())) for model in sides))
            if hooks is None:
                assert_same(*([p.grad for p in model.parameters()] for model in sides))
    assert region.statistics.replays == 2 * lengths.count(FITTING)


def _collected(parameter):
    return parameter.main_grad if parameter.grad is None else parameter.main_grad + parameter.grad


class _Fused(torch.autograd.Function):
    """`x @ weight.T` that adds the weight's gradient to `main_grad`, as Transformer Engine does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight.main_grad.add_(gradient.T @ ctx.saved_tensors[0])
        ctx.weight.grad_added_to_main_grad = True
        return gradient @ ctx.weight, torch.full_like(ctx.weight, 7.0)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_that_adds_to_main_grad_in_eager_does_so_in_its_recording(hooked):
    reference, parallel, _ = pair()
    both = (parallel, reference)
    for side in both:
        mix = side.model.mix
        mix.forward = lambda x, mix=mix: _Fused.apply(x, mix.weight) + mix.bias
        if not hooked:
            side.drop()
    region = toy_region(parallel.model)
    for seed, item in enumerate((FITTING, TOO_LARGE, FITTING)):
        for side in both:
            side.model.mix.weight.grad_added_to_main_grad = False
        eager_loss(reference, toy_batch(item, seed)).backward()
        region_loss(region, toy_batch(item, seed)).backward()
        assert_same(parallel.main_grads, reference.main_grads)
        if not hooked:
            assert parallel.flags == reference.flags
            others = [[p for p in side.model.parameters() if p is not side.model.mix.weight] for side in both]
            assert_same(*([p.grad for p in parameters] for parameters in others))
    assert region.statistics.replays == 2


@pytest.mark.parametrize("reduction, elements", [(None, 4 * 4), (object(), 1)], ids=["autograd", "reduction"])
def test_placeholders_take_memory_only_where_autograd_gets_them(reduction, elements):
    """A reduction is notified directly; the largest weight of a tower alone is 40 MiB."""
    model = nn.Linear(4, 4)
    nodes = hook_main_grads(model.parameters())
    hooks = ParameterHooks()
    GradientSinks(list(model.parameters()), reduction, hooks)
    (storage,) = itertools.chain(*hooks.zeros._flat.values())
    assert nodes and storage.numel() == elements


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


def _asked(model, name):
    return [dict(model.named_parameters())[name]]


@pytest.mark.parametrize("reduced", [False, True])
def test_gradients_of_the_input_alone_leave_main_grad(reduced):
    reference, parallel, region = pair()
    if reduced:
        region = toy_region(parallel.model, reduction=Silent())
    for gradient in parallel.main_grads:
        gradient.fill_(3.0)
    found = []
    for loss in (partial(eager_loss, reference), partial(region_loss, region)):
        batch = toy_batch(FITTING)
        batch.x.requires_grad_()
        found.append(torch.autograd.grad(loss(batch), [batch.x]))
    assert region.statistics.replays == 1
    assert_same(*found)
    assert all((g == 3).all() for g in parallel.main_grads)
    for gradient in reference.main_grads:
        gradient.fill_(3.0)
    eager_loss(reference, toy_batch(FITTING)).backward()
    region_loss(region, toy_batch(FITTING)).backward()
    assert_same(parallel.main_grads, reference.main_grads)


@pytest.mark.parametrize("name", ["mix.weight", "pair.bias"])
def test_gradients_of_some_parameters(name):
    reference, parallel, region = pair()
    sides = [(reference, eager_loss(reference, toy_batch())), (parallel, region_loss(region, toy_batch()))]
    assert_same(*(torch.autograd.grad(loss, _asked(side.model, name)) for side, loss in sides))
    assert not any(g.any() for side, _ in sides for g in side.main_grads)
    sides = [(reference, eager_loss(reference, toy_batch())), (parallel, region_loss(region, toy_batch()))]
    for side, loss in sides:
        loss.backward(inputs=_asked(side.model, name))
    assert_same(parallel.main_grads, reference.main_grads)
    assert parallel.fired == reference.fired == [name]
    assert region.statistics.replays == 2


class Silent:
    """A reduction that waits for nothing."""

    def waits(self):
        return False


ASKS = [
    torch.autograd.grad,
    lambda loss, wanted: loss.backward(inputs=wanted),
    lambda loss, wanted: torch.autograd.grad(loss, list(map(get_gradient_edge, wanted)), allow_unused=True),
]


@pytest.mark.parametrize("ask", ASKS)
def test_gradients_of_parameters_that_a_reduction_waits_for_are_refused(ask):
    """Autograd does not know of them: it would give None, or nothing."""
    before = torch.autograd._engine_run_backward
    _, parallel, _ = pair()
    region = toy_region(parallel.model, reduction=Silent())
    with pytest.raises(ReplayError, match="backward\\(inputs=\\)"):
        ask(region_loss(region, toy_batch()), list(parallel.model.parameters())[:1])
    assert not any(g.any() for g in parallel.main_grads)
    loss, other = region_loss(region, toy_batch()), eager_loss(parallel, toy_batch(TOO_LARGE))
    (found,) = torch.autograd.grad(other, [parallel.model.mix.weight])  # no replay is behind it
    assert found.any()
    loss.backward()
    assert all(g.any() for g in parallel.main_grads)
    region.reset()
    assert torch.autograd._engine_run_backward is before


@pytest.mark.parametrize("parallel", [False, True])
def test_parameters_can_be_swapped(parallel):
    model = Toy()
    side = DataParallel(model) if parallel else None
    region = toy_region(model)
    region_loss(region, toy_batch()).backward()
    for parameter in model.parameters():
        other = nn.Parameter(parameter.detach() * 2)
        if parallel:
            side.nodes.clear()
        torch.utils.swap_tensors(parameter, other)
    expected = model(toy_batch().x, toy_batch().offsets)
    assert_same([loss_of(region.run(toy_batch()) or expected)], [loss_of(expected)])
