"""A loop that calls megatron-core's schedule itself: graphs after warm-up, log-probability passes, several models."""

import copy
import gc
import pickle
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.recordings import streams as side_stream
from bridge_cg_plugin.upstream.hooks import any_loop
from bridge_cg_plugin.upstream.hooks.any_loop import HELD, LOOPS, WARMUP_CALLS, _with_graphs
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from tests.python_calls import python_calls
from tests.unit.towers import new_tower

from .loops import Policy, assert_equal, call, gathers, on_cpu

pytestmark = pytest.mark.usefixtures("loop")


def test_a_loop_of_its_own_trains_on_graphs_after_warm_up():
    eager, model = Policy(vision_cuda_graph_impl="none"), Policy()
    for index, microbatches in enumerate((2, 3, 1, 4, 3, 3)):
        assert_equal(call(model, microbatches, seed=index), call(eager, microbatches, seed=index))
    (graphs,) = active_graphs()
    found = graphs.statistics()
    assert found.warmup_microbatches == 2 and found.replays >= 10
    assert set(found.fallbacks) <= {"not_captured_yet"} and found.fallbacks.total() <= 4


def test_a_reference_that_was_built_in_inference_mode_is_on_graphs():
    eager, modes = Policy(vision_cuda_graph_impl="none").eval(), (torch.no_grad, torch.inference_mode)
    with torch.inference_mode():
        reference = Policy().eval()
    for seed, mode in enumerate(modes * 2):
        with mode():
            actual = call(reference, 2, forward_only=True, seed=seed)
            assert_equal(actual, call(eager, 2, forward_only=True, seed=seed))
    (graphs,) = active_graphs()
    (region,) = graphs._regions
    assert {mode.gradients for _, _, mode in region.sources.current.recordings} == {False}
    assert sum(counts.evaluations for counts in graphs.statistics().buckets.values()) == 6


