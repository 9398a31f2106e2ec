"""A grid on the device that is not the one by which the host chose the bucket."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.vision.guard import guarded_shape, images, poisoned, write_guarded

from ..tape import TapeExecutor
from .hugging_face_towers import (
    PIXTRAL_PATCH,
    draw_padded,
    draw_windows,
    new_glm45v,
    new_pixtral,
    new_qwen3_omni,
    new_qwen25,
    new_qwen25_omni,
)
from .towers import draw, graphs_on, new_tower

SIZES = st.integers(0, 4096)
GRIDS = st.lists(st.tuples(SIZES, SIZES, SIZES).filter(any), min_size=1, max_size=6)


@given(GRIDS, GRIDS, st.integers(0, 4))
def test_values_pass_for_the_same_grid_only(rows, others, unused):
    values, known = torch.randn(5), max(len(rows), len(others)) + unused
    buffer = torch.full(guarded_shape(known), 5)
    write_guarded(buffer, torch.tensor(rows), rows)
    assert torch.equal(images(buffer), torch.tensor([*rows, *[(0, 0, 0)] * (known - len(rows))]))
    assert torch.equal(poisoned(values, buffer), values)
    write_guarded(buffer, torch.tensor(others), rows)
    assert poisoned(values, buffer).isnan().all() == (others != rows)


TOWERS = {
    "qwen3_vl": (new_tower, draw),
    "qwen25_vl": (new_qwen25, draw_windows),
    "qwen25_omni": (new_qwen25_omni, draw_windows),
    "glm45v": (new_glm45v, draw_windows),
    "qwen3_omni": (new_qwen3_omni, draw),
}


@pytest.mark.parametrize("there", [(1, 8, 4), (1, 4, 4), (0, 8, 4)], ids=str)
@pytest.mark.parametrize(("make", "draws"), TOWERS.values(), ids=TOWERS)
def test_outputs_are_nan_where_the_host_was_told_of_other_images(make, draws, there, monkeypatch):
    tower, (pixels, grid) = make(), draws([[1, 8, 4]])
    with graphs_on(tower, executor=TapeExecutor()) as graphs:
        assert all(o.isfinite().all() for o in graphs.workload.encoder.outputs(tower(pixels, grid_thw=grid)))
        monkeypatch.setattr(graphs.workload.grids, "lookup", lambda tensor: ((1, 4, 8),))
        outputs = graphs.workload.encoder.outputs(tower(pixels, grid_thw=torch.tensor([there])))
        assert graphs.statistics().replays == 2 and not graphs.statistics().fallbacks
        assert all(o.isnan().all() for o in outputs)


@pytest.mark.parametrize("there", [(8, 4), (4, 4), (0, 0)], ids=str)
def test_outputs_of_pixtral_are_nan_where_the_host_was_told_of_other_images(there, monkeypatch):
    pixels, _ = draw_padded([[1, 8, 8]])
    with graphs_on(new_pixtral(), executor=TapeExecutor()) as graphs:
        monkeypatch.setattr(graphs.workload.grids, "values", lambda tensor: [8 * PIXTRAL_PATCH] * 2)
        sizes = PIXTRAL_PATCH * torch.tensor([there])
        hidden = graphs.model(pixels, image_sizes=sizes, output_hidden_states=True, return_dict=True).hidden_states[-1]
        assert graphs.statistics().replays == 1 and hidden.shape[1] == 64 and hidden.isnan().all()
