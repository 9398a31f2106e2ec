"""Memory of weights and gradients that moves or leaves under graphs: microbatches equal eager, or are an error."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.changes.sources import MOST_SOURCES
from bridge_cg_plugin.graphs.errors import ReplayError
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.manager import MANY_MOVES

from ..main_grads import give_main_grads, hook_main_grads
from ..other_memory import are_intact, fill_elsewhere
from ..regions import new_region
from ..rows_program import RowsProgram
from ..tape import CountingTape, TapeExecutor
from .towers import assert_close, forward, graphs_on, loss_of, move, new_tower, results


class Gradients:
    """A buffer of `main_grad`s, as data parallelism has it, behind those of so many other elements."""

    def __init__(self, model, before=0):
        self.flat, self._others = torch.zeros(before + sum(p.numel() for p in model.parameters())), []
        self._nbytes, self._addresses = self.flat.nbytes, {self.flat.data_ptr()}
        give_main_grads(model.parameters(), self.flat[before:])
        self._nodes = hook_main_grads(model.parameters())

    def leave(self):
        self.flat.untyped_storage().resize_(0)

    def back(self):
        """Take memory again, other than ever before."""
        self._others += fill_elsewhere(self.flat.untyped_storage(), self._nbytes, self._addresses)
        self._addresses.add(self.flat.data_ptr())
        self.flat.zero_()

    def others_are_intact(self):
        return are_intact(self._others)


def test_recordings_of_the_last_places_of_memory_are_kept():
    places = [1, 2, 3, 1, 2, 3, 4, 5, 1]
    tower, reference = new_tower(), new_tower()
    found, expected = Gradients(tower), Gradients(reference)
    memory = [[p.detach().clone() for p in tower.parameters()] for _ in range(6)]
    executor, expected_count, kept = CountingTape(), 0, [0]
    with graphs_on(tower, buckets=(16,), executor=executor) as graphs:
        executor.recorded = 0
        for number, place in enumerate(places):
            for parameter, data in zip(tower.parameters(), memory[place], strict=True):
                parameter.data = data
            for model in (tower, reference):
                with graphs.step():
                    loss_of(forward(model, [[1, 4, 4]], seed=number)).backward()
            assert_close([found.flat], [expected.flat])
            expected_count += place not in kept
            kept = [place, *[other for other in kept if other != place]][:MOST_SOURCES]
        statistics = graphs.statistics()
        assert not statistics.fallbacks and statistics.replays == len(places)
        assert executor.recorded == expected_count


def test_memory_that_moves_all_the_time_is_told_once(caplog):
    tower = new_tower()
    with graphs_on(tower, buckets=(16,)) as graphs:
        for number in range(MANY_MOVES + 3):
            assert ("moved" in caplog.text) == (number > MANY_MOVES)
            with graphs.step():
                results(tower, [[1, 4, 4]], number)
            move(tower)
    assert sum("graphs are captured again each time" in record.message for record in caplog.records) == 1


def free_gradients(tower, gradients):
    gradients.leave()
    gradients.back()


def move_parameters(tower, gradients):
    move(tower)


def replace_gradients(tower, gradients):
    for parameter in tower.parameters():
        parameter.main_grad = parameter.main_grad.clone()


def take_gradients_away(tower, gradients):
    for parameter in tower.parameters():
        del parameter.main_grad


@pytest.mark.parametrize("change", [free_gradients, move_parameters, replace_gradients, take_gradients_away])
@pytest.mark.parametrize("in_step", [False, True])
def test_memory_that_moves_between_forward_and_backward_is_an_error_and_is_not_written(change, in_step):
    tower = new_tower()
    gradients = Gradients(tower)
    with (
        graphs_on(tower, buckets=(16,), executor=TapeExecutor()) as graphs,
        graphs.step() if in_step else nullcontext(),
    ):
        loss_of(forward(tower, [[1, 4, 4]])).backward()
        outputs = forward(tower, [[1, 4, 4]])
        change(tower, gradients)
        written = gradients.flat.clone()
        with pytest.raises(ReplayError, match="between the forward and the backward"):
            loss_of(outputs).backward()
        assert graphs.statistics().replays == 2
        assert gradients.others_are_intact() and torch.equal(gradients.flat, written)


def test_weights_that_all_change_inside_a_step_are_seen_at_once():
    """Between microbatches, without a word to PyTorch; looks inside a step are at samples."""
    tower, reference = new_tower(), new_tower()
    with graphs_on(tower, buckets=(16,), executor=TapeExecutor()) as graphs:
        for number in range(6):
            with graphs.step():
                for factor in (1.0, 1.25, 0.8):
                    for model in (tower, reference):
                        for parameter in model.parameters():
                            parameter.data = parameter.data * factor
                    found, expected = (sum(map(list, results(m, [[1, 4, 4]], number)), []) for m in (tower, reference))
                    assert_close(found, expected)
        assert graphs.statistics().replays >= 6


def test_other_views_of_the_same_gradients_are_written():
    tower = new_tower()
    gradients = Gradients(tower)
    flat = gradients.flat
    with graphs_on(tower, buckets=(16,), executor=TapeExecutor()) as graphs:
        loss_of(forward(tower, [[1, 4, 4]])).backward()
        expected = flat.clone()
        for parameter in tower.parameters():
            parameter.main_grad = parameter.main_grad.view_as(parameter.main_grad)
        flat.zero_()
        loss_of(forward(tower, [[1, 4, 4]])).backward()
        assert graphs.statistics().replays == 2 and flat.any() and torch.equal(flat, expected)


def test_gradients_without_main_grad_lie_in_memory_that_all_recordings_share():
    tower, executor, counts = new_tower(), CountingTape(), []
    memory = [[p.detach().clone() for p in tower.parameters()] for _ in range(2)]
    with graphs_on(tower, buckets=(16, 32), slots=2, executor=executor) as graphs:
        for number in range(4):
            for parameter, data in zip(tower.parameters(), memory[number % 2], strict=True):
                parameter.data = data
            results(tower, [[1, 4, 4]], number)
            counts.append(executor.recorded)
        assert counts[1] == counts[-1] and not graphs.statistics().fallbacks
        source = graphs._regions[0].sources.current
        kept = {id(g) for r in source.recordings.values() if r.recording._body.has_backward for g in returned(r)}
        weights = sum(p.nbytes for p in tower.parameters())
        assert len(kept) == sum(1 for _ in tower.parameters())
        assert graphs.statistics().gradient_bytes == weights


def returned(recorded):
    """Return the gradients that a recording hands to autograd."""
    recorded.recording.forward()
    return [g for g in recorded.recording.backward().parameters if g is not None]


WIDTH = 4


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


@pytest.fixture(params=[0, WIDTH])
def gradients(model, request):
    return Gradients(model, request.param)


@pytest.fixture
def executor():
    return CountingTape()


def captured(model, executor):
    region = new_region(RowsProgram(model, (WIDTH,)), executor, [Bucket(8)])
    region.capture()
    return region


def log_probabilities(region, model):
    x = torch.randn(3, WIDTH)
    model.eval()
    with torch.no_grad():
        (found,) = region.run(x)
        torch.testing.assert_close(found, nn.functional.linear(x, model.weight, model.bias))


def train(region, model):
    """Run a microbatch with its backward; returns whether it was on graphs."""
    x = torch.randn(3, WIDTH)
    model.train()
    found = region.run(x)
    if found is None:
        return False
    for parameter in model.parameters():
        parameter.main_grad.zero_()
    found[0].sum().backward()
    torch.testing.assert_close(model.bias.main_grad, torch.full((WIDTH,), 3.0))
    torch.testing.assert_close(model.weight.main_grad, x.sum(0).expand(WIDTH, WIDTH))
    return True


def test_graphs_without_a_backward_stay_when_gradients_alone_move(model, gradients, executor):
    region, counts = captured(model, executor), []
    for _ in range(4):
        gradients.leave()
        log_probabilities(region, model)
        gradients.back()
        assert train(region, model) and gradients.others_are_intact()
        log_probabilities(region, model)
        counts.append(executor.recorded)
    forward_only, training = 1, 1
    assert counts == [forward_only + training * (2 + number) for number in range(4)]


def test_a_capture_while_gradients_are_away_records_no_backward(model, gradients, executor):
    gradients.leave()
    region = captured(model, executor)
    log_probabilities(region, model)
    assert executor.recorded == 1
    gradients.back()
    assert [train(region, model) for _ in range(3)][-1]
    log_probabilities(region, model)
    assert executor.recorded == 2


def test_passes_with_gradients_on_run_eager_while_gradients_are_away(model, gradients, executor):
    region = captured(model, executor)
    recorded = executor.recorded
    gradients.leave()
    assert [train(region, model) for _ in range(3)] == [False] * 3
    assert region.statistics.fallbacks == {Fallback.GRADIENTS_LEFT: 3} and executor.recorded == recorded
    gradients.back()
    assert train(region, model) and gradients.others_are_intact()
