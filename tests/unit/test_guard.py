"""A grid on the device that is not the one by which the host chose the bucket."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.vision.guard import guarded_shape, images, poisoned, write_guarded

from ..tape import TapeExecutor
from .hugging_face_towers import draw_windows, new_qwen25
from .towers import draw, graphs_on, new_tower

SIZES = st.integers(1, 4096)
GRIDS = st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=6)


@given(GRIDS, GRIDS, st.integers(0, 4))
def test_values_pass_for_the_same_grid_only(rows, others, unused):
    values, known = torch.randn(5), max(len(rows), len(others)) + unused
    buffer = torch.full(guarded_shape(known), 5)
    write_guarded(buffer, torch.tensor(rows), rows)
    assert torch.equal(images(buffer), torch.tensor([*rows, *[(0, 0, 0)] * (known - len(rows))]))
    assert torch.equal(poisoned(values, buffer), values)
    write_guarded(buffer, torch.tensor(others), rows)
    assert poisoned(values, buffer).isnan().all() == (others != rows)


STALE = [((1, 4, 8),), ((2, 4, 4),), ((1, 2, 16),)]


@pytest.mark.parametrize("stale", STALE)
@pytest.mark.parametrize("make, draws", [(new_tower, draw), (new_qwen25, draw_windows)])
def test_outputs_are_nan_where_the_host_was_told_of_other_images(make, draws, stale, monkeypatch):
    tower, (pixels, grid) = make(), draws([[1, 8, 4]])
    with graphs_on(tower, executor=TapeExecutor()) as graphs:
        assert all(o.isfinite().all() for o in graphs.workload.adapter.outputs(tower(pixels, grid_thw=grid)))
        monkeypatch.setattr(graphs.workload.grids, "lookup", lambda tensor: stale)
        outputs = graphs.workload.adapter.outputs(tower(pixels, grid_thw=grid))
        assert graphs.statistics().replays == 2 and not graphs.statistics().fallbacks
        assert all(o.isnan().all() for o in outputs)
