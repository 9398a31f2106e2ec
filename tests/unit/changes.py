"""A small model that changes in every way that a user's model may, compared with an eager copy."""

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bridge_cg_plugin.graphs.buckets import Bucket, Demand
from bridge_cg_plugin.graphs.manager import GraphManager
from bridge_cg_plugin.graphs.program import FIRST_OUTPUT, Call, Piece, Surroundings, Workload
from bridge_cg_plugin.graphs.recordings.chain import NOTHING_LEAVES
from bridge_cg_plugin.offload.offloading import RegionOffloading
from bridge_cg_plugin.offload.plan import Policy
from bridge_cg_plugin.offload.registry import OTHER

from ..leaving import LeavingExecutor
from ..main_grads import give_main_grads, hook_main_grads
from ..rows_program import RowsProgram

WIDTH, LAYERS, CAPACITIES, SLOTS = 6, 2, (4, 8), 2
EVERYTHING = Policy(frozenset({OTHER}), frozenset(), least_bytes=1)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Scaled(nn.Module):
    """A layer that reads an attribute, a buffer, its config and its mode."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.gain = config, 1.0
        self.marks, self.scales = [], {"first": 1.0}
        self.last_mean = torch.zeros(())
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        gain = self.gain * self.config.power * self.scales["first"] + len(self.marks)
        hidden = torch.tanh(self.first(x)) * self.scale * gain
        self.last_mean.copy_(hidden.detach().mean())  # as statistics that a forward leaves behind
        return self.second(hidden if self.training else 0.5 * hidden)

    def linears(self) -> list[nn.Module]:
        return [self.first, self.second]


class Adapter(nn.Module):
    """A linear layer with a low-rank addition that can be switched off."""

    def __init__(self, base: nn.Module, seed: int) -> None:
        super().__init__()
        self.base, self.enabled = base, True
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn(2, WIDTH, generator=generator))
        self.up = nn.Parameter(torch.randn(WIDTH, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + nn.functional.linear(nn.functional.linear(x, self.down), self.up) if self.enabled else y


class Model(nn.Module):
    """Layers, most of whose parameters have a `main_grad` in one flat buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = SimpleNamespace(power=1.0)
        self.layers = nn.ModuleList(Scaled(config) for _ in range(LAYERS))
        followed = [p for n, p in self.named_parameters() if not n.endswith("second.bias")]
        self.flat = torch.zeros(sum(p.numel() for p in followed))
        give_main_grads(followed, self.flat)
        self.nodes = hook_main_grads(followed)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Rows(NamedTuple):
    """A microbatch's size."""

    tokens: int


def rows_of(batch) -> Rows:
    return Rows(len(batch))


class Batch:
    """What parts of the model replay: each has hidden states of its own, and nothing in common with others."""

    loaded = True

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def of_part(self, hidden: Tensor, loaded: bool) -> Tensor:
        return hidden


class PartProgram(RowsProgram):
    """The inner part of a layer."""

    def differentiable_inputs(self, batch):
        return (batch.x if isinstance(batch, Batch) else batch,)


class ModelWorkload(Workload):
    """The model on graphs: all of it as one region, or the inner part of every layer as a region of its own."""

    title, noun, group, out_of_memory_remedy, strict = "graphs", "model", "toy", "", True

    def __init__(self, model: Model, parts: bool, grows: bool, chained: bool = False) -> None:
        self._model, self._layers, self._grows = model, tuple(model.layers) if parts else (), grows
        self._chained = chained

    def read(self, x: Tensor) -> Call:
        return Call(Batch(x) if self._layers else x, note=Rows(len(x)))

    def observe(self, call: Call) -> None: ...

    def capture(self) -> None:
        demand = None
        if self._grows:
            demand = Demand(
                buckets_of=lambda capacity, _: [Bucket(capacity)],
                refusal=lambda shape, bucket: None,
                cost=lambda bucket: bucket.tokens,
                named=CAPACITIES,
            )
        buckets = [] if demand else [Bucket(c) for c in CAPACITIES]
        offloading = RegionOffloading(EVERYTHING, self.manager.slots, self.manager.executor.device)
        layers = [
            Piece(
                program=PartProgram(layer, (WIDTH,), 1, layer.inner, layer.linears),
                buckets=buckets,
                calls=((layer, "inner", FIRST_OUTPUT),),
                growth=demand,
                shape=rows_of,
            )
            for layer in self._layers
        ]
        whole = RowsProgram(self._model, (WIDTH,), 1, self.manager.eager_forward)
        pieces = layers or [Piece(program=whole, buckets=buckets, growth=demand, shape=rows_of)]
        self.manager.record(pieces, demand, offloading=offloading if self._chained else NOTHING_LEAVES)

    def captured(self) -> None: ...

    def notes(self) -> dict[str, str]:
        return {}


def graphs_of(model: Model, parts: bool, grows: bool = False, chained: bool = False) -> GraphManager:
    """Put a model on graphs that are not captured yet."""
    workload = ModelWorkload(model, parts, grows, chained)
    return GraphManager(model, workload, LeavingExecutor(), Surroundings(slots=SLOTS))


