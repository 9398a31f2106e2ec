"""A loop that calls megatron-core's schedule itself: graphs after warm-up, log-probability passes, several models."""

import copy
import gc
import pickle
import statistics
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.bridge.peft.lora import LoRA
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from torch import nn

import bridge_cg_plugin
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.executor import ReferenceExecutor
from bridge_cg_plugin.options import OptionError, vision_options
from bridge_cg_plugin.upstream.encoders import direct_attention
from bridge_cg_plugin.upstream.hooks import emptied_cache, vision_helper
from bridge_cg_plugin.upstream.hooks.any_loop import HELD, LOOPS, _with_graphs
from bridge_cg_plugin.upstream.hooks.graph_helper import active_graphs
from bridge_cg_plugin.upstream.hooks.loop_driver import WARMUP_CALLS
from bridge_cg_plugin.upstream.hooks.vision_helper import VisionTECudaGraphHelper
from tests.leaving import LeavingExecutor
from tests.unit.towers import assert_close, draw, loss_of, new_tower

SIZES = ([[1, 4, 6]], [[1, 8, 8], [1, 4, 4]], [[2, 4, 4]])
ZEROS = torch.zeros
FIELDS = {
    "vision_cuda_graph_impl": "transformer_engine",
    "vision_cuda_graph_buckets": [32, 64, 128],
    "vision_cuda_graph_strict": True,
    "vision_cuda_graph_tuning": {"exact_below": 0},
    "cuda_graph_warmup_steps": 1,
}


