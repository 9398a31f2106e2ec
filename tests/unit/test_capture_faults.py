"""Errors of any type, anywhere in a capture: the module goes on eager, as it was, with one warning."""

import logging
from collections import Counter
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError, Refused, reason_of
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.manager import GraphManager
from bridge_cg_plugin.graphs.parts import Parts
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphExecutor, ReferenceExecutor
from bridge_cg_plugin.graphs.region import Region
from bridge_cg_plugin.language.packed.plan import PackPlan
from bridge_cg_plugin.language.packed.workload import PackedWorkload
from bridge_cg_plugin.vision.encoder import RecordedKernels
from bridge_cg_plugin.vision.plan import EncoderPlan
from bridge_cg_plugin.vision.workload import VisionWorkload

from . import packs
from .mixes import MIXED
from .towers import assert_close, graphs_on, new_tower, results

LEAST_BYTES = 1024

METHODS = ("new_memory", "warm_up", "observe", "side_stream", "record_forward")


class Strange(Exception):
    """Of a kind that nobody knows."""


KINDS = (CaptureError, partial(Refused, Fallback.MODEL_CHANGED), torch.OutOfMemoryError, KeyError, StopIteration)
ERRORS = [kind("made to fail") for kind in (*KINDS, Strange)]


class FaultyExecutor(ReferenceExecutor):
    """Raises an error from the n-th call of one of its methods on; counts the calls of all.

    Args:
        method: The method.
        call: The first of its calls that fails, from 0.
        error: What it raises.
    """

    def __init__(self, method="", call=0, error=None):
        super().__init__()
        self.calls = Counter()
        self._fault = method, call, error

    def _called(self, method):
        due = method == self._fault[0] and self.calls[method] >= self._fault[1]
        self.calls[method] += 1
        if due:
            raise self._fault[2]


def _counted(name):
    original = getattr(ReferenceExecutor, name)

    def method(self, *args, **settings):
        self._called(name)
        return original(self, *args, **settings)

    return method


for _name in METHODS:
    setattr(FaultyExecutor, _name, _counted(_name))


@contextmanager
def tower_graphs(model, executor, strict, **options):
    settings = {"buckets": (64, 128), "executor": executor, "strict": strict, **options}
    with graphs_on(model, capture=False, **settings) as graphs:
        yield graphs


@contextmanager
def decoder_graphs(model, executor, strict, modules):
    warmup = packs.pack((100, 150, 50))
    options = {"cuda_graph_modules": modules, "cuda_graph_packed_strict": strict, "cuda_graph_packed_buckets": [288]}
    with packs.graphs_on(model, warmup, capture=False, executor=executor, **options) as graphs:
        yield graphs


class Case:
    """A graphed module: how it is made, put on graphs that are not captured yet, and run."""

    def __init__(self, new, graphs, run, **options):
        self.new, self.run = new, run
        self.graphs = lambda model, executor, strict=False: graphs(model, executor, strict, **options)


def run_tower(model):
    outputs, gradients = results(model, MIXED)
    return [*outputs, *gradients]


def run_decoder(model):
    losses, gradients = packs.losses_and_gradients(model, packs.pack((120, 150)))
    return [losses, *gradients]


def new_small_tower():
    return new_tower(layers=2)


OFFLOADED = {"offload": ("attention", "mlp")}
CASES = {
    "encoder": Case(new_small_tower, tower_graphs, run_tower, streams=2, **OFFLOADED),
    "parts of a decoder": Case(packs.new_model, decoder_graphs, run_decoder, modules=["attn"]),
}
every_case = pytest.mark.parametrize("name", CASES)


def state_of(model):
    """Return what a capture may have left on a model: attributes by identity, modes, hooks."""
    modules = {name: {k: id(v) for k, v in vars(m).items()} for name, m in model.named_modules()}
    held = {name: [id(v) for v in (*m._parameters.values(), *m._buffers.values())] for name, m in model.named_modules()}
    hooks = [len(p._backward_hooks or ()) for p in model.parameters()]
    flags = [getattr(p, "grad_added_to_main_grad", None) for p in model.parameters()]
    return modules, held, [m.training for m in model.modules()], hooks, flags


@pytest.fixture
def warnings(caplog):
    """Return a function that returns the plugin's warnings so far and forgets them."""

    def taken():
        found = [r.getMessage() for r in caplog.records if r.name == "bridge_cg_plugin"]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
        yield taken


@cache
def calls_of(case):
    """Return how often a capture without a fault calls each method."""
    executor = FaultyExecutor()
    with case.graphs(case.new(), executor) as graphs:
        assert graphs.capture()
        return dict(executor.calls)


def assert_left_as_it_was(case, model, graphs, before, expected, reason=Fallback.CAPTURE_FAILED):
    """The failed capture is reported, the model is as before and computes what it did."""
    assert not graphs.captured and "made to fail" in graphs.failure
    assert state_of(model) == before
    assert_close(case.run(model), expected, 0.0)
    assert graphs.statistics().fallbacks[reason] == 1


