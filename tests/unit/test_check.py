import logging
from dataclasses import replace

import pytest
import torch

from bridge_cg_plugin.graphs.recordings.recording import Gradients
from bridge_cg_plugin.upstream.encoders.glm45v import GLM45V
from bridge_cg_plugin.upstream.encoders.qwen3_vl import QWEN3_VL
from bridge_cg_plugin.upstream.encoders.siglip import SIGLIP
from bridge_cg_plugin.vision import workload
from bridge_cg_plugin.vision.check import TOLERANCES, CheckFailedError

from .test_gradients import DataParallel
from .towers import assert_close, forward, graphs_on, loss_of, new_tower

ROWS = [[1, 6, 4], [3, 4, 2], [1, 2, 8]]
STRICT = {"check_interval": 1, "strict": True}


@pytest.fixture(autouse=True)
def close(monkeypatch):
    """On a CPU replays are nearer to eager than on a GPU."""
    monkeypatch.setattr(workload, "TOLERANCES", dict.fromkeys((True, False), 1e-4))


def corrupt_inputs(graphs, factor=-1.0):
    """Make each replay see other pixels than the batch has."""
    program = graphs._regions[0].program
    load = program.load

    def wrong(buffers, batch):
        load(buffers, batch)
        buffers["pixels"][: batch.tokens].mul_(factor)

    program.load = wrong


def train_step(graphs, rows=ROWS):
    graphs.begin_step()
    loss_of(forward(graphs.model, rows)).backward()


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "bridge_cg_plugin"]


def test_checks_come_at_their_interval_once_a_step():
    with graphs_on(new_tower(), **{**STRICT, "check_interval": 3}) as graphs:
        for _ in range(7):
            train_step(graphs)
            loss_of(forward(graphs.model, ROWS, 1)).backward()
        assert [c.step for c in graphs.workload.checks] == [3, 6]
        for _ in range(2):
            graphs.begin_step()
        with torch.no_grad():
            forward(graphs.model, ROWS)
        graphs.model.eval()
        forward(graphs.model, ROWS)
        assert len(graphs.workload.checks) == 2, "evaluation is not checked"


@pytest.mark.parametrize("parallel", [False, True])
def test_a_check_changes_no_gradient(parallel):
    eager, model = new_tower(), new_tower()
    sides = [DataParallel(m) for m in (eager, model)] if parallel else []
    for side in sides:
        for name, parameter in side.model.named_parameters():
            assert parameter.main_grad is not None, name
    with graphs_on(model, **STRICT) as graphs:
        for _ in range(2):
            loss_of(forward(eager, ROWS)).backward()
            train_step(graphs)
        assert len(graphs.workload.checks) == 2
    name = "main_grad" if parallel else "grad"
    assert_close(*([getattr(p, name) for p in m.parameters()] for m in (model, eager)))


class Counting(torch.nn.Module):
    """Counts passes in a buffer and draws what it does not use."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, hidden):
        self.passes += 1
        torch.rand(3)
        return self.inner(hidden)


def test_a_check_leaves_buffers_and_random_states_as_replays_do():
    found = []
    for options in ({}, STRICT):
        torch.manual_seed(0)
        model = new_tower()
        model.decoder.layers[0].mlp.linear_fc2 = counting = Counting(model.decoder.layers[0].mlp.linear_fc2)
        with graphs_on(model, **options) as graphs:
            for _ in range(3):
                train_step(graphs)
            found.append((float(counting.passes), torch.get_rng_state()))
    assert found[0][0] == found[1][0] == 3 and torch.equal(found[0][1], found[1][1])


def test_a_wrong_replay_warns_and_goes_on(caplog):
    with graphs_on(new_tower(), check_interval=1, strict=False) as graphs:
        corrupt_inputs(graphs)
        with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
            train_step(graphs)
        (message,) = warnings(caplog)
        assert "check FAILED, step 1" in message
        assert message.endswith("above 0.0001")
        assert graphs.workload.checks[0].forward > 1e-4 and graphs.workload.checks[0].gradient > 1e-4
        train_step(graphs)
        assert len(graphs.workload.checks) == 2


def test_a_wrong_gradient_alone_is_found(monkeypatch):
    with graphs_on(new_tower(), **STRICT) as graphs:
        for recorded in graphs._regions[0].sources.current.recordings.values():
            recording = recorded.recording
            backward = recording.backward

            def wrong(backward=backward):
                gradients = backward()
                gradients.parameters[3].mul_(1.01)
                return gradients

            monkeypatch.setattr(recording, "backward", wrong)
        with pytest.raises(CheckFailedError):
            train_step(graphs)
        assert graphs.workload.checks[0].forward <= 1e-5
        assert graphs.workload.checks[0].gradient == pytest.approx(0.01, rel=0.1)
        assert graphs.workload.checks[0].parameter == 3


def test_a_gradient_that_only_eager_has_is_found(monkeypatch):
    def nothing(gradients, given):
        return replace(gradients, parameters=(None,) * len(gradients.parameters))

    monkeypatch.setattr(Gradients, "through", nothing)
    with graphs_on(new_tower(), **STRICT) as graphs, pytest.raises(CheckFailedError, match="gradients 1.00e"):
        train_step(graphs)


def test_a_fallback_leaves_the_check_for_the_next_replay():
    with graphs_on(new_tower(), **STRICT) as graphs:
        train_step(graphs, [[1, 16, 18]])
        assert graphs.workload.checks == []
        loss_of(forward(graphs.model, ROWS)).backward()
        assert [c.step for c in graphs.workload.checks] == [1]


def test_a_frozen_encoder_is_checked_at_forward():
    model = new_tower().requires_grad_(False)
    with graphs_on(model, **STRICT) as graphs:
        graphs.begin_step()
        forward(model, ROWS)
        assert graphs.workload.checks[0].gradient is None
        corrupt_inputs(graphs, float("nan"))
        graphs.begin_step()
        with pytest.raises(CheckFailedError, match="no backward"):
            forward(model, ROWS)


def test_the_tolerance_is_larger_where_attention_rounds_otherwise():
    found = {family.name: TOLERANCES[family.direct_attention.rounds_as_eager] for family in (QWEN3_VL, SIGLIP, GLM45V)}
    assert list(found.values()) == [0.05, 0.05, 0.15]
