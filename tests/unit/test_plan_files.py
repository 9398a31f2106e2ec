"""Files that a plan is made from."""

import pytest

from bridge_cg_plugin.cli.planner.documents import PlanError, read_documents

from .plan_inputs import write


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