class Policy(nn.Module):
    """A vision-language model as far as its encoder."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, seed=0, **fields):
        super().__init__()
        self.vision_model = new_tower(seed)
        self.config = copy.copy(self.vision_model.config)
        vars(self.config).update({**FIELDS, **fields}, timers=None, calculate_per_token_loss=False)

    def set_input_tensor(self, tensor): ...

    def forward(self, rows, seed):
        hidden, deepstack = self.vision_model(*draw(rows, seed))
        return loss_of([hidden, *deepstack])


def on_cpu(*args, device=None, **kwargs):
    return ZEROS(*args, **kwargs)


def call(model, microbatches, forward_only=False, seed=0):
    """Run one schedule call as a loop does; returns the losses and, after training, the gradients."""
    data = iter([(SIZES[i % len(SIZES)], seed + i) for i in range(microbatches)])

    def step(iterator, chunk):
        loss = chunk(*next(iterator))
        return loss, lambda output: (output, {"loss": output.detach().clone()})

    model.zero_grad(set_to_none=True)
    with mock.patch.object(torch, "zeros", on_cpu):
        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=data,
            model=[model],
            num_microbatches=microbatches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [each["loss"] for each in found], gradients


@pytest.fixture(autouse=True)
def loop(active, monkeypatch):
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(**dict.fromkeys(("tp", "cp", "pp", "embd", "pos_embd", "dp_cp"), alone))
    if hasattr(schedules, "_build_default_pg_collection"):
        monkeypatch.setattr(schedules, "_build_default_pg_collection", lambda: groups)
    monkeypatch.setattr(schedules.parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)
    LOOPS.forget()
    yield
    bridge_cg_plugin.deactivate()
    bridge_cg_plugin.activate()


def assert_equal(actual, expected):
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


def test_a_loop_of_its_own_trains_on_graphs_after_warm_up():
    eager, model = Policy(vision_cuda_graph_impl="none"), Policy()
    for index, microbatches in enumerate((2, 3, 1, 4, 3, 3)):
        assert_equal(call(model, microbatches, seed=index), call(eager, microbatches, seed=index))
    (graphs,) = active_graphs()
    found = graphs.statistics()
    assert found.warmup_microbatches == 2 and found.replays >= 10
    assert set(found.fallbacks) <= {"not_captured_yet"} and found.fallbacks.total() <= 4


def test_passes_without_a_backward_get_graphs_without_one():
    reference = Policy().eval()
    with torch.no_grad():
        for seed in range(4):
            actual = call(reference, 3, forward_only=True, seed=seed)
            with active_graphs()[0].paused():
                assert_equal(actual, call(reference, 3, forward_only=True, seed=seed))
    (graphs,) = active_graphs()
    (region,) = graphs._regions
    assert {mode.gradients for _, _, mode in region.sources.current.recordings} == {False}
    assert sum(counts.evaluations for counts in graphs.statistics().buckets.values()) >= 6


def test_policy_and_reference_in_one_process_have_graphs_of_their_own():
    policy, reference = Policy(0), Policy(1).eval()
    for seed in range(4):
        with torch.no_grad():
            call(reference, 2, forward_only=True, seed=seed)
        call(policy, 2, seed=seed)
    assert {id(graphs.model) for graphs in active_graphs()} == {id(policy.vision_model), id(reference.vision_model)}
    assert all(graphs.statistics().replays > 0 for graphs in active_graphs())


def log_probabilities(model, seed):
    """Return those of a pass as RL loops make it, stood in for by losses, on graphs and eager."""
    with torch.no_grad():
        found = call(model, 2, forward_only=True, seed=seed)[0]
        (graphs,) = active_graphs()
        with graphs.paused():
            return found, call(model, 2, forward_only=True, seed=seed)[0]


def test_the_policy_with_its_adapters_off_is_a_reference():
    model = Policy()
    lora = LoRA(target_modules=["linear_qkv", "linear_proj"], dim=4, alpha=8)
    model.vision_model = lora(model.vision_model, training=True)
    for name, parameter in model.named_parameters():
        if "adapter" in name:
            nn.init.normal_(parameter, std=0.2)
    for seed in range(4):
        model.eval()
        on, eager_on = log_probabilities(model, 7)
        with lora.disable_adapter(model.vision_model):
            off, eager_off = log_probabilities(model, 7)
        assert_close(on, eager_on)
        assert_close(off, eager_off)
        assert abs(on[0] - off[0]) > 1e-3
        model.train()
        call(model, 2, seed=seed)
    (graphs,) = active_graphs()
    assert len(graphs._regions[0].sources._all) == 2
    assert graphs.statistics().fallbacks["model_changed"] <= 2


def test_weights_that_leave_between_calls_and_return_elsewhere_are_recaptured():
    eager, model = Policy(vision_cuda_graph_impl="none"), Policy()
    for seed in range(5):
        assert_equal(call(model, 2, seed=seed), call(eager, 2, seed=seed))
        gone = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        for old in gone:
            old.fill_(torch.nan)  # somebody else's now
        with torch.no_grad():
            for one in (model, eager):
                for parameter in one.parameters():
                    parameter.mul_(0.9)  # the optimizer's step
    (graphs,) = active_graphs()
    assert graphs.statistics().replays >= 6
    assert set(graphs.statistics().fallbacks) <= {"not_captured_yet"}


def test_warm_up_is_what_the_config_says_or_a_few_calls():
    model = Policy()
    del vars(model.config)["cuda_graph_warmup_steps"]
    type(model.config).cuda_graph_warmup_steps = WARMUP_CALLS
    for calls in range(WARMUP_CALLS + 1):
        assert not any(graphs.captured for graphs in active_graphs())
        call(model, 1, seed=calls)
    assert active_graphs()[0].captured


def test_a_model_that_asks_for_nothing_is_left_alone():
    call(Policy(vision_cuda_graph_impl="none"), 2)
    call(Policy(vision_cuda_graph_impl=None), 2)
    assert not active_graphs()


def test_a_model_that_bridges_loop_trains_is_left_to_it():
    model = Policy()
    call(model, 1)
    assert active_graphs()
    LOOPS.leave_to_bridge([model])
    call(model, 1)
    assert not active_graphs()


def forward_only_modes(graphs):
    return {(bucket.tokens, mode.gradients) for _, bucket, mode in graphs._regions[0].sources.current.recordings}


def test_an_evaluation_in_bridges_loop_gets_its_buckets_between_its_iterations():
    """One bucket before each iteration, no backward for sizes that training never has."""
    auto = {"vision_cuda_graph_buckets": "auto", "vision_cuda_graph_tuning": {"exact_below": 0, "cost_fallback": False}}
    model, eager = Policy(**auto), Policy(vision_cuda_graph_impl="none").eval()
    LOOPS.leave_to_bridge([model])
    helper = VisionTECudaGraphHelper(model, model.vision_model.config, options=vision_options(model.config))
    call(model, 1)
    helper.create_cudagraphs()
    with helper.graphs.step():
        call(model, 1)
    trained = forward_only_modes(helper.graphs)
    model.eval()
    with torch.no_grad():
        for seed in range(4):
            assert_equal(call(model, 2, True, seed), call(eager, 2, True, seed))
    assert helper.graphs.step_number == 1
    found = helper.graphs.statistics()
    assert found.fallbacks == {"not_captured_yet": 1}
    assert sum(counts.evaluations for counts in found.buckets.values()) == 7
    model.train()
    for seed in range(2):
        with helper.graphs.step():
            call(model, 1, seed=seed)
    assert {(tokens, True) for tokens, gradients in forward_only_modes(helper.graphs) if gradients} == trained
    helper.delete_cuda_graphs()


def test_options_that_cannot_work_are_refused_before_the_first_pass():
    model = Policy(recompute_granularity="full")
    with pytest.raises(OptionError, match="recompute_granularity"):
        call(model, 1)


def plain_states(monkeypatch):
    """Let this process have random states that no graph can use; returns how often they were forked, as a list."""
    forks = []
    tracker = SimpleNamespace(fork=lambda name="": forks.append(name) or nullcontext())
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(tensor_parallel.random, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(tensor_parallel.random, "get_all_rng_states", lambda: {"model-parallel-rng": torch.zeros(3)})
    return forks


def test_random_states_that_graphs_cannot_use_do_not_matter_where_nothing_is_drawn(monkeypatch):
    forks = plain_states(monkeypatch)
    model = Policy(use_te_rng_tracker=False)
    model.vision_model.config.sequence_parallel = True  # layers below a fork
    for seed in range(3):
        call(model, 3, seed=seed)
    (graphs,) = active_graphs()
    replays = graphs.statistics().replays
    assert replays > 0 and len(forks) == 9 - replays


def test_dropout_that_draws_from_them_is_refused_with_what_to_do(monkeypatch):
    plain_states(monkeypatch)
    model = Policy()
    model.vision_model.config.attention_dropout = 0.1
    call(model, 1)
    with pytest.raises(CaptureError, match="attention_dropout draws.*te_rng_tracker"):
        call(model, 1)


@pytest.mark.parametrize(("variable", "backend"), [("0", "transformer_engine"), ("1", "cudnn"), (None, "cudnn")])
def test_recordings_attend_as_the_loop_chose(monkeypatch, variable, backend):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(direct_attention, "kernels_available", lambda: True)
    monkeypatch.setattr("bridge_cg_plugin.vision.kernels.cudnn_graphs.unavailable", lambda: None)
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    model = Policy()
    call(model, 1)
    if variable is not None:
        monkeypatch.setenv("NVTE_FUSED_ATTN", variable)  # as attention_backend is written when a model is built
    call(model, 1)
    assert active_graphs()[0].captured
    assert active_graphs()[0].workload.attention == backend


def test_reports_are_printed_at_exit(capsys):
    model = Policy()
    for seed in range(3):
        call(model, 2, seed=seed)
    LOOPS.report()
    assert "vision CUDA graphs" in capsys.readouterr().out


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
        assert held.driver is not None and copied.driver is None
        setattr(model, HELD, copied)
        assert LOOPS._known(model) is None


def test_deactivated_nothing_is_captured():
    bridge_cg_plugin.deactivate()
    model = Policy()
    for seed in range(3):
        call(model, 1, seed=seed)
    assert not active_graphs()
    bridge_cg_plugin.activate()


def plain(**fields):
    """Return a model whose config knows nothing of the plugin."""
    model = Policy()
    for name in (*FIELDS, "vision_cuda_graph_modules"):
        vars(model.config).pop(name, None)
    vars(model.config).update(cuda_graph_warmup_steps=1, **fields)
    return model


def test_enable_puts_a_model_on_graphs():
    model = plain()
    call(model, 1)
    assert not active_graphs()
    bridge_cg_plugin.enable([model], "vision_cuda_graph_impl=transformer_engine", {"vision_cuda_graph_strict": True})
    for seed in range(3):
        call(model, 2, seed=seed)
    assert active_graphs()[0].captured and active_graphs()[0].workload.strict


def test_enable_says_how_many_calls_run_eager():
    model = plain()
    bridge_cg_plugin.enable(model, "vision_cuda_graph_impl=transformer_engine cuda_graph_warmup_steps=2")
    for seed in range(2):
        call(model, 1, seed=seed)
        assert not active_graphs()[0].captured
    call(model, 1)
    assert active_graphs()[0].captured


def test_the_environment_says_it_for_every_model(monkeypatch):
    monkeypatch.setenv("BRIDGE_CG_OPTIONS", "vision_cuda_graph_impl=transformer_engine vision_cuda_graph_buckets=32,64")
    policy, reference = plain(), plain()
    for model in (policy, reference):
        call(model, 1)
    assert [graphs.workload.options.buckets for graphs in active_graphs()] == [(32, 64)] * 2


def test_a_misspelt_option_of_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("BRIDGE_CG_OPTIONS", "vision_cuda_graph_imp=transformer_engine")
    with pytest.raises(OptionError, match="vision_cuda_graph_imp") as refused:
        call(plain(), 1)
    assert "BRIDGE_CG_OPTIONS" in "".join(refused.value.__notes__)


class Other(Policy):
    """A model whose encoder is of another kind."""

    def __init__(self):
        super().__init__()
        self.vision_model = nn.Linear(2, 2)

    def forward(self, rows, seed):
        return self.vision_model(torch.ones(1, 2)).sum()


@pytest.mark.parametrize("options", ["", " cuda_graph_max_packed_seqs=4 cuda_graph_impl=transformer_engine"])
def test_a_model_without_what_graphs_know_runs_eager_and_says_so_once(monkeypatch, caplog, options):
    monkeypatch.setenv("BRIDGE_CG_OPTIONS", "vision_cuda_graph_impl=transformer_engine" + options)
    model = Other()
    for seed in range(3):
        losses, _ = call(model, 1, seed=seed)
        assert losses[0].isfinite()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "Other has no vision encoder" in said and ("and no decoder" in said) == bool(options)
    assert not active_graphs()


@pytest.mark.parametrize("impl", ["full_iteration", "transformer_engine"])
def test_enable_refuses_graphs_that_bridges_loop_alone_drives(impl):
    model = plain()
    with pytest.raises(OptionError, match="in a loop other than Bridge's"):
        bridge_cg_plugin.enable(model, f"vision_cuda_graph_impl=transformer_engine cuda_graph_impl={impl}")
    bridge_cg_plugin.enable(model, "cuda_graph_impl=transformer_engine cuda_graph_max_packed_seqs=4")


def test_enable_wants_a_model_with_a_config():
    with pytest.raises(OptionError, match="config"):
        bridge_cg_plugin.enable(nn.Linear(2, 2), "vision_cuda_graph_impl=transformer_engine")


def median_us(function, arguments, calls=5000):
    """Return the median time of a call in microseconds."""
    took = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        function(**arguments)
        took.append(time.perf_counter_ns() - began)
    return statistics.median(took) / 1e3


def test_a_schedule_call_without_graphs_costs_under_ten_microseconds_more():
    wrapper = nn.Module()
    wrapper.module = nn.Module()
    wrapper.module.module = Policy(vision_cuda_graph_impl="none")  # under DDP and Float16Module

    def stub(*, model, num_microbatches, forward_only=False):
        return model

    wrapped = _with_graphs("schedule_alone", stub)
    arguments = {"model": [wrapper], "num_microbatches": 2}
    assert wrapped(**arguments) == [wrapper] and not active_graphs()
    assert median_us(wrapped, arguments) - median_us(stub, arguments) < 10  # 5 on an idle machine


@pytest.fixture
def asked_for(monkeypatch):
    monkeypatch.setenv("BRIDGE_CG_RELEASE_MEMORY", "1")


@pytest.fixture
def leaving(monkeypatch, asked_for):
    """Give models executors whose memory leaves; returns these, and for which memory may."""
    made = []

    def executor(*args, releasable=False, **kwargs):
        made.append(LeavingExecutor() if releasable else ReferenceExecutor())
        return made[-1]

    monkeypatch.setattr(vision_helper, "default_executor", executor)
    return made


def leave_the_device(model):
    """Free parameters as loops do before they generate; returns what puts them back elsewhere."""
    before = [(parameter, parameter.data.clone()) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.data.untyped_storage().resize_(0)

    def back():
        for parameter, kept in before:
            parameter.data = kept

    return back


@pytest.fixture
def parameters_count_as_on_the_device(monkeypatch):
    monkeypatch.setattr(emptied_cache, "is_on_device", lambda parameter: True)


@pytest.mark.parametrize("calls", [0, 3], ids=["before capture", "on graphs"])
def test_a_reference_pass_before_any_weight_is_loaded_is_an_error_and_later_ones_are_right(calls):
    eager, reference = Policy(vision_cuda_graph_impl="none").eval(), Policy().eval()
    with torch.no_grad():
        for seed in range(calls):
            call(reference, 2, forward_only=True, seed=seed)
        back = leave_the_device(reference.vision_model)
        with pytest.raises(RuntimeError):
            call(reference, 2, forward_only=True)
        back()
        for seed in range(4):
            actual = call(reference, 2, forward_only=True, seed=seed)
            assert_equal(actual, call(eager, 2, forward_only=True, seed=seed))
    assert active_graphs()[0].statistics().replays >= 4


def test_graphs_leave_with_their_model_and_return_with_the_next_call(leaving, parameters_count_as_on_the_device):
    eager, model, other = Policy(vision_cuda_graph_impl="none"), Policy(), Policy(1)
    for _ in range(3):
        call(model, 2)
        call(other, 2)
    torch.cuda.empty_cache()
    policy, reference = leaving
    assert not policy.away and not reference.away
    for seed in range(3):
        back = leave_the_device(model.vision_model)
        torch.cuda.empty_cache()
        assert policy.away and not reference.away
        torch.cuda.empty_cache()
        back()
        assert_equal(call(model, 2, seed=seed), call(eager, 2, seed=seed))
        assert policy.returned == policy.left == seed + 1
    assert not active_graphs()[0].statistics().fallbacks["memory_released"]


def test_memory_of_every_model_leaves_when_the_loop_says_so(leaving):
    eager, models = Policy(vision_cuda_graph_impl="none"), [Policy(), Policy()]
    assert bridge_cg_plugin.release_memory() == 0
    for model in models:
        for _ in range(3):
            call(model, 2)
    assert bridge_cg_plugin.release_memory() == 200
    assert_equal(call(models[0], 2, seed=5), call(eager, 2, seed=5))
    assert [executor.away for executor in leaving] == [False, True]


def test_a_model_that_leaves_inside_a_call_keeps_its_graphs_there(leaving, parameters_count_as_on_the_device):
    model = Policy()
    for _ in range(3):
        call(model, 2)
    (driver,) = LOOPS._drivers
    with driver.step():
        back = leave_the_device(model.vision_model)
        torch.cuda.empty_cache()
        back()
    assert not leaving[0].left


def test_memory_of_graphs_stays_unless_the_environment_says_that_it_may_leave(leaving, monkeypatch):
    monkeypatch.delenv("BRIDGE_CG_RELEASE_MEMORY")
    before, model = torch.cuda.empty_cache, Policy()
    for _ in range(3):
        call(model, 2)
    assert torch.cuda.empty_cache is before and bridge_cg_plugin.release_memory() == 0
    assert isinstance(leaving[0], ReferenceExecutor)


def test_another_value_of_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("BRIDGE_CG_RELEASE_MEMORY", "yes")
    with pytest.raises(OptionError, match="BRIDGE_CG_RELEASE_MEMORY=.*0 or 1"):
        call(Policy(), 1)


def test_the_function_that_empties_the_cache_is_put_back(asked_for):
    before = torch.cuda.empty_cache
    call(Policy(), 1)
    assert torch.cuda.empty_cache is not before
    bridge_cg_plugin.deactivate()
    assert torch.cuda.empty_cache is before
    torch.cuda.empty_cache()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_model_has_left_once_all_of_it_has(left, parameters_count_as_on_the_device):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer in model[:left]:
        layer.weight.data.untyped_storage().resize_(0)
    assert emptied_cache.has_left(model) == (left == 2)
    assert not emptied_cache.has_left(nn.Identity())