def test_a_compiled_model_gets_graphs_inside_its_calls(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    eager, model = Policy(vision_cuda_graph_impl="none").eval(), Policy().eval()
    traced = []
    model.forward = torch.compile(model.forward, backend=lambda graph, _: traced.append(graph) or graph.forward)
    with torch.no_grad():
        for seed in range(3):
            actual = call(model, 2, forward_only=True, seed=seed)
            assert_equal(actual, call(eager, 2, forward_only=True, seed=seed))
    assert active_graphs()[0].statistics().replays == 4 and traced


def passing(layer, act):
    """Let a layer's forward do something besides, until it is removed."""
    forward, acts = layer.forward, [act]

    def acting(*args, **kwargs):
        made = forward(*args, **kwargs)
        for act in acts:
            act(made)
        return made

    layer.forward = acting
    return SimpleNamespace(remove=acts.clear)


PASSING = {
    "forward_hooks": lambda layer: layer.register_forward_hook(lambda *_: None),
    "draws_on_host": lambda layer: passing(layer, lambda made: random.random()),
    "leaves_tensors": lambda layer: passing(layer, lambda made: setattr(layer, "kept", made)),
}


@pytest.mark.parametrize(("reason", "begin"), PASSING.items(), ids=PASSING)
def test_graphs_come_without_what_was_there_when_they_were_to_be_captured(reason, begin):
    eager, model = Policy(vision_cuda_graph_impl="none"), Policy(vision_cuda_graph_strict=False)
    begun = begin(model.vision_model.decoder.layers[0])
    for seed in range(8):
        if seed == 3:
            (graphs,) = active_graphs()
            assert graphs.statistics().fallbacks == {reason: 4} and not graphs.statistics().replays
            begun.remove()
        assert_equal(call(model, 2, seed=seed), call(eager, 2, seed=seed))
    assert graphs.statistics().replays >= 4 and set(graphs.statistics().fallbacks) == {reason}


def test_an_encoder_in_the_place_of_another_gets_graphs_of_its_own():
    model, eager = Policy(), Policy(vision_cuda_graph_impl="none")
    for each in (model, eager):
        call(each, 2)
        call(each, 2)
        each.vision_model = new_tower(7)
    for seed in range(4):
        assert_equal(call(model, 2, seed=seed), call(eager, 2, seed=seed))
    (graphs,) = active_graphs()
    assert graphs.model is model.vision_model and graphs.statistics().replays == 6


def test_models_of_two_threads_are_recorded_one_after_the_other(monkeypatch):
    monkeypatch.setattr(torch, "zeros", on_cpu)
    monkeypatch.setattr("tests.seams.loops.mock.patch.object", lambda *replaced: nullcontext())  # not for two threads
    pairs = [(Policy(seed), Policy(seed, vision_cuda_graph_impl="none")) for seed in range(2)]
    together = threading.Barrier(2)

    def train(model, eager):
        together.wait()
        for seed in range(5):
            assert_equal(call(model, 3, seed=seed), call(eager, 3, seed=seed))

    with ThreadPoolExecutor(2) as threads:
        for training in [threads.submit(train, *pair) for pair in pairs]:
            training.result()
    assert all(graphs.statistics().replays == 12 for graphs in active_graphs())
    assert side_stream.current_side_stream() is None


def test_warm_up_is_what_the_config_says_or_a_few_calls():
    model = Policy()
    del vars(model.config)["cuda_graph_warmup_steps"]
    type(model.config).cuda_graph_warmup_steps = WARMUP_CALLS
    for calls in range(WARMUP_CALLS + 1):
        assert not any(graphs.captured for graphs in active_graphs())
        call(model, 1, seed=calls)
    assert active_graphs()[0].captured


def test_a_model_that_bridges_loop_trains_is_left_to_it_but_an_evaluation_may_capture(monkeypatch):
    asked, model = [], Policy()
    call(model, 1)
    assert active_graphs()
    LOOPS.bridges_driver([model], None)
    call(model, 1)
    assert not active_graphs()
    monkeypatch.setattr(any_loop, "active_graphs", lambda: [SimpleNamespace(before_evaluation=lambda: asked.append(1))])
    call(model, 1)
    assert not asked
    with torch.no_grad():
        call(model.eval(), 1, forward_only=True)
    assert asked == [1]


def test_a_model_that_is_dropped_is_freed_and_reported(capsys):
    model = Policy()
    model.vision_model.config.no_sync_func = (
        model.eval
    )  # as DDP's methods are in a config, from where a driver finds it
    for seed in range(3):
        call(model, 2, seed=seed)
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None
    LOOPS.report()
    assert capsys.readouterr().out.count("eager fallbacks:") == 1
    assert not active_graphs()


def test_a_copy_of_a_model_has_no_driver():
    model = Policy()
    call(model, 1)
    held = getattr(model, HELD)
    for copied in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert held is not None and copied is None
        setattr(model, HELD, copied)
        assert LOOPS._known(model) is None


class Wrapper(nn.Module):
    """What loops put around a model, or take off it for some of their calls."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def set_input_tensor(self, tensor): ...

    def forward(self, *args):
        return self.module(*args)


class DataParallel(Wrapper):
    """Data parallelism with overlapped gathers, as far as the plugin looks at it: parameters arrive in a wait."""

    def __init__(self, model):
        super().__init__(model)
        self.arrives = False
        gathers(self, model, [self.wait])

    def wait(self, skip_next_bucket_dispatch=False):
        if self.arrives:
            with torch.no_grad():
                torch._foreach_mul_(list(self.module.parameters()), 1.5)
        self.arrives = False


def test_replays_wait_for_data_parallelism_that_comes_later():
    model, eager = Policy(), Policy(vision_cuda_graph_impl="none")
    for seed in range(3):
        assert_equal(call(model, 2, seed=seed), call(eager, 2, seed=seed))
    parallel, reference = DataParallel(model), DataParallel(eager)
    outer = Wrapper(parallel)
    for seed in range(3):
        parallel.arrives = reference.arrives = True
        reference.wait()  # as eager's hooks do
        assert_equal(call(outer, 2, seed=seed), call(reference, 2, seed=seed))
    call(model, 2)
    (graphs,) = active_graphs()
    assert (graphs.step_number, graphs.statistics().replays) == (4, 6)


def test_a_schedule_call_without_graphs_costs_five_microseconds_more():
    wrapper = nn.Module()
    wrapper.module = nn.Module()
    wrapper.module.module = Policy(vision_cuda_graph_impl="none")  # under DDP and Float16Module

    def stub(*, model, num_microbatches, forward_only=False):
        return model

    wrapped = _with_graphs(stub)
    arguments = {"model": [wrapper], "num_microbatches": 2}
    assert wrapped(**arguments) == [wrapper] and not active_graphs()
    assert python_calls(lambda: wrapped(**arguments)) <= 60  # 50 took 5 microseconds on an idle machine