def are_close(actual: Tensor, expected: Tensor) -> bool:
    """Say what `torch.testing.assert_close` would, in a fraction of its time."""
    alike = actual.dtype == expected.dtype and actual.shape == expected.shape
    return alike and torch.allclose(actual, expected, **CLOSE)


# What writes something in a layer, and values for it.
SETTINGS: tuple[tuple[Callable[[Any, Any], object], tuple[Any, ...]], ...] = (
    (lambda layer, gain: setattr(layer, "gain", gain), (0.5, 1.0, 2.0)),
    (lambda layer, power: setattr(layer.config, "power", power), (1.0, 1.5)),
    (lambda layer, marks: layer.marks.__setitem__(slice(None), marks), ("", "a", "ab")),
    (lambda layer, scale: layer.scales.update(first=scale), (1.0, 3.0)),
    (lambda layer, scale: setattr(layer, "scale", torch.full((WIDTH,), scale)), (1.0, 3.0)),
)


class GraphedAndEager:
    """A model on graphs and an eager copy, changed alike by `change` and run alike by `microbatch`.

    Args:
        seed: Decides weights and every choice.
        parts: Whether a part of every layer is a region of its own, instead of the whole model.
        grows: Whether buckets are recorded on demand, before steps that begin at random.
        chained: Whether activations of parts leave the device, so that the parts share their memory.
    """

    def __init__(self, seed: int, parts: bool = False, grows: bool = False, chained: bool = False) -> None:
        self.grows = grows
        self.random = random.Random(seed)
        self.models = [Model(seed), Model(seed)]
        self.graphs = graphs_of(self.models[1], parts, grows, chained)
        self.graphs.capture()
        self.in_flight: list[tuple[Tensor, Tensor]] = []
        self.autocast = False
        self._undo: list[Callable[[], None]] = []
        self._held: list[Tensor] = []
        # By parameter: hooks of several parameters may fire in another order.
        self.seen: tuple[dict, dict] = (defaultdict(list), defaultdict(list))

    def each(self, change: Callable[[Model], Callable[[], None] | None]) -> None:
        """Change both models; what the change returns undoes it later."""
        undone = [change(model) for model in self.models]
        if undone[0] is not None:
            self._undo.append(lambda: [undo() for undo in undone])

    def undo(self) -> None:
        """Take one of the changes back."""
        if self._undo:
            self._undo.pop(self.random.randrange(len(self._undo)))()

    def microbatch(self, backward: bool = True, gradients: bool = True) -> None:
        """Run a microbatch on both and compare outputs; its backward follows now or later."""
        # bf16 products of other than a bucket's own rows round otherwise.
        rows = self.random.choice(CAPACITIES) if self.autocast else self.random.randint(1, 10)
        seed = self.random.random()
        found = []
        for model in self.models:
            generator = torch.Generator().manual_seed(int(seed * 1e9))
            x = torch.randn(rows, WIDTH, generator=generator, requires_grad=self.wants_input_gradient(seed))
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(gradients))
                if self.autocast:
                    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                y = model(x * 1.0)  # what a model before this one returns is no leaf
            found.append((x, y))
        (expected_x, expected), (x, actual) = found
        self.compare("outputs", actual, expected)
        assert actual.requires_grad == expected.requires_grad
        if actual.requires_grad:
            self.in_flight.append(((expected_x, expected), (x, actual)))
        if backward:
            self.finish()

    @staticmethod
    def wants_input_gradient(seed: float) -> bool:
        return seed < 0.5

    def finish(self) -> None:
        """Run the backwards to come, in any order, and compare every gradient."""
        while self.in_flight:
            pair = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
            for _, y in pair:
                (y.float() * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum().backward()
            (expected_x, _), (x, _) = pair
            self.compare("input gradient", x.grad, expected_x.grad)
            self.compare_gradients()

    def compare_gradients(self) -> None:
        expected, actual = (dict(model.named_parameters()) for model in self.models)
        for name, parameter in expected.items():
            self.compare(f"{name}.grad", actual[name].grad, parameter.grad)
            main = getattr(parameter, "main_grad", None)
            self.compare(f"{name}.main_grad", getattr(actual[name], "main_grad", None), main)
        assert {name: len(seen) for name, seen in self.seen[0].items()} == {n: len(s) for n, s in self.seen[1].items()}
        for name, theirs in self.seen[0].items():
            for expected_seen, seen in zip(theirs, self.seen[1][name], strict=True):
                self.compare(f"what a hook of {name} saw", seen, expected_seen)

    def compare(self, what: str, actual: Tensor | None, expected: Tensor | None) -> None:
        assert (actual is None) == (expected is None), f"{what}: {actual} where eager has {expected}"
        if expected is not None and not are_close(actual, expected):
            torch.testing.assert_close(actual, expected, msg=lambda m: f"{what}: {m}", **CLOSE)

    def close(self) -> None:
        self.graphs.detach()

    # What may happen between microbatches; `idle` ones only while no backward is to come.

    def both(self, change: Callable[[Model], object]) -> None:
        """Change both models for good."""
        for model in self.models:
            change(model)

    def adapters_switched(self) -> None:
        on = self.random.random() < 0.5
        adapters = (module for model in self.models for module in model.modules() if isinstance(module, Adapter))
        for adapter in adapters:
            adapter.enabled = on

    def adapter_added(self) -> None:
        layer, seed = self.random.randrange(LAYERS), self.random.randrange(1000)

        def add(model: Model):
            base = model.layers[layer].first
            if isinstance(base, Adapter):
                return None
            model.layers[layer].first = Adapter(base, seed)
            return lambda: setattr(model.layers[layer], "first", base)

        self.each(add)

    def setting_written(self) -> None:
        (write, values), layer = self.random.choice(SETTINGS), self.random.randrange(LAYERS)
        value = self.random.choice(values)
        self.both(lambda model: write(model.layers[layer], value))

    def mode_set(self) -> None:
        part, training = self.random.choice(["", "layers.0", "layers.1"]), self.random.random() < 0.6
        self.both(lambda model: model.get_submodule(part).train(training))

    def frozen(self) -> None:
        name, wanted = self.random.choice([n for n, _ in self.models[0].named_parameters()]), self.random.random() < 0.5
        self.both(lambda model: model.get_parameter(name).requires_grad_(wanted))

    def forward_hook(self) -> None:
        part, kind = self.random.choice(["layers.0", "layers.1.second"]), self.random.randrange(2)

        def put(model: Model):
            module = model.get_submodule(part)
            if kind:
                return module.register_forward_hook(lambda m, a, y: 1.5 * y).remove
            return module.register_forward_pre_hook(lambda m, a: (0.5 * a[0],)).remove

        self.each(put)

    def parameter_hook(self) -> None:
        name, after = self.random.choice(["layers.0.second.weight", "layers.1.second.bias"]), self.random.random() < 0.3
        seen = dict(zip(self.models, self.seen, strict=True))

        def put(model: Model):
            parameter = model.get_parameter(name)
            if not parameter.requires_grad:
                return None
            if after:
                kept = seen[model][name]
                return parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.clone())).remove
            return parameter.register_hook(lambda g: (seen[model][name].append(g.clone()), 0.5 * g)[1]).remove

        self.each(put)

    def gradient_memory_moved(self) -> None:
        for model in self.models:
            storage = model.flat.untyped_storage()
            kept, size = model.flat.clone(), storage.nbytes()
            storage.resize_(0)
            self._held = [*self._held[-8:], torch.full_like(kept, 7.0)]
            storage.resize_(size)
            model.flat.copy_(kept)

    def parameter_memory_moved(self) -> None:
        name = self.random.choice([n for n, _ in self.models[0].named_parameters()])

        def move(model: Model):
            parameter = model.get_parameter(name)
            before, parameter.data = parameter.data, parameter.data.clone()

            def back() -> None:
                before.copy_(parameter.data)
                parameter.data = before

            return back

        self.each(move)

    def main_grad_replaced(self) -> None:
        for model in self.models:
            parameter = model.layers[0].second.weight
            parameter.main_grad = parameter.main_grad.clone()

    def weights_loaded(self) -> None:
        seed = self.random.randrange(1000)
        for model in self.models:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.layers[0].parameters():
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def optimizer_step(self) -> None:
        for model in self.models:
            with torch.no_grad():
                for parameter in model.parameters():
                    gradient = getattr(parameter, "main_grad", parameter.grad)
                    if gradient is not None:
                        parameter.sub_(1e-3 * gradient)
                        gradient.zero_()

    def autocast_switched(self) -> None:
        self.autocast = not self.autocast and not self.grows  # a size may be padded until it has a bucket

    def step_begins(self) -> None:
        self.graphs.begin_step()

    def memory_leaves(self) -> None:
        self.graphs.release_memory()

    def memory_has_no_room(self) -> None:
        self.graphs.executor.room = self.random.random() < 0.7
        self.step_begins()

    ANY_TIME = (
        adapters_switched,
        adapter_added,
        *(setting_written,) * 4,
        mode_set,
        forward_hook,
        autocast_switched,
        memory_leaves,
        memory_has_no_room,
    )
    IDLE = (
        frozen,
        parameter_hook,
        gradient_memory_moved,
        parameter_memory_moved,
        main_grad_replaced,
        weights_loaded,
        optimizer_step,
    )

    def random_sequence(self, length: int) -> None:
        """Change the models and run microbatches, at random."""
        for _ in range(length):
            if not self.in_flight and self.random.random() < 0.3:
                self.undo()
            if self.random.random() < 0.5:
                changes = (*self.ANY_TIME, *(() if self.in_flight else self.IDLE))
                self.random.choice(changes)(self)
            if self.grows:
                for _ in range(self.random.choice([0, 1, 2, 20])):
                    self.step_begins()
            for _ in range(self.random.randint(1, 3)):
                backward, gradients = self.random.random() < 0.7, self.random.random() < 0.75
                self.microbatch(backward, gradients)
        self.finish()
