"""Twenty steps of pretrain() of a packed Qwen3-VL on graphs: where the host waits for the device."""

import pytest
import torch

from bridge_cg_plugin.upstream.hooks.train_loop import StepChecks

from .trainings import Training
from .waiting_training import BEFORE

COUNTED = 20
# A step reads its verdicts once, after its last backward. Everything else waits behind the optimizer's step, for
# what is logged: whether the step was made, loss scale, loss, counts of operations and times.
VERDICTS = "loss_checks.settle"
BEHIND = {
    "clip_grads.get_grad_norm_fp32",
    "clip_grads.clip_grad_by_total_norm_fp32",
    "optimizer.step",
    "train_utils.logical_and_across_model_parallel_group",
    "train_utils.reduce_max_stat_across_model_parallel_group",
    "train_utils.training_log",
    "flop_utils._accumulator_to_int",
    "flop_utils.resolve_global_flops_runtime_stats",
    "train.train_step",
    "train.train",
    "timers.start",
    "timers.stop",
    "timers._get_global_min_max_time",
}
COUNTING = Training("graphs", (), BEFORE + COUNTED, main_job=False, module="tests.gpu.waiting_training")


@pytest.mark.parametrize("counted", [COUNTING], ids=[""])
def test_a_step_waits_for_its_verdicts_and_for_what_is_logged_alone(trained, counted):
    found = trained(counted)
    print(found["in_schedule"], found["others"])
    for kind, statistics in found["graphs"].items():
        assert statistics["replays"] > 0 and not statistics["fallbacks"], (kind, statistics)
    assert len(found["graphs"]) == 2 and found["checked"], found
    assert found["in_schedule"] == {}
    assert found["others"].pop(VERDICTS) == COUNTED
    assert found["others"].keys() <= BEHIND, found["others"].keys() - BEHIND


@pytest.mark.first
def test_verdicts_are_read_while_later_work_still_runs():
    checks = StepChecks()
    checks.add(lambda: None, torch.tensor(False, device="cuda"))
    torch.cuda._sleep(1_000_000_000)
    checks.settle()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
