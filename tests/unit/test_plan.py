"""The planner: layouts, vision, output, the command. Its inputs and packs have files of their own."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.cli.planner.documents import Image, padded_documents, padded_packs, read_documents, read_images
from bridge_cg_plugin.cli.planner.plan import percentiles, plan_packs
from bridge_cg_plugin.cli.planner.records import Costs, Ranks, of_language_model
from bridge_cg_plugin.graphs.planning.buckets import EXACT_BELOW
from bridge_cg_plugin.language.packed.fit import pack_buckets, refuse_pack
from bridge_cg_plugin.options.packed import parse_layout
from bridge_cg_plugin.recipes import GPUS
from tests.models.language_model import SHAPES, sizes_of

from .plan_inputs import COSTS, KNOWN_COUNTS, known_packs, packs, write


@pytest.fixture
def histogram(tmp_path):
    lengths = Counter(random.Random(0).choices([30, 100, 400, 900], [3, 9, 5, 1], k=2000))
    return str(write(tmp_path / "lengths.json", json.dumps(lengths)))


def test_the_command_prints_a_table_and_what_to_set(histogram, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # headings of a narrow table are in several lines
    assert main(["plan", "packed", histogram, "--pack-size", "2048"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("P50", "P90", "P99", "max", "on graphs", "GiB a slot", "measured:"))
    assert "model.cuda_graph_max_packed_seqs=" in out and "model.cuda_graph_packed_buckets=[" in out


LAYOUTS = ("TP1xCP1", "TP2xCP1xSP", "TP1xCP2", "TP2xCP4", "TP2xCP2xSP")


@pytest.mark.parametrize("written", LAYOUTS)
def test_a_plan_is_for_a_layout(histogram, capsys, written):
    from bridge_cg_plugin.options import graph_options

    layout = parse_layout("--layout", written)
    words = ["plan", "packed", histogram, "--pack-size", "2048", "--layout", written, "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == written == str(layout)
    assert all(tokens % layout.unit == 0 for tokens in found["best"]["buckets"])
    assert all(value % layout.document_unit == 0 for value in found["longest"].values())
    ranks = {
        "tensor_model_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.sequence,
    }
    planned = {"cuda_graph_impl": "transformer_engine", **found["set"]}
    assert graph_options(planned, ranks).packed.buckets == tuple(found["best"]["buckets"])


@given(packs, st.sampled_from(LAYOUTS), st.integers(1, 40))
def test_what_is_planned_is_what_a_rank_would_do(found, written, bound):
    layout = parse_layout("--layout", written)
    padded = padded_packs([padded_documents(pack, layout.document_unit) for pack in found], layout.unit)
    plan = plan_packs(padded, COSTS, layout=layout)
    recorded = pack_buckets(plan.best.buckets, plan.best.max_packed_seqs)
    taken = 0
    for pack in padded:
        tokens = sum(pack)
        refused = [refuse_pack(pack, tokens, EXACT_BELOW, b, layout.shards, layout.context) for b in recorded]
        taken += any(tokens <= b.tokens and why is None for b, why in zip(recorded, refused, strict=True))
    assert plan.best.expected.on_graphs == pytest.approx(taken / len(padded))


def test_a_layout_and_what_contradicts_it(histogram, capsys, tmp_path):
    words = ["plan", "packed", histogram, "--pack-size", "2048", "--layout"]
    for more, said in (
        (["CP2"], "Cannot use --layout CP2: it must be TP1xCP1, or another layout"),
        (["TP0xCP1"], "Cannot use --layout TP0xCP1"),
        (["TP1xCP2", "--pad-seq-to-mult", "6"], "--pad-seq-to-mult 6: TP1xCP2 needs a multiple of 4"),
        (["TP1xCP1", "--recipe", "no_such_recipe"], "no_such_recipe"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    packed = write(tmp_path / "p.jsonl", json.dumps({"input_ids": list(range(11)), "seq_start_id": [0, 5]}))
    assert main(["plan", "packed", str(packed), "--layout", "TP1xCP2", "--json"]) == 2
    assert "shares multiples of 4. Pack again with pad_seq_to_mult=4" in capsys.readouterr().err


def plan_of_a_recipe(histogram, name, *words):
    import subprocess
    import sys

    given = ["plan", "packed", histogram, "--pack-size", "2048", "--recipe", name, *words]
    code = f"from bridge_cg_plugin.cli.main import main; raise SystemExit(main({given!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_plan_is_for_the_model_and_the_layout_of_a_recipe(histogram):
    done = plan_of_a_recipe(histogram, "qwen3_vl_8b_vision_graphs_h200_sft_config", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["layout"] == "TP2xCP1"
    assert found["origin"].endswith("; no record is of 36 attention, 36 MLP layers of 4096")
    small = json.loads(
        plan_of_a_recipe(histogram, "qwen3_vl_small_vision_graphs_pretrain_mock_config", "--json").stdout
    )
    assert small["layout"] == "TP1xCP1" and small["best"]["buckets"] == found["best"]["buckets"]


@pytest.mark.parametrize(
    ("tokens", "model"), [(4096, "dense"), (8192, "dense"), (4096, "moe"), (4096, "mamba")], ids=str
)
def test_the_known_distribution(tokens, model):
    packs, sizes = known_packs(tokens), sizes_of(SHAPES[model])
    plan = plan_packs(packs, Costs(of_language_model(sizes, Ranks())[0], str(sizes)))
    assert plan.documents == percentiles(len(pack) for pack in packs)
    found = (plan.documents.p50, plan.documents.p90, plan.documents.p99)
    assert found == tuple(pytest.approx(dict(KNOWN_COUNTS)[share], rel=0.02) for share in (0.5, 0.9, 0.99))
    shares = {choice.max_packed_seqs: choice.expected.on_graphs for choice in plan.choices}
    assert shares[64] == pytest.approx(0.96, abs=0.002) and shares[plan.documents.p99] == pytest.approx(0.99, abs=0.002)
    for choice in plan.choices:
        beyond = sum(len(pack) > choice.max_packed_seqs for pack in packs) / len(packs)
        assert choice.expected.on_graphs == pytest.approx(1 - beyond)
        assert plan.best.expected.cost <= choice.expected.cost * 1.02
    assert plan.best.expected.ratios[1] < 1


def test_the_command_plans_vision(tmp_path, capsys):
    from bridge_cg_plugin.options import graph_options

    file = write(tmp_path / "a.json", '{"448x448": 4}')
    assert main(["plan", "vision", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert graph_options({"vision_cuda_graph_impl": "transformer_engine", **found["set"]}).vision.buckets
    assert main(["plan", "vision", str(file)]) == 0
    assert "model.vision_cuda_graph_buckets=[" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "Cannot pack without --pack-size"),
        (["--pack-size", "100"], "Raise it, or cut with --truncate"),
        (
            ["--pack-size", "2050", "--pad-seq-to-mult", "4"],
            "--pack-size 2050: it must be a multiple of --pad-seq-to-mult 4",
        ),
        (["--packing", "in_batch", "--micro-batch-size", "4000"], "Cannot plan without packs"),
        (["--pack-size", "2048", "--field", "foo"], "Cannot use --field: the file has lengths without fields"),
        (
            ["--pack-size", "2048", "--micro-batch-size", "2"],
            "Cannot use --micro-batch-size: only --packing in_batch",
        ),
        (["--packing", "in_batch", "--truncate"], "Cannot use --truncate: there is no"),
        (["--pack-size", "2048", "--max-memory-gb", "nan"], "--max-memory-gb nan: it must be a number"),
    ],
)
def test_the_command_refuses(histogram, capsys, arguments, message):
    assert main(["plan", "packed", histogram, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_planning_imports_neither_torch_nor_megatron(histogram):
    import subprocess
    import sys

    code = f"""
