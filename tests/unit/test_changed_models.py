"""A model that changes under its graphs: every microbatch equals eager, on graphs again where the change lasts."""

from contextlib import ExitStack, nullcontext

import pytest
import torch
from megatron.bridge.peft.lora import LoRA
from torch.nn.utils import parametrize

from bridge_cg_plugin.graphs.changes import sources
from bridge_cg_plugin.graphs.changes.sources import LASTING

from ..tape import TapeExecutor
from . import packs
from .changes import LAYERS, GraphedAndEager
from .towers import assert_close, draw, graphs_on, new_tower, results


@pytest.mark.parametrize("kind", ["whole", "parts", "parts whose activations leave"])
def test_any_sequence_of_changes_equals_eager(kind):
    """Change models at random, run microbatches and compare each with eager."""
    replays = fallbacks = 0
    chained = kind == "parts whose activations leave"
    for seed in range(24):
        pair = GraphedAndEager(seed, kind != "whole", grows=seed % 2 == 1, chained=chained)
        try:
            pair.random_sequence(12)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        statistics = pair.graphs.statistics()
        replays += statistics.replays
        fallbacks += statistics.fallbacks.total()
        pair.close()
    assert replays > fallbacks, "most microbatches should be replayed"


def test_parts_of_layers_are_recorded_in_the_mode_of_their_layers():
    pair = GraphedAndEager(0, parts=True)
    for model in pair.models:
        model.eval()
    pair.microbatch(gradients=False)
    assert pair.graphs.statistics().replays == LAYERS and not pair.graphs.statistics().fallbacks
    pair.close()


def test_a_tower_with_adapters_switched_off_equals_eager_and_gets_graphs_of_its_own():
    tower, lora = with_adapters()
    pixels, grid = draw([[1, 4, 4], [1, 2, 6]])
    tower.eval()
    with torch.no_grad():
        on = tower(pixels, grid)[0]
        with lora.disable_adapter(tower):
            off = tower(pixels, grid)[0]
    assert (on - off).norm() > 0.1
    tower.train()
    with graphs_on(tower, executor=TapeExecutor()) as graphs:
        tower.eval()
        for _ in range(3):
            with torch.no_grad():
                assert_close([tower(pixels, grid)[0]], [on])
                with lora.disable_adapter(tower):
                    assert_close([tower(pixels, grid)[0]], [off])
        statistics = graphs.statistics()
        assert statistics.fallbacks == {"model_changed": 1} and statistics.replays == 5


def test_a_forward_hook_on_a_layer_runs_eager_while_it_is_there(caplog):
    tower, seen = new_tower(), []
    pixels, grid = draw([[1, 4, 4]])
    with graphs_on(tower, executor=TapeExecutor()) as graphs:
        handle = tower.decoder.layers[1].register_forward_hook(lambda *_: seen.append(1))
        for _ in range(3):
            tower(pixels, grid)
        assert len(seen) == 3 and graphs.statistics().fallbacks == {"forward_hooks": 3}
        handle.remove()
        tower(pixels, grid)
        assert len(seen) == 3 and graphs.statistics().replays == 1
    assert [r.message.count("decoder.layers.1") for r in caplog.records if "hook" in r.message] == [1]


def test_the_towers_own_hooks_run_around_replays():
    tower, seen = new_tower(), []
    tower.register_forward_hook(lambda *_: seen.append(1))
    with graphs_on(tower, executor=TapeExecutor()) as graphs:
        for _ in range(2):
            tower(*draw([[1, 4, 4]]))
        assert len(seen) == 2 == graphs.statistics().replays


def in_the_same_memory(model, dtype):
    """Convert weights where they lie, as a loop does whose memory happens to return to its addresses."""
    for parameter in model.parameters():
        converted = parameter.data.to(dtype)
        parameter.data = parameter.data.view(dtype).copy_(converted)


@pytest.mark.parametrize("convert, in_step", [(in_the_same_memory, True), (torch.nn.Module.to, False)])
def test_a_tower_of_another_type_than_at_capture_runs_eager_until_it_is_back(convert, in_step):
    tower, reference = (new_tower().bfloat16().requires_grad_(False) for _ in range(2))
    pixels, grid = draw([[1, 4, 4]])
    with graphs_on(tower, buckets=(16,), executor=TapeExecutor()) as graphs:
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            for model in (tower, reference):
                convert(model, dtype)
            for _ in range(3):
                with graphs.step() if in_step else nullcontext():
                    assert torch.equal(tower(pixels.to(dtype), grid)[0], reference(pixels.to(dtype), grid)[0])
        # `to` also leaves another buffer behind.
        assert graphs.statistics().fallbacks["numerics_changed"] == 3 and graphs.statistics().replays >= 5


