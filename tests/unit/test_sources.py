"""What a recording was made from, and everything by which a model can be another than that."""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.changes.model_watch import ModelWatch
from bridge_cg_plugin.graphs.changes.source import SAMPLE, Source, _of_turn
from bridge_cg_plugin.graphs.changes.state import Holder
from bridge_cg_plugin.graphs.errors import CaptureError, ReplayError

from ..main_grads import Silent, hook_main_grads
from ..regions import Counted, new_region
from ..rows_program import RowsProgram
from ..tape import TapeExecutor
from .toy import no_memory

WIDTH = 4


@dataclass
class Settings:
    scale: float = 1.0
    inner: Any = None


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Plain:
    def __init__(self):
        self.scale, self.inner = 1.0, Settings()


@dataclass
class Held:
    """What a layer reads, one inside the other, in every kind of container and object."""

    data: Settings = field(default_factory=lambda: Settings(inner=Settings()))
    slotted: Slotted = field(default_factory=Slotted)
    plain: Plain = field(default_factory=Plain)
    named: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(a=Settings()))
    function: partial = field(default_factory=lambda: partial(torch.mul, other=1.0))
    array: numpy.ndarray = field(default_factory=lambda: numpy.ones(1))
    nested: dict = field(default_factory=lambda: {"a": {"b": 1.0}, "one": [2.0], "other": []})
    inside: tuple = field(default_factory=lambda: ([1.0], {"a"}))

    def read(self):
        """Return a number that everything held goes into."""
        objects = (self.data, self.data.inner, self.slotted, self.plain, self.plain.inner, self.named.a)
        listed = 3 * sum(self.nested["one"]) + sum(self.nested["other"]) + self.inside[0][0] + len(self.inside[1])
        return sum(o.scale for o in objects) + float(self.array[0]) + self.nested["a"]["b"] + listed


class Layer(nn.Module):
    """Reads attributes of every kind."""

    shift = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain, self.extra = 1.0, None
        self.merged, self.scaling = [], {"default": 2.0}
        self.config = SimpleNamespace(power=1.0, function=torch.tanh, inner=Settings(), scales={"a": [1.0]})
        self.held = Held()

    def forward(self, x):
        config, held = self.config, self.held
        y = config.function(self.linear(x)) * self.gain * config.power * config.inner.scale * config.scales["a"][0]
        y = held.function(y) * held.read() + self.shift
        if not self.merged:
            y = y + self.scaling["default"] * x
        return y if self.extra is None else y * self.extra


class Sine(Layer):
    """What a layer's class is changed to."""

    def forward(self, x):
        return torch.sin(super().forward(x))


class Counting(nn.Linear):
    """Leaves something in an attribute with every pass."""

    passes = 0

    def __init__(self, note):
        super().__init__(WIDTH, WIDTH)
        self.calls, self.note = 0, note

    def forward(self, x):
        y = super().forward(x)
        self.note(self, y)
        return y


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def region_of(model, **options):
    region = new_region(RowsProgram(model, (WIDTH,)), TapeExecutor(), [Bucket(8)], **options)
    region.capture()
    return region


def with_main_grads(model):
    model.nodes = hook_main_grads(model.parameters())
    return model


def batch(rows=3):
    return torch.randn(rows, WIDTH)


def strip_hooks(model):
    model[0]._forward_hooks = OrderedDict()


def replace_config(model):
    model[0].config = copy(model[0].config)


def set_in(find: Callable[[Layer], Any], name: str, value: Any = 3.0) -> Callable[[nn.Module], None]:
    """Return what writes an attribute, or an element, of something in the first layer."""

    def change(model: nn.Module) -> None:
        owner = find(model[0])
        owner.__setitem__(name, value) if hasattr(owner, "__setitem__") else setattr(owner, name, value)

    return change


