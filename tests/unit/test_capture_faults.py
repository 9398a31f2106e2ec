"""Errors of any type, anywhere in a capture: the module goes on eager, as it was, with one warning."""

import logging
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError, Refused, Retry, reason_of, release_frames
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.manager import GraphManager
from bridge_cg_plugin.graphs.parts import Parts
from bridge_cg_plugin.graphs.recordings.chain import Chain
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphExecutor, ReferenceExecutor
from bridge_cg_plugin.graphs.region import Region
from bridge_cg_plugin.language.packed.workload import PackedWorkload
from bridge_cg_plugin.options import OFFLOAD_MODULES
from bridge_cg_plugin.vision.encoder import RecordedKernels
from bridge_cg_plugin.vision.workload import VisionWorkload

from . import packs
from .mixes import MIXED
from .packed_parts import on_parts
from .towers import assert_close, graphs_on, new_tower, results

LEAST_BYTES = 1024


class Strange(Exception):
    """Of a kind that nobody knows."""


KINDS = (CaptureError, partial(Refused, Fallback.MODEL_CHANGED), torch.OutOfMemoryError, KeyError, StopIteration)
ERRORS = [kind("made to fail") for kind in (*KINDS, Strange)]


@contextmanager
def faults(owner, method, call, error):
    """Raise an error behind the n-th call of a method, from 0, and all later ones; yields a list of the calls."""
    original, calls = getattr(owner, method), []

    def broken(self, *args, **kwargs):
        calls.append(method)
        made = original(self, *args, **kwargs)
        if error is not None and len(calls) > call:
            raise error
        return made

    with mock.patch.object(owner, method, broken):
        yield calls


def tower_graphs(model, strict=False):
    options = {"buckets": (64, 128), "streams": 2, "offload": ("attention", "mlp")}
    return graphs_on(model, capture=False, executor=ReferenceExecutor(), strict=strict, **options)


def decoder_graphs(model, strict=False):
    options = {"offload": OFFLOAD_MODULES, "buckets": [288], "slots": 2, "strict": strict}
    return on_parts(model, capture=False, executor=ReferenceExecutor(), **options)


def run_tower(model):
    outputs, gradients = results(model, MIXED)
    return [*outputs, *gradients]


def run_decoder(model):
    losses, gradients = packs.losses_and_gradients(model, packs.pack((120, 150)))
    return [losses, *gradients]


# How a graphed module is made, put on graphs that are not captured yet, and run.
CASES = {
    "encoder": SimpleNamespace(new=partial(new_tower, layers=2), graphs=tower_graphs, run=run_tower),
    "parts of a decoder": SimpleNamespace(new=packs.new_model, graphs=decoder_graphs, run=run_decoder),
}


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
def calls_of(name, owner, method):
    """Return how often a capture without a fault calls a method."""
    case = CASES[name]
    with case.graphs(case.new()) as graphs, faults(owner, method, 0, None) as calls:
        assert graphs.capture()
        return len(calls)


def assert_left_as_it_was(case, model, graphs, before, expected, reason):
    """The failed capture is reported, the model is as before and computes what it did."""
    assert not graphs.captured and "made to fail" in graphs.failure and graphs.statistics().pinned_bytes == 0
    assert state_of(model) == before
    assert_close(case.run(model), expected, 0.0)
    assert graphs.statistics().fallbacks[reason] == 1


def fail_at(case, owner, method, call, error):
    """Capture with a fault, then without."""
    model = case.new()
    expected = case.run(model)
    with case.graphs(model) as graphs:
        before = state_of(model)
        with faults(owner, method, call, error):
            assert graphs.capture() is False
        assert_left_as_it_was(case, model, graphs, before, expected, reason_of(error))
        assert graphs.capture() and graphs.failure is None
        assert_close(case.run(model), expected)
        assert graphs.statistics().replays > 0


# Pieces of planning and capturing, by what is put on graphs.
EXECUTOR = ("new_memory", "warm_up", "observe", "record_forward")
VISION = {
    ReferenceExecutor: (*EXECUTOR, "side_stream"),
    RecordedKernels: ("choose_attention",),
    GraphManager: ("record",),
    VisionWorkload: ("_named", "_piece", "_check_tensor_ranks", "captured"),
    Region: ("prepare",),
    Chain: ("capture",),
}
PACKED = {
    ReferenceExecutor: EXECUTOR,
    PackedWorkload: ("layout", "_planned", "_digest", "_program", "captured"),
    Parts: ("install",),
}
PLACES = [
    pytest.param(name, owner, method, id=f"{name}: {owner.__name__}.{method}")
    for name, places in {"encoder": VISION, "parts of a decoder": PACKED}.items()
    for owner, methods in places.items()
    for method in methods
]


@pytest.mark.parametrize(("name", "owner", "method"), PLACES)
def test_an_error_anywhere_in_a_capture_leaves_the_module_eager(name, owner, method, warnings):
    total = calls_of(name, owner, method)
    assert total
    warnings()
    for call in {0, total - 1}:
        fail_at(CASES[name], owner, method, call, Strange("made to fail"))
        (said,) = warnings()
        assert "Strange" in said and "made to fail" in said


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_any_type_leaves_the_module_eager(error):
    fail_at(CASES["parts of a decoder"], ReferenceExecutor, "record_forward", 0, error)


@pytest.mark.parametrize("name", CASES)
def test_strict_raises_one_type_for_every_error(name):
    case, error = CASES[name], Strange("made to fail")
    model = case.new()
    with case.graphs(model, strict=True) as graphs, faults(ReferenceExecutor, "new_memory", 0, error):
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
    last = calls_of(name, ReferenceExecutor, method) - 1
    with case.graphs(model) as graphs:
        before = state_of(model)
        with faults(ReferenceExecutor, method, last, error), pytest.raises(type(error)) as raised:
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


def test_a_recording_that_failed_is_asked_for_again_less_and_less_often():
    retry, tries = Retry(2), 0
    for _ in range(100):
        retry.turn()
        if retry.due:
            tries += 1
            retry.failed(Fallback.CAPTURE_FAILED)
            retry.failed(Fallback.MODEL_CHANGED)  # the same failure, seen by another part
            assert not retry.due and retry.reason is Fallback.CAPTURE_FAILED
    assert tries == 6


def raised(error):
    """Return an error whose frame holds a list, and that list."""
    held = [object()]
    try:
        raise error
    except type(error) as caught:
        return caught, held


def held_by(error):
    return error.__traceback__.tb_frame.f_locals.get("held")


def test_errors_that_are_each_others_cause_are_released_once():
    (first, _), (second, _) = raised(ValueError()), raised(KeyError())
    first.__cause__, second.__cause__ = second, first
    assert held_by(first) and held_by(second)
    release_frames(first)
    assert held_by(first) is held_by(second) is None
