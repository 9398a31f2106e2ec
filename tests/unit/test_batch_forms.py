"""Every form of pixels and grid, fed to eager and to graphs: what eager takes, graphs take, and nothing else."""

from contextlib import ExitStack
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.vision.batch import BatchError

from .hugging_face_towers import (
    OMNI_PATCH,
    SIDE,
    WINDOW_PATCH,
    draw_clips,
    draw_images,
    draw_padded,
    heard,
    last_layer,
    merged,
    new_glm45v,
    new_pixtral,
    new_qwen3_omni,
    new_qwen3_omni_audio,
    new_qwen25,
    new_siglip,
    pooled,
    with_features,
)
from .test_input_gradients import run_qwen3
from .towers import PATCH, assert_close, graphs_on, loss_of, new_tower

GRID = torch.tensor([[1, 4, 6], [2, 2, 2]])
FRAMES = torch.tensor([[1, 4, 6], [1, 2, 4]])  # no video
TOKENS = 32
TILE = SIDE // 2


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def pixel_forms(width, side):
    """Return the pixels of `GRID`, and others, in every form."""
    plain = random(TOKENS, width)
    return {
        "plain": plain,
        "[1, N, C]": plain[None],
        "[1, N, 3, T, P, P]": plain.view(1, TOKENS, 3, 2, side, side),
        "[N / 2, 2 C]": plain.view(TOKENS // 2, -1),
        "[N C]": plain.view(-1),
        "channels last": plain.view(TOKENS, 3, 2, side, side).contiguous(memory_format=torch.channels_last_3d),
        "every other row": random(2 * TOKENS, width)[::2],
        "every other column": random(TOKENS, 2 * width)[:, ::2],
        "transposed": random(width, TOKENS).t(),
        "one row expanded": random(1, width).expand(TOKENS, width),
        "cannot be viewed": random(width, 2, TOKENS // 2).permute(2, 1, 0)[:, :, ::1].transpose(0, 1),
        "fp64": plain.double(),
        "bf16": plain.bfloat16(),
        "uint8": (plain * 40).abs().byte(),
        "one patch": random(1, width),
        "half the patches": random(TOKENS // 2, width),
        "no patch": random(0, width),
        "a wider patch": random(TOKENS, width + 1),
        "a number": torch.tensor(1.0),
        "on another device": torch.empty(TOKENS, width, device="meta"),
    }


def grid_forms(grid):
    """Return grids with the patches that they describe, in every form."""
    return {
        "int32": grid.int(),
        "column by column": grid.t().contiguous().t(),
        "part of a larger one": torch.cat((grid, grid), 1)[:, 3:],
        **{str(dtype): grid.to(dtype) for dtype in (torch.int8, torch.float32)},
        "[1, n, 3]": grid[None],
        "[3]": torch.tensor([1, 4, 8]),
        "[n, 4]": torch.cat((grid, torch.ones(2, 1, dtype=torch.int64)), 1),
        "none": None,
        "a list": grid.tolist(),
        "no image": torch.zeros(0, 3, dtype=torch.int64),
        "[0, 2, 2] behind": torch.cat((grid, torch.tensor([[0, 2, 2]]))),  # others: any rows at all, below
    }


def described(grid):
    """Return the patches of a grid, `TOKENS` where it is none."""
    if not isinstance(grid, torch.Tensor) or grid.dim() != 2 or grid.shape[1] < 3:
        return TOKENS
    return max(int(grid[:, :3].long().prod(1).sum()), 0)


def image_forms():
    images = draw_images(2)
    return {
        "plain": (images,),
        "channels last": (images.contiguous(memory_format=torch.channels_last),),
        "every other column": (random(2, 3, SIDE, 2 * SIDE)[..., ::2],),
        **{str(dtype): (images.to(dtype),) for dtype in (torch.float64, torch.bfloat16, torch.int32)},
        "as many patches": (random(2, 3, TILE, 4 * TILE),),
        "a border": (random(2, 3, SIDE + 1, SIDE + 9),),
        "more patches": (random(2, 3, 2 * SIDE, 2 * SIDE),),
        "smaller than a patch": (random(2, 3, TILE - 1, TILE),),
        "no image": (random(0, 3, SIDE, SIDE),),
        "one channel": (random(2, 1, SIDE, SIDE),),
        "a number": (torch.tensor(1.0),),
        "on another device": (torch.empty(2, 3, SIDE, SIDE, device="meta"),),
        "interpolated": (random(2, 3, 2 * SIDE, SIDE), True),
        "interpolated to its own size": (images, True),
    }


def padded_forms():
    """Return images of 4 x 6 and 2 x 4 patches, padded to one size, in every form, with their sizes in pixels."""
    pixels, sizes = draw_padded([[1, 4, 6], [1, 2, 4]])
    height, width = pixels.shape[2:]
    of_sizes = {
        "none": None,
        "a list": sizes.tolist(),
        "int32": sizes.int(),
        "fp32": sizes.float(),
        "column by column": sizes.t().contiguous().t(),
        "rounded down": sizes + 5,
        "one less": sizes[:1],
        "one more": torch.cat((sizes, sizes[:1])),
        "[2 n]": sizes.flatten(),
        "larger": sizes * 2,
        "zero": sizes * 0,
        "one side zero": sizes * torch.tensor([[1, 1], [1, 0]]),
        "smaller than a patch": sizes // 100,
    }
    return {
        "plain": (pixels, sizes),
        "channels last": (pixels.contiguous(memory_format=torch.channels_last), sizes),
        "every other column": (random(2, 3, height, 2 * width)[..., ::2], sizes),
        **{str(dtype): (pixels.to(dtype), sizes) for dtype in (torch.float64, torch.bfloat16, torch.int32)},
        "a border": (random(2, 3, height + 30, width + 9), sizes),
        "no image": (pixels[:0], sizes[:0]),
        "one channel": (pixels[:, :1], sizes),
        "a number": (torch.tensor(1.0), sizes),
        "on another device": (torch.empty(2, 3, height, width, device="meta"), sizes),
        **{f"sizes {name}": (pixels, form) for name, form in of_sizes.items()},
    }


def clip_forms():
    """Return two clips, and others, with lengths in every form."""
    features, lengths = draw_clips([100, 130])
    of_lengths = {
        "less": lengths - 20,
        "more": lengths + 10,
        "fp32": lengths.float(),
        "[1, n]": lengths[None],
        "one less": lengths[:1],
        "none": None,
    }
    return {
        "plain": (features, lengths),
        "transposed": (features.contiguous(), lengths),
        "a number": (torch.tensor(1.0), lengths),
        **{f"lengths {name}": (features, form) for name, form in of_lengths.items()},
    }


def batches(width, side, grid=GRID):
    """Return every batch of a family whose images have grids, by name."""
    pixels = {name: (form, grid) for name, form in pixel_forms(width, side).items()}
    return pixels | {f"grid {name}": (random(described(g), width), g) for name, g in grid_forms(grid).items()}


# Small towers: what differs is how a batch is read.
FAMILIES = {
    "qwen3-vl": (lambda: new_tower(layers=2), run_qwen3, batches(PATCH, 16), {}),
    "qwen2.5-vl": (lambda: new_qwen25(layers=2), merged, batches(WINDOW_PATCH, 14), {}),
    "glm-4.5v": (lambda: new_glm45v(depth=1), merged, batches(WINDOW_PATCH, 14, FRAMES), {}),
    "qwen3-omni": (lambda: new_qwen3_omni(depth=2), with_features, batches(OMNI_PATCH, 16), {}),
    "ministral-3": (lambda: new_pixtral(num_hidden_layers=1), last_layer, padded_forms(), {}),
    "qwen3-omni-audio": (lambda: new_qwen3_omni_audio(encoder_layers=1), heard, clip_forms(), {"buckets": (32, 64)}),
    "siglip": (lambda: new_siglip(num_hidden_layers=1), pooled, image_forms(), {"buckets": (8, 16)}),
}


def tried(model, run, batch):
    """Return outputs and the parameters' gradients, or the error that the batch ends with."""
    try:
        outputs = run(model, *batch)
        wanted = [p for p in model.parameters() if p.requires_grad]
        return [o.detach() for o in outputs] + list(torch.autograd.grad(loss_of(outputs), wanted))
    except Exception as error:
        return error


@cache
def eager_tower(family):
    return FAMILIES[family][0]()


@cache
def expected_of(family, name):
    """Return what the eager tower makes of a batch."""
    _, run, forms, _ = FAMILIES[family]
    return tried(eager_tower(family), run, forms[name])


@pytest.fixture(scope="module")
def graphs_of():
    """Return a function from a family, and whether they are captured, to graphs that its tests share."""
    with ExitStack() as stack:
        yield cache(lambda family, capture: stack.enter_context(new_graphs(family, capture)))


def new_graphs(family, capture=True):
    new, _, _, options = FAMILIES[family]
    return graphs_on(new(), capture=capture, **options)


def counts(graphs):
    statistics = graphs.statistics()
    return statistics.replays, sum(statistics.fallbacks.values()), statistics.warmup_microbatches


def assert_same(found, expected):
    """Both ended with an error, the one on graphs with a clear one; or both have equal results.

    GLM-4.5V's eager encoder divides by the sides of images without a patch: NaN is where eager has it, nowhere else.
    """
    if isinstance(expected, Exception):
        assert isinstance(found, BatchError), found
        names = ("pixel_values", "grid_thw", "image_sizes", "input_features", "feature_lens")
        assert any(name in str(found) for name in names)
    else:
        assert not isinstance(found, Exception), found
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, expected, strict=True))
        assert_close([t.nan_to_num() for t in found], [t.nan_to_num() for t in expected])


REPLAYED = {
    "plain", "[1, N, C]", "[1, N, 3, T, P, P]", "[N / 2, 2 C]", "[N C]", "fp64", "bf16", "uint8", "grid int32",
    "every other row",
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name", "capture"),
    [
        *((family, name, True) for family, (_, _, forms, _) in FAMILIES.items() for name in forms),
        *(("siglip", name, False) for name in FAMILIES["siglip"][2]),
    ],
)
def test_a_batch_is_taken_as_eager_takes_it(graphs_of, family, name, capture):
    _, run, forms, _ = FAMILIES[family]
    graphs, expected = graphs_of(family, capture), expected_of(family, name)
    before = counts(graphs)
    assert_same(tried(graphs.model, run, forms[name]), expected)
    if capture and not isinstance(expected, Exception):
        assert sum(counts(graphs)) == sum(before) + 1
        assert family not in ("qwen3-vl", "qwen2.5-vl") or name not in REPLAYED or counts(graphs)[0] == before[0] + 1
    before = counts(graphs)
    assert_same(tried(graphs.model, run, forms["plain"]), expected_of(family, "plain"))
    assert counts(graphs) == (before[0] + capture, before[1], before[2] + (not capture))


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3-vl", "one patch"), ("qwen2.5-vl", "grid [0, 2, 2] behind"), ("siglip", "as many patches")],
)
def test_unusual_batches_that_eager_takes_are_counted_and_planned_for_by_nobody(family, name):
    _, run, forms, _ = FAMILIES[family]
    with new_graphs(family, capture=False) as graphs:
        run(graphs.model, *forms[name])
        assert counts(graphs) == (0, 0, 0)
        graphs.capture()
        run(graphs.model, *forms[name])
        assert graphs.statistics().fallbacks == {"other_batch": 1}


