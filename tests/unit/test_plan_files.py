"""Files that a plan is made from: lengths of documents, costs, sizes of images."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridge_cg_plugin.cli.planner.documents import QWEN3_VL, Image, PlanError, Processor, read_documents, read_images
from bridge_cg_plugin.cli.planner.plan import plan_images

from .plan_inputs import IMAGE_COSTS, write


def test_lengths_from_every_kind_of_file(tmp_path):
    pyarrow, ipc, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"))
    expected = (3, 5, 5)
    table = pyarrow.table({"input_ids": [[1] * 3, [1] * 5, [1] * 5], "text": ["a", "b", "c"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    for name, opener in (("file.arrow", ipc.new_file), ("stream.arrow", ipc.new_stream)):
        with opener(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    folder = tmp_path / "folder"
    folder.mkdir()
    parquet.write_table(table.slice(0, 1), folder / "0.parquet")
    parquet.write_table(table.slice(1), folder / "1.parquet")
    files = [
        write(tmp_path / "h.json", '{"3": 1, "5": 2}'),
        write(tmp_path / "l.json", "[3, 5, 5]"),
        write(tmp_path / "a.jsonl", '{"length": 3}\n\n{"input_ids": [1, 2, 3, 4, 5]}\n5\n'),
        *(tmp_path / name for name in ("a.parquet", "file.arrow", "stream.arrow", "folder")),
    ]
    for file in files:
        assert read_documents(file).lengths == expected, file
    assert read_documents(write(tmp_path / "b.jsonl", '{"n": 7}'), "n").lengths == (7,)


def test_bridges_packed_files(tmp_path):
    numpy, pyarrow, parquet = (pytest.importorskip(name) for name in ("numpy", "pyarrow", "pyarrow.parquet"))
    rows = [{"input_ids": [1] * 9, "seq_start_id": [0, 4], "loss_mask": [1] * 9}]
    numpy.save(tmp_path / "a.npy", numpy.array(rows, dtype=object), allow_pickle=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.npy", "a.parquet"):
        assert read_documents(tmp_path / name).packs == ((3, 4),), name


BAD_FILES = {
    "missing.json": (None, "does not exist"),
    "a.txt": ("3", r"it must be \.json"),
    "broken.json": ("{", "^Cannot read"),
    "a.json": ('{"x": 3}', "whole numbers"),
    "c.json": ("[]", "no documents"),
    "e.json": ("[3, 0]", "row 1: 0 must be"),
    "a.jsonl": ('{"words": 3}', "row 0: it must have a field of length.*and has words. Use --field"),
    "b.jsonl": ('{"length": 3}\n{"input_ids": [1, 2], "seq_start_id": [0]}', "packs and single documents"),
    "c.jsonl": ('{"input_ids": [1, 2], "seq_start_id": [0, 5]}', "must ascend to its 2 tokens"),
    "f.jsonl": ('{"seq_start_id": [0]}', "row 0: seq_start_id must list whole numbers, beside input_ids"),
    "bad.parquet": ("no parquet", "^Cannot read"),
    "empty.npy": ("", "^Cannot read .*empty.npy: No data left in file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_planned_from(tmp_path, name):
    text, message = BAD_FILES[name]
    if text is not None:
        write(tmp_path / name, text)
    with pytest.raises(PlanError, match=message):
        read_documents(tmp_path / name)


@given(
    st.integers(16, 5000),
    st.integers(16, 5000),
    st.integers(1, 9),
    st.sampled_from([QWEN3_VL, Processor(patch=14, min_pixels=200_704, max_pixels=1_003_520)]),
)
def test_image_sizes_are_the_processors(width, height, frames, of):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    assume(max(width, height) / min(width, height) <= 200)
    resized = smart_resize(height, width, factor=of.unit, min_pixels=of.min_pixels, max_pixels=of.max_pixels)
    patches = resized[0] // of.patch * (resized[1] // of.patch)
    assert Image(width, height, frames).segments(of) == (patches,) * -(-frames // 2)


def test_vision_buckets_from_a_histogram(tmp_path):
    images = read_images(write(tmp_path / "a.json", '{"448x448": 40, "2048x2048": 2, "640x480x8": 4}'))
    assert len(images) == 46 and Image(640, 480, 8) in images
    assert read_images(write(tmp_path / "a.jsonl", '{"width": 9, "height": 8}')) == [Image(9, 8)]
    plan = plan_images(images, IMAGE_COSTS, 2)
    assert plan.microbatches == 23 and plan.expected.on_graphs == 1 and plan.expected.ratios[1] < 1
    assert plan.buckets[-1] >= plan.tokens.max >= 784


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.json", '{"448": 2}', "WIDTHxHEIGHT"),
        ("a.json", "{}", "no images"),
        ("a.jsonl", '{"width": 3}', "row 0"),
        ("a.jsonl", "3", "row 0"),
        ("a.csv", "", r"it must be \.json, \.jsonl"),
    ],
)
def test_image_files_that_cannot_be_planned_from(tmp_path, name, text, message):
    with pytest.raises(PlanError, match=message):
        read_images(write(tmp_path / name, text))
