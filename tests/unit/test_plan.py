"""The planner: reading lengths, packing, the cost model, choices, output, the command."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridge_cg_plugin.attention_bounds import SIDE_STREAM_UP_TO
from bridge_cg_plugin.graphs.buckets import EXACT_BELOW, Bucket
from bridge_cg_plugin.language.packed.fit import pack_buckets, refuse_pack
from bridge_cg_plugin.options.layout import parse_layout
from bridge_cg_tools.benchmarks.models.language_model import SHAPES, sizes_of
from bridge_cg_tools.benchmarks.models.workloads import CASES, one_image
from bridge_cg_tools.benchmarks.packed.plans import KNOWN_COUNTS, known_packs
from bridge_cg_tools.benchmarks.pages.markdown import by_case
from bridge_cg_tools.benchmarks.pages.performance_page import by_default
from bridge_cg_tools.benchmarks.records.results import ROOT, read_records
from bridge_cg_tools.cli import main
from bridge_cg_tools.planner.cost import load_cost_model, save_cost_model
from bridge_cg_tools.planner.defaults import DEFAULTS, VISION_EXACT, VISION_EXACT_FIT, VISION_FIT, default_packed
from bridge_cg_tools.planner.errors import PlanError
from bridge_cg_tools.planner.images import Image, plan_images, read_images
from bridge_cg_tools.planner.lengths import read_documents
from bridge_cg_tools.planner.packing import (
    first_fit,
    first_fit_decreasing,
    first_fit_shuffle,
    in_batch,
    padded_documents,
    padded_packs,
)
from bridge_cg_tools.planner.plan import BUCKET_COUNTS, expect, percentiles, plan_packs
from bridge_cg_tools.planner.rates import language_model_rates, scaled
from bridge_cg_tools.planner.shapes import Ranks

COST = DEFAULTS["packed"]
documents = st.lists(st.integers(1, 500), min_size=1, max_size=80)
packs = st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=40).map(tuple), min_size=1, max_size=30)


@given(documents)
def test_first_fit_is_bridges(lengths):
    from megatron.bridge.data.packing import algorithms

    assert first_fit(lengths, 500) == [tuple(pack) for pack in algorithms.first_fit(lengths, 500)]
    assert first_fit_decreasing(lengths, 500) == [tuple(p) for p in algorithms.first_fit_decreasing(lengths, 500)]


@given(documents, st.integers(500, 2000))
def test_every_document_is_in_one_pack_that_has_room(lengths, size):
    for found in (first_fit(lengths, size), first_fit_shuffle(lengths, size)):
        assert Counter(n for pack in found for n in pack) == Counter(lengths)
        assert all(0 < sum(pack) <= size for pack in found)


@given(documents, st.integers(1, 9))
def test_in_batch_packing_joins_a_microbatch(lengths, count):
    found = in_batch(lengths, count)
    assert len(found) == len(lengths) // count and all(len(pack) == count for pack in found)
    assert not Counter(n for pack in found for n in pack) - Counter(lengths)


def test_a_document_above_the_pack_is_refused():
    with pytest.raises(PlanError, match="a document has 12 tokens, more than --pack-size 10"):
        first_fit([3, 12], 10)


@given(packs, st.integers(1, 128))
def test_padding_is_a_document_of_its_own(found, multiple):
    for pack, padded in zip(found, padded_packs(found, multiple), strict=True):
        assert sum(padded) % multiple == 0 and 0 <= sum(padded) - sum(pack) < multiple
        assert padded[: len(pack)] == pack and len(padded) - len(pack) in (0, 1)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=300))
def test_percentiles_are_values_that_so_many_do_not_exceed(values):
    found = percentiles(values)
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99), (1.0, found.max)):
        assert value in values
        assert sum(v <= value for v in values) >= share * len(values)
        assert sum(v < value for v in values) < share * len(values)


@given(packs, st.integers(1, 50))
def test_a_choice_accounts_for_every_pack(found, bound):
    tokens = max(map(sum, found))
    choice = expect(Counter(found), COST, bound, (tokens,))
    eager = sum(count for _, count in choice.fallbacks)
    assert choice.on_graphs == pytest.approx(1 - eager / len(found))
    many = sum(len(pack) > bound for pack in found)
    assert dict(choice.fallbacks).get("too_many_documents", 0) <= many <= eager
    assert 0 <= choice.padding < 1


@given(packs)
def test_the_best_choice_is_the_best_of_all_that_were_looked_at(found):
    plan = plan_packs(found, COST)
    assert plan.best in plan.choices
    assert plan.best.step_ms <= min(choice.step_ms for choice in plan.choices) * 1.001
    assert [c.max_packed_seqs for c in plan.choices] == sorted({c.max_packed_seqs for c in plan.choices})
    assert plan.documents.max == max(map(len, found)) and plan.packs == len(found)


@given(packs)
def test_packs_are_never_planned_slower_than_eager_where_graphs_cost_nothing_more(found):
    free = replace(COST, replay_ms=0.0, per_token_ms=0.0, per_row_ms=0.0)
    plan = plan_packs(found, free)
    assert plan.best.step_ms <= plan.eager_ms + 1e-9


@given(packs, st.integers(1, 20))
def test_a_larger_bound_never_loses_packs(found, bound):
    buckets = (max(map(sum, found)),)
    less, more = (expect(Counter(found), COST, n, buckets) for n in (bound, bound + 7))
    assert more.on_graphs >= less.on_graphs


def test_scanning_speaks_against_a_bound_for_one_pack_in_a_thousand():
    """999 packs of 8 documents, and one of 2000: graphs for that one would make all of them scan for more."""
    usual = [(512,) * 8] * 999
    plan = plan_packs([*usual, (2,) * 2000], replace(COST, per_row_ms=3000.0, host_per_segment_ms=0.4))
    assert plan.best.max_packed_seqs < 2000 and dict(plan.best.fallbacks) == {"too_many_documents": 1}


def test_small_packs_have_buckets_of_their_size():
    plan = plan_packs([(100,), (101,), (3000,)], COST)
    assert plan.best.on_graphs == 1 and {100, 101} <= set(plan.best.buckets) and EXACT_BELOW >= 101


def test_memory_limits_the_buckets():
    with pytest.raises(PlanError, match=r"--max-memory-gb 0\.1: it must be at least"):
        plan_packs([(4000,)], COST, 0.1)
    assert plan_packs([(4000,)], COST, 100.0).best.memory_gb <= 100


def test_nothing_to_plan_from():
    with pytest.raises(PlanError, match="no packs"):
        plan_packs([], COST)


def test_the_packed_default_is_the_benchmarks_dense_model():
    """16 layers of 2048: packs of 5 documents, eager and on graphs."""
    errors = language_model_rates().errors["dense"]
    records = read_records(ROOT / "docs/benchmarks/packed.jsonl")
    modes = {(r["tokens"], r["mode"]): r for r in records if r["case"].startswith("dense_")}
    for tokens in (2048, 4096, 8192):
        lengths, graphs = (tokens // 5,) * 5, modes[tokens, "plugin"]
        assert COST.eager_ms(lengths) == pytest.approx(modes[tokens, "eager"]["ms"], rel=errors.eager)
        assert COST.graph_ms(tokens, lengths, 5, max(lengths)) == pytest.approx(graphs["ms"], rel=errors.graphs)
        assert COST.memory_gb(tokens) == pytest.approx(graphs["memory_gb"], rel=errors.memory)


def by_default_records():
    """Yield (frames, eager, on graphs) of all records with default options: the cases, and larger single images."""
    records = read_records(ROOT / VISION_FIT.file)
    cases = [r for r in records if r["case"] in CASES]
    sweep = [r for r in records if r["case"].startswith("tokens_") and r["tokens"] > SIDE_STREAM_UP_TO]
    return [*beside_eager(cases, by_default(cases)), *beside_eager(sweep, by_case(sweep, "plugin_fast").values())]


def exact_records():
    """Yield the same of all records with exact kernels; eager of one of them waited longer for the host."""
    records = [r for r in read_records(ROOT / VISION_FIT.file) if r["tokens"] >= VISION_FIT.tokens[0]]
    return beside_eager(records, [r for r in by_case(records, "plugin").values() if r["case"] != "tokens_1024"])


def beside_eager(records, graphs):
    eager = by_case(records, "eager")
    for r in graphs:
        grid = CASES.get(r["case"]) or one_image(r["tokens"])
        yield [h * w for count, h, w in grid for _ in range(count)], eager[r["case"]], r


@pytest.mark.parametrize(
    "cost, fit, found, count",
    [(DEFAULTS["vision"], VISION_FIT, by_default_records, 8), (VISION_EXACT, VISION_EXACT_FIT, exact_records, 10)],
    ids=["default", "exact"],
)
def test_the_vision_defaults_are_the_benchmarks(cost, fit, found, count):
    records = list(found())
    for frames, eager, graphs in records:
        tokens, case = sum(frames), graphs["case"]
        eager_ms, graphs_ms = cost.eager_ms(frames), cost.graph_ms(tokens, frames, len(frames), max(frames))
        assert eager_ms == pytest.approx(eager["ms"], rel=fit.eager), case
        assert graphs_ms == pytest.approx(graphs["ms"], rel=fit.graphs), case
        assert graphs_ms / eager_ms == pytest.approx(graphs["ms"] / eager["ms"], rel=fit.ratio), case
        assert cost.memory_gb(tokens) == pytest.approx(graphs["memory_gb"], rel=fit.memory), case
        assert tokens == graphs["tokens"] and {eager["gpu"], graphs["gpu"]} == {fit.gpu}
    assert len(records) == count
    sizes = [r["tokens"] for _, _, r in records]
    assert fit.tokens == (min(sizes), max(sizes))
    assert fit.date == max(r["date"] for pair in records for r in pair[1:])


def test_a_limit_of_memory_holds_the_tokens_that_fit_it():
    cost = DEFAULTS["vision"]
    tokens = cost.tokens_within(8.0)
    assert cost.memory_gb(tokens) <= 8.0 < cost.memory_gb(tokens + 1)
    assert cost.tokens_within(0.01) == 0


def write(path, text):
    path.write_text(text)
    return path


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
        write(tmp_path / "h.json", '{"5": 2, "3": 1}'),
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
    "broken.json": ("{", "cannot be read"),
    "a.json": ('{"x": 3}', "whole numbers"),
    "b.json": ('{"3": -1}', "below 0"),
    "c.json": ("[]", "no documents"),
    "d.json": ("7", "a histogram"),
    "e.json": ("[3, 0]", "row 1: 0: it must be"),
    "f.json": ("[true]", "row 0: True: it must be"),
    "a.jsonl": ('{"words": 3}', "row 0: it must have a field of length.*found words; use --field"),
    "b.jsonl": ('{"length": 3}\n{"input_ids": [1, 2], "seq_start_id": [0]}', "packs and single documents"),
    "c.jsonl": ('{"input_ids": [1, 2], "seq_start_id": [0, 5]}', "the starts must ascend"),
    "bad.parquet": ("no parquet", "cannot be read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_planned_from(tmp_path, name):
    text, message = BAD_FILES[name]
    if text is not None:
        write(tmp_path / name, text)
    with pytest.raises(PlanError, match=message):
        read_documents(tmp_path / name)


def test_cost_models_are_kept_as_json(tmp_path):
    path, changed = tmp_path / "cost.json", replace(COST, host_ms=12.5, origin="here")
    save_cost_model(path, "packed", changed)
    save_cost_model(path, "vision", DEFAULTS["vision"])
    assert load_cost_model(path, "packed") == changed
    assert load_cost_model(path, "vision") == DEFAULTS["vision"]


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "it must be a JSON file"),
        ("[]", "has no 'packed'"),
        ('{"packed": {"origin": "x"}}', "fixed_ms.* missing"),
        ("bad", "it must be a JSON file"),
    ],
)
def test_a_bad_cost_model(tmp_path, text, message):
    path = tmp_path / "cost.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_cost_model(path, "packed")


def test_a_cost_below_zero_is_refused(tmp_path):
    path = tmp_path / "cost.json"
    save_cost_model(path, "packed", replace(COST, host_ms=-1.0))
    with pytest.raises(PlanError, match=r"host_ms=-1\.0: it must be a number of at least 0"):
        load_cost_model(path, "packed")


@given(st.integers(16, 5000), st.integers(16, 5000), st.integers(1, 9))
def test_image_sizes_are_the_processors(width, height, frames):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    assume(max(width, height) / min(width, height) <= 200)
    resized = smart_resize(height, width, factor=32, min_pixels=65_536, max_pixels=16_777_216)
    assert Image(width, height, frames).segments() == (resized[0] // 16 * (resized[1] // 16),) * -(-frames // 2)


def test_vision_buckets_from_a_histogram(tmp_path):
    images = read_images(write(tmp_path / "a.json", '{"448x448": 40, "2048x2048": 2, "640x480x8": 4}'))
    assert len(images) == 46 and Image(640, 480, 8) in images
    assert read_images(write(tmp_path / "a.jsonl", '{"width": 9, "height": 8}')) == [Image(9, 8)]
    plan = plan_images(images, DEFAULTS["vision"], 2)
    assert plan.microbatches == 23 and plan.on_graphs == 1 and plan.step_ms < plan.eager_ms
    assert plan.buckets[-1] >= plan.tokens.max >= 784


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.json", '{"448": 2}', "WIDTHxHEIGHT"),
        ("a.json", '{"4x4": "x"}', "a whole number"),
        ("a.json", "[]", "a histogram"),
        ("a.json", "{}", "no images"),
        ("a.jsonl", '{"width": 3}', "row 0"),
        ("a.jsonl", "3", "row 0"),
        ("a.csv", "", r"\.json or \.jsonl"),
    ],
)
def test_image_files_that_cannot_be_planned_from(tmp_path, name, text, message):
    with pytest.raises(PlanError, match=message):
        read_images(write(tmp_path / name, text))


def test_more_images_a_microbatch_than_there_are():
    with pytest.raises(PlanError, match="it must be 1 to the dataset's 1"):
        plan_images([Image(448, 448)], DEFAULTS["vision"], 2)


@pytest.fixture
def histogram(tmp_path):
    lengths = Counter(random.Random(0).choices([30, 100, 400, 900], [3, 9, 5, 1], k=2000))
    return str(write(tmp_path / "lengths.json", json.dumps(lengths)))


def test_the_command_prints_a_table_and_what_to_set(histogram, capsys):
    pytest.importorskip("rich")
    assert main(["plan", "packed", histogram, "--pack-size", "2048"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("P50", "P90", "P99", "max", "on graphs", "GiB a slot", "cost model:"))
    assert "model.cuda_graph_max_packed_seqs=" in out and "model.cuda_graph_packed_buckets=[" in out


def test_what_the_command_recommends_is_accepted(histogram, capsys):
    from bridge_cg_plugin.options import graph_options

    assert main(["plan", "packed", histogram, "--pack-size", "2048", "--pad-to-multiple", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    options = graph_options({"cuda_graph_impl": "transformer_engine", **found["set"]}).packed
    assert options.max_packed_seqs == found["best"]["max_packed_seqs"] and all(b % 64 == 0 for b in options.buckets)


def test_documents_are_padded_where_ranks_share_them(histogram, capsys):
    """As Bridge pads them for context parallelism: every document, not the pack alone."""
    words = ["plan", "packed", histogram, "--packing", "in_batch", "--micro-batch-size", "5", "--json"]
    tokens = []
    for more in ([], ["--pad-seq-to-mult", "64"]):
        assert main([*words, *more]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["tokens"])
    assert all(value % 64 == 0 for value in tokens[1].values())
    assert all(plain <= tokens[1][name] <= plain + 5 * 63 for name, plain in tokens[0].items())


LAYOUTS = ("TP1xCP1", "TP2xCP1xSP", "TP1xCP2", "TP2xCP4", "TP2xCP2xSP")


@pytest.mark.parametrize("written", LAYOUTS)
def test_a_plan_is_for_a_layout(histogram, capsys, written):
    from bridge_cg_plugin.options import OptionError, graph_options

    layout = parse_layout("--layout", written)
    words = ["plan", "packed", histogram, "--pack-size", "2048", "--layout", written, "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == found["set"]["cuda_graph_packed_tuning.planned_for"] == written == str(layout)
    assert all(tokens % layout.unit == 0 for tokens in found["best"]["buckets"])
    assert all(value % layout.document_unit == 0 for value in found["longest"].values())
    ranks = {
        "tensor_model_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.sequence,
    }
    planned = {"cuda_graph_impl": "transformer_engine", **found["set"]}
    assert graph_options(planned, ranks).packed.planned_for == written
    other = ranks | {"context_parallel_size": 8}
    with pytest.raises(OptionError, match=rf"planned_for='{written}': it must be TP\d+xCP8\w*, the run's layout"):
        graph_options(planned, other)


@given(packs, st.sampled_from(LAYOUTS), st.integers(1, 40))
def test_what_is_planned_is_what_a_rank_would_do(found, written, bound):
    layout = parse_layout("--layout", written)
    padded = padded_packs([padded_documents(pack, layout.document_unit) for pack in found], layout.unit)
    plan = plan_packs(padded, COST, layout=layout)
    recorded = pack_buckets(plan.best.buckets, plan.best.max_packed_seqs)
    taken = 0
    for pack in padded:
        tokens = sum(pack)
        refused = [refuse_pack(pack, tokens, EXACT_BELOW, b, layout.shards, layout.context) for b in recorded]
        taken += any(tokens <= b.tokens and why is None for b, why in zip(recorded, refused, strict=True))
    assert plan.best.on_graphs == pytest.approx(taken / len(padded))


def test_a_layout_and_what_contradicts_it(histogram, capsys, tmp_path):
    words = ["plan", "packed", histogram, "--pack-size", "2048", "--layout"]
    for more, said in (
        (["CP2"], "Cannot use --layout='CP2': it must be TP1xCP1, or another layout"),
        (["TP0xCP1"], "Cannot use --layout='TP0xCP1'"),
        (["TP1xCP2", "--pad-seq-to-mult", "6"], "--pad-seq-to-mult 6: TP1xCP2 needs a multiple of 4"),
        (["TP1xCP1", "--recipe", "no_such_recipe"], "no_such_recipe"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    packed = write(tmp_path / "p.jsonl", json.dumps({"input_ids": list(range(11)), "seq_start_id": [0, 5]}))
    assert main(["plan", "packed", str(packed), "--layout", "TP1xCP2", "--json"]) == 2
    assert "shares multiples of 4: pack again with pad_seq_to_mult=4" in capsys.readouterr().err


def plan_of_a_recipe(histogram, name, *words):
    import subprocess
    import sys

    given = ["plan", "packed", histogram, "--pack-size", "2048", "--recipe", name, *words]
    code = f"from bridge_cg_tools.cli import main; raise SystemExit(main({given!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_plan_is_for_the_model_and_the_layout_of_a_recipe(histogram):
    done = plan_of_a_recipe(histogram, "qwen3_vl_8b_vision_graphs_h200_sft_config", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["layout"] == "TP2xCP1"
    assert found["origin"].startswith("36 attention, 36 MLP layers of 4096 by rates of docs/benchmarks/packed.jsonl")
    small = json.loads(
        plan_of_a_recipe(histogram, "qwen3_vl_small_vision_graphs_pretrain_mock_config", "--json").stdout
    )
    assert small["layout"] == "TP1xCP1" and small["best"]["step_ms"] < found["best"]["step_ms"]


def test_a_plan_of_a_recipe_is_printed_and_drawn(histogram, tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    words = ["--plot", str(tmp_path / "plan.png")]
    done = plan_of_a_recipe(histogram, "qwen3_vl_30b_a3b_vision_graphs_h200_sft_config", *words)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "48 attention, 48 128-expert layers of 2048" in said
    assert "extrapolated: model.expert_model_parallel_size=8 was not measured" in said
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_recipe_of_unknown_sizes_is_planned_for_with_a_measured_file_only(histogram, tmp_path):
    name = "qwen35_vl_9b_vision_graphs_h200_sft_config"
    done = plan_of_a_recipe(histogram, name, "--json")
    assert done.returncode == 2 and f"Cannot forecast --recipe {name}: linear attention was not measured" in done.stderr
    assert "--cost-model" in done.stderr and "--layout TP4xCP1" in done.stderr
    path = tmp_path / "costs.json"
    save_cost_model(path, "packed", COST)
    assert plan_of_a_recipe(histogram, name, "--cost-model", str(path), "--json").returncode == 0


@given(documents, st.integers(1, 64))
def test_padded_documents_are_the_next_multiple(lengths, multiple):
    for length, padded in zip(lengths, padded_documents(lengths, multiple), strict=True):
        assert padded % multiple == 0 and length <= padded < length + multiple


@pytest.mark.parametrize(
    ("tokens", "model"), [(4096, "dense"), (8192, "dense"), (4096, "moe"), (4096, "mamba")], ids=str
)
def test_the_known_distribution(tokens, model):
    packs = known_packs(tokens)
    plan = plan_packs(packs, scaled(sizes_of(SHAPES[model]), Ranks(), language_model_rates()))
    assert plan.documents == percentiles(len(pack) for pack in packs)
    found = (plan.documents.p50, plan.documents.p90, plan.documents.p99)
    assert found == tuple(pytest.approx(dict(KNOWN_COUNTS)[share], rel=0.02) for share in (0.5, 0.9, 0.99))
    shares = {choice.max_packed_seqs: choice.on_graphs for choice in plan.choices}
    assert shares[64] == pytest.approx(0.96, abs=0.002) and shares[plan.documents.p99] == pytest.approx(0.99, abs=0.002)
    for choice in plan.choices:
        beyond = sum(len(pack) > choice.max_packed_seqs for pack in packs) / len(packs)
        assert choice.on_graphs == pytest.approx(1 - beyond)
        assert plan.best.step_ms <= choice.step_ms * 1.02
    assert plan.best.step_ms < plan.eager_ms


@pytest.mark.parametrize("written", ["TP1xCP2", "TP2xCP1xSP", "TP2xCP4"])
def test_the_known_distribution_over_ranks(written):
    """Documents get longer by padding, never more; capacities and documents can be shared."""
    layout = parse_layout("--layout", written)
    plain = known_packs(4096, 500)
    padded = padded_packs([padded_documents(pack, layout.document_unit) for pack in plain], layout.unit)
    plan = plan_packs(padded, default_packed(layout), layout=layout)
    assert plan.documents.p50 == 12 and plan.layout == written
    assert all(tokens % layout.unit == 0 for tokens in plan.best.buckets)
    assert plan.longest.max % layout.document_unit == 0
    assert plan.best.step_ms == min(choice.step_ms for choice in plan.choices) or plan.best.step_ms < plan.eager_ms


def test_the_command_plans_vision(tmp_path, capsys):
    from bridge_cg_plugin.options import graph_options

    file = write(tmp_path / "a.json", '{"448x448": 4}')
    assert main(["plan", "vision", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert graph_options({"vision_cuda_graph_impl": "transformer_engine", **found["set"]}).vision.buckets
    pytest.importorskip("rich")
    assert main(["plan", "vision", str(file)]) == 0
    assert "model.vision_cuda_graph_buckets=[" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--pack-size is missing"),
        (["--pack-size", "0"], "--pack-size 0"),
        (["--pack-size", "100"], "raise it, or cut with --truncate"),
        (["--pack-size", "2048", "--cost-model", "none.json"], "cost model none.json"),
        (["--pack-size", "2048", "--pad-to-multiple", "0"], "--pad-to-multiple 0"),
        (["--pack-size", "2048", "--pad-seq-to-mult", "0"], "--pad-seq-to-mult 0"),
        (
            ["--pack-size", "2050", "--pad-seq-to-mult", "4"],
            "--pack-size 2050: it must be a multiple of --pad-seq-to-mult 4",
        ),
        (["--packing", "in_batch", "--micro-batch-size", "0"], "--micro-batch-size 0"),
        (["--packing", "in_batch", "--micro-batch-size", "4000"], "no packs"),
        (["--pack-size", "2048", "--field", "foo"], "--field has no effect: the file has lengths without fields"),
        (
            ["--pack-size", "2048", "--micro-batch-size", "2"],
            "--micro-batch-size has no effect: only --packing in_batch",
        ),
        (["--packing", "in_batch", "--pack-size", "2048"], "--pack-size has no effect"),
        (["--packing", "in_batch", "--truncate"], "--truncate has no effect"),
        (["--pack-size", "2048", "--max-memory-gb", "0.1"], "--max-memory-gb 0.1: it must be at least "),
    ],
)
def test_the_command_refuses(histogram, capsys, arguments, message):
    assert main(["plan", "packed", histogram, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_cuts_documents(histogram, capsys):
    assert main(["plan", "packed", histogram, "--pack-size", "300", "--truncate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"]["max"] <= 300


def test_the_plot(histogram, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main(["plan", "packed", histogram, "--pack-size", "2048", "--json", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "packed", histogram, "--pack-size", "2048", "--plot", str(tmp_path / "plan.doc")]) == 2
    assert "plan.doc" in capsys.readouterr().err


def test_planning_imports_neither_torch_nor_megatron(histogram):
    import subprocess
    import sys

    code = f"""
