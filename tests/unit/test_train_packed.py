"""The training runs on packed documents: their data and configuration, and what is made of their results."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.cli.runs.results import check_record
from scripts.performance.packed import runs as train_packed
from scripts.performance.packed import training as packed_training


def batches(rows, count=8):
    provider = packed_training.DocumentProvider(rows=rows)
    made = provider.build_datasets(SimpleNamespace(train_samples=4 * count, valid_samples=0, test_samples=0))[0]
    return [made.collate_fn([made[4 * i + j] for j in range(4)]) for i in range(count)]


def test_padding_is_a_document_that_no_loss_counts():
    for plain, padded in zip(batches(1), batches(64), strict=True):
        tokens, rows = plain["tokens"].shape[1], padded["tokens"].shape[1]
        assert rows % 64 == 0 and 0 <= rows - tokens < 64 and padded["total_tokens"] == rows
        for name in ("tokens", "labels", "position_ids", "loss_mask"):
            assert torch.equal(padded[name][:, :tokens], plain[name])
        assert padded["loss_mask"].sum() == plain["loss_mask"].sum() > 0
        expected = plain["cu_seqlens_q"].tolist() + ([rows] if rows > tokens else [])
        assert padded["cu_seqlens_q"].tolist() == padded["cu_seqlens_kv"].tolist() == expected
        assert padded["max_seqlen_q"] >= torch.diff(padded["cu_seqlens_q"]).max()


@pytest.mark.parametrize("modules", ["", "attn"], ids=["whole", "attn"])
@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize(
    "make, documents",
    [
        (packed_training.training_config, 8),
        (partial(packed_training.training_config, model="mamba"), 8),
        (partial(packed_training.training_config, model="experts"), 8),
        (partial(packed_training.training_config, model="fp8"), 8),
        (packed_training.photograph_config, 4),
    ],
    ids=["dense", "mamba", "experts", "fp8", "vl"],
)
def test_bridge_takes_the_configuration(mode, make, documents, modules):
    from megatron.bridge.training.config import runtime_config_update

    config = make(mode, 50, modules)
    runtime_config_update(config)
    config.validate()
    graphs = (config.model.cuda_graph_impl, config.model.cuda_graph_max_packed_seqs)
    assert graphs == (("transformer_engine", documents) if mode == "graphs" else ("none", None))
    assert config.dataset.enable_in_batch_packing and config.train.micro_batch_size > 1


@pytest.mark.parametrize(
    "model, recipe, in_fp8",
    [
        ("fp8", "tensorwise", False),
        ("fp8_delayed", "delayed", False),
        ("fp8_parameters", "tensorwise", True),
        ("fp8_blockwise", "blockwise", False),
    ],
)
def test_packs_in_fp8_have_rows_that_products_take(model, recipe, in_fp8):
    from megatron.bridge.training.config import runtime_config_update

    config = packed_training.training_config("graphs", 50, model=model)
    runtime_config_update(config)
    assert (config.model.fp8, config.model.fp8_recipe, config.model.fp8_param) == ("hybrid", recipe, in_fp8)
    assert config.ddp.fp8_param_gather is in_fp8
    assert [packed_training.training_config("eager", 50, rows=n, model=model).dataset.rows for n in (1, 64)] == [16, 64]


@pytest.mark.parametrize("rows", [1, 64])
def test_photographs_are_as_long_as_the_longest_of_a_microbatch(rows):
    provider = packed_training.photograph_config("eager", 2, rows=rows).dataset
    made = provider.build_datasets(SimpleNamespace(train_samples=8, valid_samples=0, test_samples=0))[0]
    lengths = set()
    for first in range(0, 8, 2):
        items = [made[first], made[first + 1]]
        batch = made.collate_fn(items)
        length = batch["tokens"].shape[1]
        longest = max(int(item["tokens"].nonzero().max()) + 1 for item in items)
        assert length == -(-longest // rows) * rows
        assert batch["loss_mask"].sum() == sum(item["loss_mask"].sum() for item in items) > 0
        assert {batch[name].shape for name in ("labels", "loss_mask", "position_ids")} == {(2, length)}
        lengths.add(length)
    assert len(lengths) > 1


def runs(losses):
    eager = {"losses": [3.0, 2.0] * 4, "grad_norms": [1.0] * 8, "peak_gb": 1.0, "packed_graphs": None}
    noisy = {**eager, "losses": [3.0, 2.01] * 4, "step_ms": None}
    plugin = {**eager, "losses": losses, "step_ms": [50.0] * 8, "packed_graphs": {"replays": 9}}
    return {"eager": {**eager, "step_ms": [100.0] * 8}, "eager_again": noisy, "plugin": plugin}


@pytest.mark.parametrize("losses, status", [([3.0, 2.005] * 4, 0), ([3.0, 2.2] * 4, 1)])
def test_graphs_must_stay_inside_eagers_spread(tmp_path, capsys, losses, status):
    out = tmp_path / "r.jsonl"
    assert train_packed.compare(runs(losses), 8, out) == status
    records = {record["mode"]: record for record in map(json.loads, out.read_text().splitlines())}
    for record in records.values():
        check_record(record)
    assert records["plugin"]["inside_spread"] is not status and records["plugin"]["ratio"] == 0.5
    assert "2.00 times as fast" in capsys.readouterr().out


def test_nothing_replayed_is_not_the_same(tmp_path):
    made = runs([3.0, 2.0] * 4)
    made["plugin"]["packed_graphs"] = {"replays": 0}
    assert train_packed.compare(made, 8, tmp_path / "r.jsonl") == 1


def test_without_times_there_is_a_verdict_all_the_same(tmp_path, capsys):
    made = {name: {**run, "step_ms": None} for name, run in runs([3.0, 2.005] * 4).items()}
    out = tmp_path / "r.jsonl"
    assert train_packed.compare(made, 8, out) == 0
    for record in map(json.loads, out.read_text().splitlines()):
        check_record(record)
        assert record["ms"] is None and "ratio" not in record
    found = capsys.readouterr().out
    assert "verdict: SAME" in found and "times as fast" not in found


@pytest.mark.parametrize("side_by_side", [False, True])
def test_every_run_has_its_process_and_words(monkeypatch, side_by_side):
    trained = []

    class Process:
        wait_until_ready = close = lambda self: None

        def __init__(self, log, module):
            assert log.parent.is_dir() and module == train_packed.MODULE

        def train(self, mode, words, limit_s):
            assert limit_s == train_packed.LIMIT_S
            trained.append((mode, tuple(words)))
            return {"step_ms": [1.0], "words": tuple(words)}

    monkeypatch.setattr(train_packed, "TrainingProcess", Process)
    found = train_packed.train_all(5, "qwen3_vl", "attn", side_by_side)
    assert list(found) == [*train_packed.EAGER_RUNS, "plugin"]
    times = [run["step_ms"] for run in found.values()]
    assert times == ([None] * 5 if side_by_side else [[1.0], None, None, None, [1.0]])
    alike = ("--steps", "5", "--model", "qwen3_vl")
    rows = [("eager", (*alike, "--rows", rows)) for rows in ("1", "1", "64", "256")]
    graphs = ("graphs", (*alike, "--modules", "attn"))
    assert [run["words"] for run in found.values()] == [words for _, words in (*rows, graphs)]
    assert sorted(trained) == sorted([*rows, graphs])
    assert side_by_side or trained[:2] == [rows[0], graphs]
