"""A model that changes under its graphs: every microbatch equals eager, on graphs again where the change lasts."""

from contextlib import nullcontext

import pytest
import torch

from bridge_cg_plugin.graphs.changes import sources
from bridge_cg_plugin.graphs.changes.sources import LASTING

from ..tape import TapeExecutor
from . import packs
from .changes import GraphedAndEager
from .towers import draw, graphs_on, new_tower


@pytest.mark.usefixtures("first_proofs")
@pytest.mark.parametrize("kind", ["whole", "parts", "parts whose activations leave"])
def test_any_sequence_of_changes_equals_eager(kind):
    """Change models at random, run microbatches and compare each with eager, as the plugin does with some."""
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


@pytest.mark.parametrize("field", ["qk_clip", "log_max_attention_logit"])
def test_statistics_that_attention_leaves_in_attributes_keep_it_eager_and_other_parts_on_graphs(field, caplog):
    model, batch = packs.new_model(**{field: True}), packs.pack((120, 150))
    warmup = packs.pack((100, 150, 50))
    with packs.graphs_on(model, warmup, cuda_graph_packed_strict=False) as graphs:
        model(**batch)
        assert graphs.failure and field in graphs.failure
        assert graphs.statistics().fallbacks == {"capture_failed": 1}
    assert sum(field in record.message for record in caplog.records) == 1
    with packs.graphs_on(model, warmup, cuda_graph_modules=["mlp"]) as graphs:
        model(**batch)
        assert graphs.failure is None and graphs.statistics().replays == 2  # one of each layer
