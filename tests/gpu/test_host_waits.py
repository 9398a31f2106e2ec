"""What a step reads of its losses: nothing waits for work behind it; `test_between.py` has the step up to its loss."""

import pytest
import torch

from bridge_cg_plugin.upstream.hooks.train_loop import StepChecks


@pytest.mark.first
def test_verdicts_are_read_while_later_work_still_runs():
    checks = StepChecks()
    checks.add(lambda: None, torch.tensor(False, device="cuda"))
    torch.cuda._sleep(1_000_000_000)
    checks.settle()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
