import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.vision.layout import (
    position_interpolation,
    rotary_angles,
    segment_offsets,
    token_positions,
)

from .towers import tower

MERGE = 2
rows = st.tuples(
    st.integers(1, 4), st.integers(1, 12).map(lambda n: MERGE * n), st.integers(1, 12).map(lambda n: MERGE * n)
)
grids = st.lists(rows, min_size=1, max_size=5)
padding = st.integers(0, 130)
unused_rows = st.integers(0, 3)


def padded(grid, spare_rows):
    return torch.tensor([*grid, *[(0, 0, 0)] * spare_rows])


def count(grid):
    return sum(t * h * w for t, h, w in grid)


@given(grids, padding, unused_rows)
def test_positions_give_bridges_rotary_angles_bit_for_bit(grid, spare, spare_rows):
    model = tower()
    expected = model.rot_pos_emb(torch.tensor(grid))
    expected = expected.reshape(len(expected), 1, 1, -1).repeat(1, 1, 1, 2)
    positions = token_positions(padded(grid, spare_rows), count(grid) + spare, MERGE)
    angles = rotary_angles(positions, model.rotary_pos_emb.inv_freq)
    assert angles.shape[0] == count(grid) + spare
    assert torch.equal(angles[: count(grid)], expected)
    assert not angles[count(grid) :].any()


@given(grids, padding, unused_rows)
def test_interpolation_gives_bridges_position_embedding_bit_for_bit(grid, spare, spare_rows):
    model = tower()
    positions = token_positions(padded(grid, spare_rows), count(grid) + spare, MERGE)
    table = model.pos_embed.weight
    indices, weights = position_interpolation(positions, model.num_grid_per_side, table.dtype)
    terms = table[indices] * weights[:, :, None]
    found = terms[0] + terms[1] + terms[2] + terms[3]
    assert torch.equal(found[: count(grid)], model.fast_pos_embed_interpolate(torch.tensor(grid)))
    assert not found[count(grid) :].any()
    assert int(indices.min()) >= 0 and int(indices.max()) < len(table)


@given(grids, unused_rows, st.integers(0, 20))
def test_offsets_are_bridges_cu_seqlens_then_empty_segments(grid, spare_rows, spare_segments):
    expected = tower().build_packed_seq_params(torch.tensor(grid)).cu_seqlens_q
    frames = sum(t for t, _, _ in grid)
    offsets = segment_offsets(padded(grid, spare_rows), frames + spare_segments)
    assert offsets.dtype == expected.dtype == torch.int32
    assert torch.equal(offsets[: frames + 1], expected)
    assert (offsets[frames + 1 :] == count(grid)).all()