CHANGES = {
    "another dict of modules": lambda model: setattr(model, "_modules", OrderedDict(model._modules, **{"1": Layer()})),
    "another sign of zero": lambda model: setattr(model[0], "gain", -0.0),
    "another class": lambda model: setattr(model[0], "__class__", Sine),
    "an element of a list that moves to the next one": lambda model: (
        model[0].held.nested["other"].append(model[0].held.nested["one"].pop())
    ),
    "a set": lambda model: model[0].held.inside[1].add("b"),
    "a list in a tuple": set_in(lambda layer: layer.held.inside[0], 0),
    "a dict in a dict": set_in(lambda layer: layer.held.nested["a"], "b"),
    "a data class": set_in(lambda layer: layer.held.data, "scale"),
    "a data class in a data class": set_in(lambda layer: layer.held.data.inner, "scale"),
    "slots": set_in(lambda layer: layer.held.slotted, "scale"),
    "an object": set_in(lambda layer: layer.held.plain, "scale"),
    "a namespace": set_in(lambda layer: layer.held.named.a, "scale"),
    "a partial function": set_in(lambda layer: layer.held.function.keywords, "other"),
    "an array": set_in(lambda layer: layer.held.array, 0),
    "a field of the configuration": set_in(lambda layer: layer.config, "power"),
    "a function of the configuration": set_in(lambda layer: layer.config, "function", torch.sin),
    "an object of the configuration": set_in(lambda layer: layer.config.inner, "scale"),
    "a list in a dict of the configuration": set_in(lambda layer: layer.config.scales["a"], 0),
    "an attribute of a class": lambda model: setattr(Layer, "shift", 2.0),
    "a method of a class": lambda model: setattr(Layer, "forward", lambda self, x: 2 * self.linear(x)),
}


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_and_gets_recordings_of_its_own(change, in_step, monkeypatch):
    model, x = two_layers(), batch()
    for name in ("shift", "forward"):  # what other tests of this process see, too, is undone
        monkeypatch.setattr(Layer, name, getattr(Layer, name))
    region = region_of(model)
    change(model)
    for _ in range(2):
        with region.watch.step() if in_step else torch.enable_grad():
            outputs = region.run(x)
    assert region.statistics.fallbacks == {"model_changed": 1}
    torch.testing.assert_close(outputs[0], model(x))


class Tallied(nn.Linear):
    """Counts its calls in its class."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


def test_what_passes_count_in_a_class_is_no_change_whoever_counts():
    model, other, x = nn.Sequential(Tallied(2, 2)), Tallied(2, 2), torch.ones(1, 2)
    watch = ModelWatch([model])
    with watch.passing():
        model(x)
    watch.look()
    before = watch.state(model.modules())
    other(x)
    watch.look()
    assert watch.state(model.modules()) == before
    watch.close()


@pytest.mark.parametrize(
    "replace, change",
    [
        (strip_hooks, lambda model: model[0].register_forward_hook(lambda module, given, out: 2 * out)),
        (replace_config, lambda model: setattr(model[0].config, "power", 3.0)),
        (lambda model: setattr(model[0], "scaling", {"default": 2.0}), lambda model: model[0].scaling.clear()),
    ],
    ids=["hooks", "config", "dict"],
)
def test_what_takes_the_place_of_a_followed_dict_is_followed(replace, change):
    model = two_layers()
    region, x = region_of(model), batch()
    replace(model)
    for _ in range(2):
        region.run(x)
    assert region.statistics.replays
    change(model)
    assert region.run(x) is None


SAME = {
    "an equal list": lambda model: setattr(model[0], "merged", []),
    "a copy of the configuration": lambda model: setattr(model[0], "config", copy(model[0].config)),
    "another container of the same modules": lambda model: setattr(model[0], "parts", nn.ModuleList(model[0].parts)),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_computes_the_same_is_no_change(change):
    model = two_layers()
    model[0].parts = nn.ModuleList([model[0].linear])
    region = region_of(model)
    change(model)
    assert region.run(batch()) is not None


def test_modules_that_come_and_go_are_not_kept():
    model = two_layers()
    region, x = region_of(model), batch()
    gone = []
    for _ in range(12):
        model[1] = Layer()
        gone.append(weakref.ref(model[1].linear.weight))
        for _ in range(3):
            region.run(x)
    gc.collect()
    assert sum(reference() is not None for reference in gone) <= 5  # of kept recordings, and the one in use
    assert len(region.watch._tables) < 200


def test_a_parameter_that_takes_the_identity_of_one_that_is_gone_is_another():
    """Identities differ between ranks, which must capture together."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    region, x, met = region_of(model), batch(), set()
    for _ in range(12):
        made = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(100)]
        model[0].weight = next((parameter for parameter in made if id(parameter) in met), made[0])
        met.add(id(model[0].weight))
        del made
        assert region.run(x) is None
        torch.testing.assert_close(region.run(x)[0], model(x))