@pytest.mark.parametrize("around_capture", [False, True])
def test_autocast_outside_is_part_of_what_is_recorded(around_capture):
    # Without gradients: megatron-core's own layers on a CPU do not differentiate what autocast has cast.
    tower, (pixels, grid) = new_tower().requires_grad_(False), draw([[1, 4, 4], [1, 6, 8]])
    with ExitStack() as stack:
        if around_capture:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        graphs = stack.enter_context(graphs_on(tower, buckets=(64,), executor=TapeExecutor()))
        for autocast in (True, False, True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = tower(pixels, grid)[0]
                with graphs.paused():
                    expected = tower(pixels, grid)[0]
            assert_close([outputs.detach()], [expected.detach()])
            del outputs, expected
            with torch.no_grad():
                for parameter in tower.parameters():
                    parameter.mul_(1.1)
        assert graphs.statistics().fallbacks == {"autocast_changed": 1} and graphs.statistics().replays == 4


def test_a_model_that_changes_all_the_time_is_captured_seldom_and_on_graphs_again_once_it_stays(caplog, monkeypatch):
    monkeypatch.setattr(sources, "MANY_ADOPTED", 4)
    monkeypatch.setattr(sources, "MOST_TOLD", 6)
    tower = new_tower()
    with graphs_on(tower, buckets=(32,), executor=TapeExecutor()) as graphs:
        for number in range(30):
            tower.decoder.layers[0].note = number // 3
            tower(*draw([[1, 4, 4]]))
        changing = graphs.statistics().replays
        assert changing == 2 * 4, "each of the first states lasted two microbatches beyond the first"
        for _ in range(2 * LASTING):
            tower(*draw([[1, 4, 4]]))
        assert graphs.statistics().replays >= changing + LASTING
    assert len(caplog.records) <= 6


class Counting(torch.nn.Module):
    """A linear layer whose output grows with the passes that it counts in a buffer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, hidden):
        self.passes += 1
        output, bias = self.inner(hidden)
        return output * self.passes, bias


def test_passes_of_a_capture_leave_buffers_as_they_were():
    tower, reference = new_tower(), new_tower()
    for model in (tower, reference):
        model.decoder.layers[0].mlp.linear_fc2 = Counting(model.decoder.layers[0].mlp.linear_fc2)
    with graphs_on(tower, buckets=(16,), executor=TapeExecutor()) as graphs:
        for seed in range(3):
            actual, expected = (results(model, [[1, 4, 4]], seed) for model in (tower, reference))
            assert_close(actual[0], expected[0])
            assert_close(actual[1], expected[1])
        assert not graphs.statistics().fallbacks


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.3))

    def forward(self, weight):
        return self.scale * weight


def test_parametrized_weights_that_are_cached_around_a_capture_are_not_part_of_it():
    tower, reference = new_tower(), new_tower()
    for model in (tower, reference):
        parametrize.register_parametrization(model.decoder.layers[0].mlp.linear_fc2, "weight", Scaled())
    with parametrize.cached(), graphs_on(tower, buckets=(16,), executor=TapeExecutor()) as graphs:
        for seed in range(3):
            actual, expected = (results(model, [[1, 4, 4]], seed) for model in (tower, reference))
            assert_close(actual[0], expected[0])
            assert_close(actual[1], expected[1])
            parametrize._cache.clear()  # as where `cached` ends after each step
            with torch.no_grad():
                for parameter in (*tower.parameters(), *reference.parameters()):
                    parameter.mul_(1.1)
        assert graphs.statistics().replays == 3


@pytest.mark.parametrize("field", ["qk_clip", "log_max_attention_logit"])
def test_statistics_that_attention_leaves_in_attributes_keep_the_decoder_eager(field, caplog):
    model = packs.new_model(**{field: True})
    batch = packs.pack((120, 150))
    with packs.graphs_on(model, packs.pack((100, 150, 50)), cuda_graph_packed_strict=False) as graphs:
        model(**batch)
        assert graphs.failure and field in graphs.failure
        assert graphs.statistics().fallbacks == {"capture_failed": 1}
    assert sum(field in record.message for record in caplog.records) == 1


def test_statistics_of_attention_that_runs_eager_leave_other_parts_on_graphs():
    model = packs.new_model(qk_clip=True)
    with packs.graphs_on(model, packs.pack((100, 150, 50)), cuda_graph_modules=["mlp"]) as graphs:
        model(**packs.pack((120, 150)))
        assert graphs.failure is None and graphs.statistics().replays == 2  # one of each layer


def with_adapters(tower=None):
    """Return a tower whose adapters are far from zero, and what put them there."""
    lora = LoRA(target_modules=["linear_proj", "linear_fc2"], dim=4, alpha=8)
    tower = lora(new_tower() if tower is None else tower, training=True)
    widen(tower)
    return tower, lora


def widen(model) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_out" in name:
                parameter.normal_(std=0.3)