import sys
from bridge_cg_tools.benchmarks.models.workloads import CASES
from bridge_cg_tools.benchmarks.pages.markdown import by_case
from bridge_cg_tools.benchmarks.pages.performance_page import by_default
from bridge_cg_tools.benchmarks.records.results import ROOT, read_records
from bridge_cg_tools.cli import main
main(["plan", "packed", {histogram!r}, "--pack-size", "2048", "--json"])
print([name for name in ("torch", "megatron") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("words", [["--pack-size", "8"], ["--packing", "first_fit"], ["--truncate"], ["--field", "x"]])
def test_packs_are_not_packed_again(tmp_path, capsys, words):
    file = write(tmp_path / "packs.jsonl", '{"input_ids": [1, 2, 3, 4], "seq_start_id": [0, 2]}')
    assert main(["plan", "packed", str(file), *words]) == 2
    assert f"{words[0]} has no effect: the file holds packs" in capsys.readouterr().err


def test_a_field_of_a_table_beside_one_of_tokens(tmp_path):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.table({"input_ids": [[1] * 3], "text_tokens": [7]}), tmp_path / "a.parquet")
    assert read_documents(tmp_path / "a.parquet", "text_tokens").lengths == (7,)


def test_a_histogram_of_any_size_takes_seconds(tmp_path):
    images = read_images(write(tmp_path / "i.json", '{"640x480": 100000000000, "64x64": 3}'))
    assert len(images) <= 200_001 and set(images) == {Image(640, 480), Image(64, 64)}
    lengths = read_documents(write(tmp_path / "l.json", '{"300": 300000000000, "100": 100000000000, "7": 0}')).lengths
    assert Counter(lengths) == {300: 150_000, 100: 50_000}


def test_a_count_may_be_written_as_a_float(tmp_path):
    assert read_images(write(tmp_path / "i.json", '{"640x480": 3e0}')) == [Image(640, 480)] * 3
    assert read_documents(write(tmp_path / "l.json", '{"300": 2e0}')).lengths == (300, 300)
    for file, text in (
        ("i.json", '{"640x480": 2.5}'),
        ("j.json", '{"640x480": 1e999}'),
        ("k.json", '{"640x480": NaN}'),
    ):
        with pytest.raises(PlanError, match="whole number"):
            read_images(write(tmp_path / file, text))
    for file, text in (("l.json", '{"300": 2.5}'), ("m.json", '{"300": 1e999}'), ("n.json", '{"300": true}')):
        with pytest.raises(PlanError, match="whole number"):
            read_documents(write(tmp_path / file, text))


def test_a_field_that_no_row_has_names_the_nearest(tmp_path, capsys):
    file = str(write(tmp_path / "a.jsonl", '{"n_tokens": 3, "text": "a"}'))
    assert main(["plan", "packed", file, "--pack-size", "64", "--field", "ntokens"]) == 2
    said = capsys.readouterr().err
    assert "row 0: there is no field 'ntokens'. Did you mean n_tokens?" in said
    assert main(["plan", "packed", file, "--pack-size", "64", "--field", "foo"]) == 2
    assert "there is no field 'foo'; the row has n_tokens, text" in capsys.readouterr().err


def test_many_equal_microbatches_cost_one(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "bridge_cg_tools.planner.images.choose", lambda *args: asked.append(args) or Bucket(1200, (1, 1200))
    )
    plan = plan_images([Image(480, 640)] * 1000, DEFAULTS["vision"])
    assert plan.microbatches == 1000 and plan.on_graphs == 1 and len(asked) <= 2 * len(BUCKET_COUNTS)


def test_too_little_memory_names_the_least_that_works(tmp_path, capsys):
    file = str(write(tmp_path / "a.json", '{"2048x2048": 40}'))
    assert main(["plan", "vision", file, "--max-memory-gb", "1"]) == 2
    said = capsys.readouterr().err
    least = said.split("it must be at least ")[1].split(",")[0]
    assert main(["plan", "vision", file, "--json", "--max-memory-gb", least]) == 0


def test_few_sizes_get_a_bucket_each_of_just_that_size():
    images = [Image(480, 640)] * 1000
    assert plan_images(images, DEFAULTS["vision"]).buckets == (1200,)
    plan = plan_images([*images, *[Image(448, 448)] * 500, *[Image(1024, 768)] * 200], DEFAULTS["vision"])
    assert plan.buckets == (784, 1200, 3072) and plan.padding == 0