def test_parameters_that_come_back_in_turn_keep_their_graphs():
    """Averaged weights that take the place of the trained ones for evaluations, with and without autocast."""
    model = two_layers()
    trained = dict(model.named_parameters())
    averaged = {name: nn.Parameter(value.detach() / 2) for name, value in trained.items()}
    region, x = region_of(model), batch()
    for turn in range(12):
        for parameters in (trained, averaged):
            for name, parameter in parameters.items():
                module, _, last = name.rpartition(".")
                model.get_submodule(module)._parameters[last] = parameter
            for mixed in (True, False):
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    outputs = [region.run(x) for _ in range(3)]
                    assert turn < 2 or None not in outputs
                    torch.testing.assert_close(outputs[2][0], model(x))


@pytest.mark.parametrize("leaf", [True, False])
def test_attributes_that_require_a_gradient_keep_the_model_eager(leaf):
    model, factor = two_layers(), torch.ones(WIDTH, requires_grad=True)
    region, x = region_of(model), batch()
    model[0].extra = factor if leaf else factor * 2
    for _ in range(3):
        assert region.run(x) is None
    assert region.statistics.fallbacks == {"model_changed": 1, "capture_failed": 2}
    model[0].extra = factor
    with pytest.raises(CaptureError, match="0.extra requires a gradient"):
        region_of(model)


def test_a_plain_value_that_a_forward_left_once_counts_when_somebody_else_sets_it():
    def once(module, y):
        if module.calls == 0:
            module.calls = 1

    model = nn.Sequential(Counting(once))
    watch = ModelWatch((model,))
    with watch.passing():
        model(batch())
    region = region_of(model, watch=watch)
    assert region.run(batch()) is not None
    model[0].calls = 2
    assert region.run(batch()) is None


def graphed_or_eager(region, model, x):
    outputs = region.run(x)
    return model(x) if outputs is None else outputs[0]


def assert_trains_as_eager(train):
    """Train a model on graphs and one without, whose first layer changes; returns the region."""
    model, reference = two_layers(), two_layers()
    region = region_of(model)
    for step in range(4):
        model[0].gain = reference[0].gain = 1.0 if step == 0 else 2.0
        found, rows = [], batch(8)  # of as many rows a matrix library takes one kernel
        for layers, call in ((model, partial(graphed_or_eager, region, model)), (reference, reference)):
            layers.zero_grad()
            x = rows.clone().requires_grad_()
            train(call, x)
            found.append([x.grad, *(p.grad for p in layers.parameters())])
        torch.testing.assert_close(*found)
    return region


def test_hooks_of_the_caller_do_not_reach_into_a_recording():
    def train(call, x):
        with torch.autograd.graph.save_on_cpu():
            call(x).sum().backward()

    region = assert_trains_as_eager(train)
    assert region.statistics.replays and "capture_failed" not in region.statistics.fallbacks


@pytest.mark.parametrize("behind", [torch.sin, torch.Tensor.clone])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_of_a_checkpoint_around_the_model_and_what_follows(behind, reentrant):
    """A non-reentrant one counts what a forward saves, and takes the second forward's tensors for the first one's."""

    def train(call, x):
        checkpoint(lambda x: behind(call(x)), x, use_reentrant=reentrant).sum().backward()

    found = assert_trains_as_eager(train).statistics
    assert bool(found.replays) == reentrant and ("in_checkpoint" in found.fallbacks) != reentrant