def fail_at(case, method, call, error):
    """Capture with a fault, then without; returns how many calls there were before."""
    model = case.new()
    expected = case.run(model)
    with case.graphs(model, FaultyExecutor(method, call, error)) as graphs:
        before = state_of(model)
        assert graphs.capture() is False
        assert_left_as_it_was(case, model, graphs, before, expected, reason_of(error))
        graphs.executor = ReferenceExecutor()
        assert graphs.capture() and graphs.failure is None
        assert_close(case.run(model), expected)
        assert graphs.statistics().replays > 0


@every_case
@pytest.mark.parametrize("method", METHODS)
def test_an_error_in_any_call_of_the_executor_leaves_the_module_eager(name, method, warnings):
    case = CASES[name]
    total = calls_of(case).get(method, 0)
    assert total or name != "encoder"
    warnings()
    for call in sorted({0, total - 1} & set(range(total))):
        fail_at(case, method, call, Strange("made to fail"))
        (said,) = warnings()
        assert "made to fail" in said


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_any_type_leaves_the_module_eager(error):
    fail_at(CASES["parts of a decoder"], "record_forward", 0, error)


# Pieces of planning and capturing outside the executor, by what is put on graphs.
VISION = {
    RecordedKernels: ("choose_attention",),
    EncoderPlan: ("named",),
    GraphManager: ("record",),
    VisionWorkload: ("_piece", "_check_tensor_ranks", "captured"),
    Region: ("capture",),
}
PACKED = {PackPlan: ("kind", "buckets"), PackedWorkload: ("_digest", "_program", "captured"), Parts: ("install",)}
PLACES = [
    pytest.param(name, owner, method, id=f"{name}: {owner.__name__}.{method}")
    for name, places in {"encoder": VISION, "parts of a decoder": PACKED}.items()
    for owner, methods in places.items()
    for method in methods
]


def breaking(owner, method, error):
    """Return a method that fails after it did its work."""
    original = getattr(owner, method)

    def broken(self, *args, **kwargs):
        original(self, *args, **kwargs)
        raise error

    return broken


@pytest.mark.parametrize(("name", "owner", "method"), PLACES)
def test_an_error_anywhere_in_planning_leaves_the_module_eager(name, owner, method, warnings, monkeypatch):
    case, error = CASES[name], KeyError("made to fail")
    model = case.new()
    expected = case.run(model)
    with case.graphs(model, ReferenceExecutor()) as graphs:
        before = state_of(model)
        warnings()
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, breaking(owner, method, error))
            assert graphs.capture() is False
        (said,) = warnings()
        assert "KeyError" in said
        assert_left_as_it_was(case, model, graphs, before, expected)


@every_case
def test_strict_raises_one_type_for_every_error(name):
    case, error = CASES[name], Strange("made to fail")
    model = case.new()
    with case.graphs(model, FaultyExecutor("new_memory", 0, error), strict=True) as graphs:
        before = state_of(model)
        with pytest.raises(CaptureError, match="made to fail") as raised:
            graphs.capture()
        assert raised.value.__cause__ is error and state_of(model) == before and not graphs.captured


@pytest.mark.parametrize(
    "name, method, error",
    [
        ("encoder", "record_forward", SystemExit(3)),
        ("parts of a decoder", "record_forward", KeyboardInterrupt()),
        ("encoder", "new_memory", KeyboardInterrupt()),
    ],
)
def test_an_interrupt_passes_through_and_leaves_the_module_as_it_was(name, method, error):
    case = CASES[name]
    model = case.new()
    expected = case.run(model)
    with case.graphs(model, FaultyExecutor(method, calls_of(case)[method] - 1, error)) as graphs:
        before = state_of(model)
        with pytest.raises(type(error)) as raised:
            graphs.capture()
        assert raised.value is error and graphs.failure is None and not graphs.captured
        assert state_of(model) == before
        assert_close(case.run(model), expected, 0.0)


def test_what_somebody_else_puts_under_and_over_a_graphed_layer_stays():
    model = packs.new_model()
    layer, expected = model.decoder.layers[1], run_decoder(model)
    other = model.decoder.layers[0]
    other._forward_mlp = before = partial(other._forward_mlp)
    with packs.graphs_on(model, packs.pack(packs.WARMUP), cuda_graph_modules=["mlp"]):
        graphed = layer._forward_mlp
        layer._forward_mlp = mine = lambda *args, **kwargs: graphed(*args, **kwargs)
    assert layer._forward_mlp is mine and other._forward_mlp is before
    assert_close(run_decoder(model), expected, 0.0)


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_another_allocator_is_refused_before_anything_is_recorded(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    executor = CudaGraphExecutor.__new__(CudaGraphExecutor)  # its constructor needs a GPU
    with pytest.raises(CaptureError, match=f"{backend}.*PYTORCH_CUDA_ALLOC_CONF"):
        executor.new_memory()
