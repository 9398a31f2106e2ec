import copy
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from torch import nn

import bridge_cg_plugin
from bridge_cg_plugin.upstream.hooks import qwen3_vl, train_loop
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from bridge_cg_plugin.upstream.hooks.train_loop import DrivenBySteps
from bridge_cg_plugin.upstream.parallel.data_parallel import megatron_reduction
from bridge_cg_plugin.upstream.seams.registry.bridge import MODEL_OF_PROVIDER

from ..unit.towers import bridges_step, draw, new_helper, new_tower
from .loops import Policy, gathers

TRAIN = "megatron.bridge.training.train"


def make(name):
    return next(p.make for p in train_loop.PATCHES if p.name == name)


@pytest.fixture
def helper(active):
    model = new_tower()
    made = new_helper(model)
    made.create_cudagraphs()
    yield made
    if made.graphs is not None:
        made.graphs.detach()
        made.graphs = None


def test_the_loop_drives_the_plugins_helper(active):
    train = active[TRAIN]
    assert train.VisionTECudaGraphHelper is DrivenBySteps
    bridge_cg_plugin.deactivate()
    assert train.VisionTECudaGraphHelper.__module__.startswith("megatron.")


@pytest.mark.parametrize("skips", [False, True])
def test_a_run_whose_loop_skips_the_iteration_of_the_capture_is_captured(active, skips):
    """The loop captures before one iteration only, which `train.iterations_to_skip` may skip."""
    model, loops = Policy(cuda_graph_warmup_steps=2), DrivenBySteps()
    for number in range(4):
        if number == 2 and not skips:
            loops.create_cudagraphs()
        bridges_step([model], model.config, lambda: model([[1, 4, 4]], 0))
        (graphs,) = active_graphs()
        assert graphs.captured is (number >= 2)
    assert graphs.statistics().replays == 2


def a_step():
    bridges_step([Policy(vision_cuda_graph_impl="none")], SimpleNamespace(), lambda: None)


@pytest.mark.parametrize("then", [a_step, bridge_cg_plugin.deactivate], ids=["step", "deactivate"])
def test_an_encoder_is_off_the_graphs_of_a_run_that_ended_with_an_error(active, then):
    """The next one may have no graphs."""
    model = Policy()
    for work in (lambda: model([[1, 4, 4]], 0), lambda: 1 / 0):
        with suppress(ZeroDivisionError):
            bridges_step([model], model.config, work)
    assert active_graphs()[0].captured
    then()
    assert "forward" not in vars(model.vision_model) and not active_graphs()


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def log(self, values, step):
        self.scalars += [(tag, value, step) for tag, value in values.items()]


def state_at(step, tensorboard=None, wandb=None):
    return SimpleNamespace(
        train_state=SimpleNamespace(step=step),
        cfg=SimpleNamespace(logger=SimpleNamespace(log_interval=5), model=SimpleNamespace()),
        tensorboard_logger=tensorboard,
        wandb_logger=wandb,
    )


def test_metrics_reach_the_loggers_at_their_interval(helper):
    helper.graphs.model(*draw([[1, 4, 4]]))
    log = make("train_log")(lambda loss_dict, total, rate, global_state: "report")
    boards = Writer(), Writer()
    for step in (4, 5):
        assert log({}, None, None, state_at(step, *boards)) == "report"
    for board in boards:
        assert {s for _, _, s in board.scalars} == {5}
        assert ("vision_cuda_graph/replays", 1.0, 5) in board.scalars


def test_the_end_of_training_reports_and_frees(active, capsys):
    order, model = [], Policy()
    bridges_step([model], model.config, lambda: None)
    end = make("train_end")(lambda *args: order.append("forward" in vars(model.vision_model)))
    end("helper of the language model")
    assert order == [False]
    assert "eager fallbacks" in capsys.readouterr().out


def test_upstreams_own_padding_is_never_used(active):
    model = new_tower().train()
    model.config = copy.copy(model.config)  # the layers keep theirs
    model.config.cuda_graph_impl = "transformer_engine"
    asked = []
    model.merger.register_forward_pre_hook(lambda *_: asked.append(model._uses_vision_cuda_graph()))
    model(*draw([[1, 4, 4]]))
    assert asked == [False]
    bridge_cg_plugin.deactivate()
    model.config.max_vision_cuda_graph_seq_length = 16
    with pytest.raises(AttributeError, match="cu_seqlens_q"):  # upstream's own path drops the boundaries
        model(*draw([[1, 4, 4]]))


@pytest.mark.parametrize("align", [False, True])
def test_a_replay_waits_once_for_each_group_of_parameters(align):
    model, chunk, log = nn.Linear(4, 4), nn.Module(), []
    waits = [lambda name=name, **kwargs: log.append((name, *kwargs.values())) for name in ("first", "second")]
    gathers(chunk, model, waits, align)
    reduction = megatron_reduction([nn.Linear(2, 2), chunk], model)
    assert log == []
    reduction.gather()
    assert log == [("first", align), ("second", align)]
    assert megatron_reduction([nn.Linear(2, 2)], model) is None


@pytest.mark.parametrize(
    "overlap, last, waits", [(False, True, False), (False, False, False), (True, False, False), (True, True, True)]
)
def test_the_reduction_waits_for_the_last_microbatch(overlap, last, waits):
    model, chunk = nn.Linear(4, 4), nn.Module()
    gathers(chunk, model, [None])
    chunk.ddp_config.overlap_grad_reduce = overlap
    for group in chunk.param_to_bucket_group.values():
        group.is_last_microbatch = last
    assert megatron_reduction([chunk], model).waits() is waits


def test_a_step_does_not_check_again_with_less_what_bridges_validation_took(active):
    model = Policy(use_te_rng_tracker=False)  # `rng.te_rng_tracker` is no field of the model
    bridges_step([model], model.config, lambda: None)
    assert [graphs.model for graphs in active_graphs()] == [model.vision_model]


ENTRY = qwen3_vl.STAGES[0]


def drops(self, pre_process=None, post_process=None, vp_stage=None):
    return getattr(sys.modules[ENTRY.module], MODEL_OF_PROVIDER)()


def tells(self, pre_process=None, post_process=None, vp_stage=None):
    return getattr(sys.modules[ENTRY.module], MODEL_OF_PROVIDER)(vp_stage=vp_stage)


@pytest.mark.parametrize("provide", [drops, tells])
def test_a_model_gets_its_stage_once_whether_a_release_tells_it_or_not(active, monkeypatch, provide):
    monkeypatch.setattr(sys.modules[ENTRY.module], MODEL_OF_PROVIDER, lambda **arguments: arguments)
    assert qwen3_vl._tells_stage(ENTRY)(provide)(None, vp_stage=1) == {"vp_stage": 1}