def test_a_frozen_model_replays_in_a_checkpoint():
    model = two_layers().requires_grad_(False)
    region = region_of(model)
    for _ in range(2):
        x, rows = torch.ones((), requires_grad=True), batch()
        checkpoint(lambda x, rows: (region.run(rows)[0] * x).sin(), x, rows, use_reentrant=False).sum().backward()
        y = model(rows)
        torch.testing.assert_close(x.grad, (y * y.cos()).sum())
    assert not region.statistics.fallbacks


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "change", [lambda p: p.requires_grad_(False), lambda p: p.register_hook(lambda g: g)], ids=["frozen", "hooked"]
)
def test_a_backward_whose_parameters_changed_since_its_forward_is_refused(change, inside):
    model = with_main_grads(two_layers())
    region = region_of(model, reduction=Silent())
    with region.watch.step() if inside else torch.enable_grad():
        (outputs,) = region.run(batch())
        change(model[0].linear.weight)
        with pytest.raises(ReplayError, match="frozen or unfrozen, or a hook"):
            outputs.sum().backward()
    assert not any(parameter.main_grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("newer", [False, True])
def test_another_precision_that_lasts_gets_recordings_of_its_own(newer):
    """PyTorch's older getter raises once the newer setting was written."""
    model = two_layers()
    region, x = region_of(model), batch()
    products = torch.backends.mkldnn.matmul if newer else SimpleNamespace()
    before = torch.get_float32_matmul_precision()
    try:
        if newer:
            products.fp32_precision = "bf16"
        else:
            torch.set_float32_matmul_precision("medium")
        assert region.run(x) is None and region.run(x) is not None
    finally:
        if newer:
            products.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(before)
    assert region.run(x) is not None and region.statistics.fallbacks == {"numerics_changed": 1}


def test_a_rank_whose_memory_moved_and_that_cannot_record_says_so_instead_of_running_eager(monkeypatch):
    model = with_main_grads(two_layers())
    region = region_of(model, consensus=Counted())
    model[0].linear.weight.main_grad = torch.zeros(WIDTH, WIDTH)
    monkeypatch.setattr(region.executor, "record_forward", no_memory)
    with pytest.raises(CaptureError, match="memory was moved on this rank"):
        region.run(batch())


def test_nothing_is_recorded_where_memory_is_not_as_it_was_found(monkeypatch):
    monkeypatch.setattr(Source, "moved", lambda *unused, **more: True)
    with pytest.raises(CaptureError, match="moved inside a step"):
        region_of(two_layers())


def test_memory_that_moves_inside_a_step_ends_ranks_that_share_layers():
    model = with_main_grads(two_layers())
    region = region_of(model, consensus=Counted(), slots=2)
    outputs = region.run(batch())
    model[0].linear.weight.main_grad = torch.zeros(WIDTH, WIDTH)
    with pytest.raises(CaptureError, match="move it between steps"):
        region.run(batch())
    del outputs


def test_a_model_that_lost_a_part_runs_eager(caplog):
    model = nn.Sequential(OrderedDict(mlp=nn.Sequential(OrderedDict(router=nn.Linear(WIDTH, WIDTH)))))
    program = RowsProgram(model, (WIDTH,), modules=lambda: [model.get_submodule("mlp.router")])
    region = new_region(program, TapeExecutor(), [Bucket(8)], watch=ModelWatch((model,)))
    region.capture()
    model.mlp = nn.Linear(WIDTH, WIDTH)
    for _ in range(3):
        assert region.run(batch()) is None
    assert region.statistics.fallbacks == {"capture_failed": 3}
    assert sum("cannot be captured as it is now" in record.message for record in caplog.records) == 1


@dataclass
class Recipe:
    margin: int = 0


def test_equal_recipes_that_upstream_makes_in_each_forward_are_no_change():
    module = nn.Linear(2, 2)
    module.fp8_meta = {"recipe": Recipe(), "local_recipes": [Recipe()], "group": object()}
    holder = Holder(module, "", frozenset(), depth=0)
    tokens = holder.tokens
    module.fp8_meta |= {"recipe": Recipe(), "local_recipes": [Recipe()]}
    holder.read()
    assert holder.tokens == tokens
    for changed in ({"recipe": Recipe(1)}, {"local_recipes": [Recipe(1)]}, {"group": object()}):
        module.fp8_meta = {**module.fp8_meta, **changed}
        holder.read()
        assert holder.tokens != tokens
        tokens = holder.tokens


@pytest.mark.parametrize("count", [0, 1, SAMPLE, 2 * SAMPLE - 1, 2 * SAMPLE, 345])
def test_a_look_inside_a_step_is_at_a_dozen_tensors_or_all(count):
    places = list(range(count))
    turns = [places[_of_turn(places, turn)] for turn in range(count // SAMPLE + 1)]
    assert all(len(seen) >= min(count, SAMPLE) for seen in turns) and sorted({*sum(turns, [])}) == places
    assert places[_of_turn(places, None)] == places