import sys
from bridge_cg_plugin.cli.main import main
main(["plan", "packed", {histogram!r}, "--pack-size", "2048", "--json"])
print([name for name in ("torch", "megatron") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("words", [["--pack-size", "8"], ["--packing", "first_fit"], ["--truncate"], ["--field", "x"]])
def test_packs_are_not_packed_again(tmp_path, capsys, words):
    file = write(tmp_path / "packs.jsonl", '{"input_ids": [1, 2, 3, 4], "seq_start_id": [0, 2]}')
    assert main(["plan", "packed", str(file), *words]) == 2
    assert f"Cannot use {words[0]}: the file holds packs" in capsys.readouterr().err


def test_a_histogram_of_any_size_takes_seconds(tmp_path):
    images = read_images(write(tmp_path / "i.json", '{"640x480": 100000000000, "64x64": 3}'))
    assert len(images) <= 200_001 and set(images) == {Image(640, 480), Image(64, 64)}
    lengths = read_documents(write(tmp_path / "l.json", '{"300": 300000000000, "100": 100000000000, "7": 0}')).lengths
    assert Counter(lengths) == {300: 150_000, 100: 50_000}


def test_a_field_that_no_row_has_names_the_nearest(tmp_path, capsys):
    file = str(write(tmp_path / "a.jsonl", '{"n_tokens": 3, "text": "a"}'))
    assert main(["plan", "packed", file, "--pack-size", "64", "--field", "ntokens"]) == 2
    said = capsys.readouterr().err
    assert f"Cannot use --field ntokens: {file}, row 0 has no such field. Did you mean n_tokens?" in said
    assert main(["plan", "packed", file, "--pack-size", "64", "--field", "foo"]) == 2
    assert "has no such field. It has n_tokens, text." in capsys.readouterr().err


def test_too_little_memory_names_the_least_that_works(tmp_path, capsys):
    file = str(write(tmp_path / "a.json", '{"2048x2048": 40}'))
    assert main(["plan", "vision", file, "--max-memory-gb", "1"]) == 2
    said = capsys.readouterr().err
    least = said.split("it must be at least ")[1].split(",")[0]
    assert main(["plan", "vision", file, "--json", "--max-memory-gb", least]) == 0


LARGE = '{"448x448": 40, "1024x768": 20, "2048x2048": 10}'


@pytest.mark.parametrize("gpu, largest", [("h100", 3072), ("h200", 16_384), ("b200", 16_384)])
def test_buckets_keep_within_the_limit_of_a_gpu(tmp_path, capsys, gpu, largest):
    file = str(write(tmp_path / "a.json", LARGE))
    assert main(["plan", "vision", file, "--gpu", gpu, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["buckets"][-1] == largest and plan["gpu"] == gpu
    assert plan["expected"]["on_graphs"] == (1 if largest == 16_384 else 60 / 70)
    assert main(["plan", "vision", file, "--gpu", gpu]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"--gpu {gpu}: buckets of up to {GPUS[gpu]} patches, as with --graphs {gpu}" in said
    assert (f"The records are not of {gpu}" in said) == (gpu != "h200")
