"""Gradients of replays: what reaches `main_grad`, what autograd, hooks and a reduction get to know of."""

import gc
import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import ReplayError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.replays.gradients import SMALL, GradientSinks, add_together

from ..main_grads import Silent, hook_main_grads
from ..pooled import PooledExecutor
from ..regions import new_region
from .toy import WIDTH, Toy, ToyProgram, assert_same, loss_of, poison, toy_batch, toy_region


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


def pair(reduction=None):
    """Return an eager model under data parallelism, and a region over its copy under the same."""
    eager, model = Toy(), Toy()
    model.load_state_dict(eager.state_dict())
    reference, parallel = DataParallel(eager), DataParallel(model)
    return reference, parallel, toy_region(model, slots=3, reduction=reduction)


def eager_loss(reference, batch):
    return loss_of(reference.model(batch.x, batch.offsets))


def region_loss(region, batch):
    """Replay, or run eager the way the vision code does."""
    outputs = region.run(batch)
    if outputs is None:
        outputs = region.program.model(batch.x, batch.offsets)
    return loss_of(outputs)


FITTING, TOO_LARGE = (2, 4), (10, 8)


class Left(DataParallel):
    """Hooks that leave `.grad` to the loop, which adds to `main_grad` what is there at the end of a step."""

    def _hook(self, name, parameter):
        return lambda *unused: self.fired.append(name)


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


class _WithoutBiasGradient(torch.autograd.Function):
    """`x + bias` that gives the bias no gradient, as Transformer Engine does where the weight is frozen."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def fused(model):
    model.mix.forward = lambda x, mix=model.mix: _Fused.apply(x, mix.weight) + mix.bias


def without_bias_gradient(model):
    model.mix.forward = lambda x, mix=model.mix: _WithoutBiasGradient.apply(x @ mix.weight.T, mix.bias)


def plain(model):
    """The toy as it is."""


# What is done to a model, and its data parallelism.
KINDS = {
    "data parallelism": (plain, DataParallel),
    "of some parameters": (plain, partial(DataParallel, only=("mix.weight", "pair.bias"))),
    "none": (plain, lambda model: None),
    "that leaves gradients": (plain, Left),
    "without hooks": (plain, lambda model: DataParallel(model).drop()),
    "with a module that adds to main_grad": (fused, DataParallel),
    "without hooks, with such a module": (fused, lambda model: DataParallel(model).drop()),
    "with a function that gives no gradient": (without_bias_gradient, DataParallel),
}
MICROBATCH = st.tuples(st.sampled_from([(2,), FITTING, (16,), TOO_LARGE]), st.sampled_from([1.0, 1.0, 0.0]))


def _collected(parameter):
    """Return what has come of a gradient; where a module has added it to `main_grad` itself, `.grad` is anything."""
    if getattr(parameter, "grad_added_to_main_grad", False):
        return parameter.main_grad
    parts = [p for p in (getattr(parameter, "main_grad", None), parameter.grad) if p is not None]
    return sum(parts) if parts else None


@pytest.mark.parametrize(("change", "parallel"), KINDS.values(), ids=KINDS)
@settings(max_examples=10)
@given(st.lists(st.lists(MICROBATCH, min_size=1, max_size=3), min_size=1, max_size=4), st.booleans())
def test_any_microbatches_in_any_backwards_accumulate_as_in_eager(change, parallel, backwards, flip):
    """Replays and eager passes, in one backward too; nothing is lost or counted twice, flags and hooks are eager's."""
    models = Toy(), Toy()
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        change(model)
    sides = list(map(parallel, models))
    region, seeds = toy_region(models[1], slots=3), itertools.count()
    if change is fused:  # it sets a flag that lasts until the next microbatch
        backwards = [[each] for backward in backwards for each in backward]
    for backward in backwards:
        if change is fused:
            for model in models:
                model.mix.weight.grad_added_to_main_grad = False
        batches = [(toy_batch(lengths, next(seeds)), scale) for lengths, scale in backward]
        sum(loss_of(models[0](batch.x, batch.offsets)) * scale for batch, scale in batches).backward()
        losses = [region_loss(region, batch) * scale for batch, scale in batches]
        sum(reversed(losses) if flip else losses).backward()
        poison(region, float("nan"))
        assert_same(*(list(map(_collected, model.parameters())) for model in models))
        if parallel is not Left:
            assert_same(*([p.grad for p in model.parameters() if change is plain] for model in models))
        if isinstance(sides[0], DataParallel):
            assert sorted(sides[0].fired) == sorted(sides[1].fired)
            assert parallel is Left or change is fused or sides[1].flags == [False] * len(sides[1].flags)
        found = [g for g in (p.grad for p in models[1].parameters()) if g is not None]
        assert len({g.data_ptr() for g in found}) == len(found)
    fitting = sum(lengths is not TOO_LARGE for backward in backwards for lengths, _ in backward)
    assert region.statistics.replays == fitting