def test_memory_that_runs_out_is_no_wrong_batch(monkeypatch):
    def full(*unused):
        raise torch.OutOfMemoryError("made to fail")

    with new_graphs("qwen3-vl") as graphs:
        monkeypatch.setattr(type(graphs.model), "fast_pos_embed_interpolate", full)
        with pytest.raises(torch.OutOfMemoryError, match="made to fail"):
            graphs.model(*FAMILIES["qwen3-vl"][2]["one patch"])


WIDTHS = {**{"qwen3-vl": PATCH, "qwen3-omni": OMNI_PATCH}, **dict.fromkeys(("qwen2.5-vl", "glm-4.5v"), WINDOW_PATCH)}
side = st.integers(-1, 6)
rows = st.lists(st.tuples(st.integers(-1, 3), side, side).map(list), max_size=3)


@settings(max_examples=100)
@given(st.sampled_from(sorted(WIDTHS)), rows, st.sampled_from([0, 0, 0, -4, -1, 1, 4]), st.booleans())
def test_any_batch_is_taken_as_eager_takes_it(graphs_of, family, rows, more, capture):
    _, run, _, _ = FAMILIES[family]
    grid = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    pixels = random(max(described(grid) + more, 0), WIDTHS[family])
    expected = tried(eager_tower(family), run, (pixels, grid))
    assert_same(tried(graphs_of(family, capture).model, run, (pixels, grid)), expected)
