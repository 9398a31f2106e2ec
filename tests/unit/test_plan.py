"""The planner: files of lengths, packs, layouts, the best choice of bounds and buckets, the command."""

import json
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.attention_bounds import pack_buckets, refuse_pack
from bridge_cg_plugin.cli.answers import AnswerError
from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.cli.planner import command
from bridge_cg_plugin.cli.planner.command import LEFT_EAGER, Packing, RankLayout, plan_packs
from bridge_cg_plugin.cli.planner.documents import first_fit, padded_documents, padded_packs, read_documents
from bridge_cg_plugin.graphs.buckets import EXACT_BELOW

documents = st.lists(st.integers(1, 500), min_size=1, max_size=80)
packs = st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=40).map(tuple), min_size=1, max_size=30)


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def histogram(tmp_path):
    lengths = Counter(random.Random(0).choices([30, 100, 400, 900], [3, 9, 5, 1], k=2000))
    return str(write(tmp_path / "lengths.json", json.dumps(lengths)))


def test_the_command_prints_a_table_and_what_to_set(histogram, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # headings of a narrow table are in several lines
    assert main(["plan", "packed", histogram, "--pack-size", "2048"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("P50", "P90", "P99", "max", "on graphs", "eager because"))
    assert "model.cuda_graph_max_packed_seqs=" in out


LAYOUTS = [RankLayout(*sizes) for sizes in ((), (2, 1, True), (1, 2), (2, 4), (2, 2, True))]


@given(packs, st.sampled_from(LAYOUTS))
def test_the_smallest_bound_is_planned_that_leaves_few_packs_eager_and_what_a_rank_would_do_with_it(found, layout):
    padded = padded_packs([padded_documents(pack, layout.document_unit) for pack in found], layout.unit)
    plan = plan_packs(padded, layout)
    taken = 0
    for pack in padded:
        tokens = sum(pack)
        recorded = pack_buckets([tokens], plan.best.max_packed_seqs)
        refused = [refuse_pack(pack, tokens, EXACT_BELOW, b, layout.shards, layout.context) for b in recorded]
        taken += any(tokens <= b.tokens and why is None for b, why in zip(recorded, refused, strict=True))
    assert plan.best.on_graphs == pytest.approx(taken / len(padded))
    most = max(choice.on_graphs for choice in plan.choices)
    few = [choice for choice in plan.choices if choice.on_graphs >= most - LEFT_EAGER]
    assert plan.best == min(few, key=lambda choice: choice.max_packed_seqs)
    assert plan.sizes["documents"][-1] == max(map(len, padded)) and plan.packs == len(padded)


def test_a_microbatch_of_more_documents_than_there_are_is_refused(histogram, capsys, monkeypatch):
    monkeypatch.setattr(command, "packing_of", lambda *_: Packing(together=4000))
    assert main(["plan", "packed", histogram, "--recipe", "any"]) == 2
    assert "Cannot plan without packs" in capsys.readouterr().err


def test_packs_that_ranks_cannot_share_are_refused(capsys, tmp_path, monkeypatch):
    packed = write(tmp_path / "p.jsonl", json.dumps({"input_ids": list(range(11)), "seq_start_id": [0, 5]}))
    monkeypatch.setattr(command, "packing_of", lambda *_: Packing(RankLayout(1, 2)))
    assert main(["plan", "packed", str(packed), "--recipe", "any", "--json"]) == 2
    assert "shares multiples of 4. Pack again with pad_seq_to_mult=4" in capsys.readouterr().err


PACKED = "qwen3_8b_sft_config"


@pytest.mark.parametrize(
    ("recipe", "words", "layout", "documents", "longest"),
    [
        ("Qwen3_VL_8b_sft_config", [], "TP2xCP1", 2, 1800),  # two samples of a microbatch
        ("qwen3_vl_8b_sft_config", ["--pack-size", "2048"], "TP2xCP1", None, 2048),
        (PACKED, [], "TP4xCP1", None, 4096),
    ],
)
def test_a_plan_is_for_the_layout_and_the_packing_of_a_recipe(histogram, recipe, words, layout, documents, longest):
    given = ["plan", "packed", histogram, *([recipe.upper()] if words else ["--recipe", recipe]), "--json", *words]
    done = subprocess.run([sys.executable, "-m", "bridge_cg_plugin.cli.main", *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["layout"] == layout and found["sizes"]["tokens"][-1] <= longest
    assert documents is None or found["sizes"]["documents"] == [documents] * 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "Cannot pack without --pack-size"),
        (["--pack-size", "100"], "Raise it, or cut with --truncate"),
        (["--pack-size", "2048", "--field", "foo"], "Cannot use --field: the file has lengths without fields"),
        (["--truncate"], "Cannot use --truncate: packs have no size"),
    ],
)
def test_the_command_refuses(histogram, capsys, arguments, message):
    assert main(["plan", "packed", histogram, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_histogram_of_any_size_takes_seconds(tmp_path):
    lengths = read_documents(write(tmp_path / "l.json", '{"300": 300000000000, "100": 100000000000, "7": 0}')).lengths
    assert Counter(lengths) == {300: 150_000, 100: 50_000}


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
    with pytest.raises(AnswerError, match=message):
        read_documents(tmp_path / name)


@given(documents)
def test_first_fit_is_bridges(lengths):
    from megatron.bridge.data.packing import algorithms

    assert first_fit(lengths, 500) == [tuple(pack) for pack in algorithms.first_fit(lengths, 500)]


@given(packs, st.integers(1, 128))
def test_padding_is_a_document_of_its_own(found, multiple):
    for pack, padded in zip(found, padded_packs(found, multiple), strict=True):
        assert sum(padded) % multiple == 0 and 0 <= sum(padded) - sum(pack) < multiple
        assert padded[: len(pack)] == pack and len(padded) - len(pack) in (0, 1)