def test_a_backward_that_fails_leaves_no_flag_behind():
    """Else the next eager gradient would be taken for one that main_grad has already."""
    reference, parallel, region = pair()
    batch = toy_batch(FITTING)
    inner = batch.x * 1.0
    inner.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        region_loss(region, type(batch)(inner, batch.offsets)).backward()
    for gradient in parallel.main_grads:
        gradient.zero_()
    eager_loss(reference, toy_batch(TOO_LARGE)).backward()
    region_loss(region, toy_batch(TOO_LARGE)).backward()
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
    add_together(zip(main_grads, gradients, strict=True))
    assert all(torch.equal(main, wanted) for main, wanted in zip(main_grads, expected, strict=True))


def test_gradients_of_every_size_reach_main_grad():
    model = torch.nn.ParameterDict({name: torch.zeros(size) for name, size in (("bias", 8), ("weight", SMALL + 1))})
    for parameter in model.values():
        parameter.main_grad = torch.ones_like(parameter)
    nodes = hook_main_grads(model.values())
    aliases = {p: torch.nn.Parameter(p.detach()) for p in model.values()}
    sinks = GradientSinks(list(model.values()), Silent())
    with sinks.attached(aliases):
        loss = sum((alias * 3).sum() for alias in aliases.values())
        torch.autograd.grad(loss, list(aliases.values()))
    assert nodes and all((p.main_grad == 4).all() for p in model.values())


ASKS = [
    lambda loss, batch, model: torch.autograd.grad(loss, [batch.x]),
    lambda loss, batch, model: loss.backward(inputs=[batch.x]),
    lambda loss, batch, model: torch.autograd.grad(loss, [batch.x, model.mix.weight], allow_unused=True),
    lambda loss, batch, model: torch.autograd.grad(loss, [model.mix.weight], allow_unused=True),
    lambda loss, batch, model: loss.backward(inputs=[model.mix.weight]),
    lambda loss, batch, model: loss.backward(inputs=list(model.parameters())),
]


@pytest.mark.parametrize("ask", ASKS)
def test_a_backward_for_some_inputs_adds_nothing_to_main_grad(ask):
    _, parallel, _ = pair()
    gc.collect()  # other regions
    before = torch.autograd._engine_run_backward
    region, batch = toy_region(parallel.model, reduction=Silent()), toy_batch(FITTING)
    with pytest.raises(ReplayError, match="backward\\(inputs=\\)"):
        ask(region_loss(region, batch), batch, parallel.model)
    assert region.statistics.replays == 1 and not any(g.any() for g in parallel.main_grads)
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


def setup():
    reduction = Waiting()
    reference, parallel, region = pair(reduction)
    return reference, parallel, reduction, region


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


def test_a_users_hook_put_on_after_capture_fires():
    _, parallel, _, region = setup()
    seen = []
    parameter = parallel.model.out.weight
    handle = parameter.register_hook(lambda *_: seen.append(1))
    for _ in range(3):  # eager, then on graphs
        parallel.fired.clear()
        region_loss(region, toy_batch(FITTING)).backward()
    assert seen == [1] * 3 and parallel.fired == ["out.weight"]
    assert region.statistics.fallbacks == {"parameters_changed": 1}
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


CUT = 3  # a step that no gradient passes
PLACES = st.integers(0, 5)


class Web(nn.Module):
    """Steps that each take an earlier value; outputs may be the input, the same tensor twice, or need no gradient."""

    def __init__(self, steps, outputs, frozen) -> None:
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(CUT))
        for layer in frozen:
            self.layers[layer].requires_grad_(False)

    def forward(self, x, offsets):
        values = [x]
        for layer, place in self.steps:
            value = values[place % len(values)]
            values.append(value.detach() if layer == CUT else torch.tanh(self.layers[layer](value)))
        return self.layers[0](values[-1]), values[-1], *(values[place % len(values)] for place in self.outputs)


def gradients_through(outputs, model, x, read):
    model.zero_grad()
    x.grad = None
    loss_of([outputs[i] for i in read]).backward()
    return [tensor.grad for tensor in (*model.parameters(), x)]


@pytest.mark.parametrize("executor", [ReferenceExecutor, PooledExecutor])
@given(
    steps=st.lists(st.tuples(st.integers(0, CUT), PLACES), max_size=6),
    outputs=st.lists(PLACES, max_size=3),
    frozen=st.sets(st.integers(0, CUT - 1), max_size=2),
    requires_grad=st.booleans(),
    data=st.data(),
)
def test_gradients_and_their_absence_are_eagers(executor, steps, outputs, frozen, requires_grad, data):
    model, batch = Web(steps, outputs, frozen), toy_batch(requires_grad=requires_grad)
    region = new_region(ToyProgram(model), executor(), [Bucket(8)])
    region.capture()
    for _ in range(2):
        made, outputs = model(batch.x, batch.offsets), region.run(batch)
        differentiable = [i for i, output in enumerate(made) if output.requires_grad]
        if differentiable:
            read = data.draw(st.sets(st.sampled_from(differentiable), min_size=1))
            expected = gradients_through(made, model, batch.x, read)
            assert_same(gradients_through(outputs, model, batch.x, read), expected)
        else:  # as where adapters are switched off
            assert_same(outputs, made)
            found = gradients_through(outputs, model, batch.x, [0]) if outputs[0].requires_grad else []
            assert not any(gradient is not None for gradient in found)
