"""Measured microbatches: every figure against docs/benchmarks, the nearest records, and what plans make of them."""

import pytest

from bridge_cg_plugin.cli.planner.records import (
    TOWER,
    Costs,
    NotMeasured,
    of_encoder,
    records,
)
from bridge_cg_plugin.cli.runs.results import ROOT, read_records
from tests.models.language_model import SHAPES, sizes_of


@pytest.mark.parametrize("found", records(), ids=lambda found: f"{found.of} {found.rows[0].case} {found.rows[0].mode}")
def test_figures_are_the_records(found):
    held = {(r["case"], r["mode"]): r for r in read_records(ROOT / found.file)}
    pairs = [(row, held[row.case, "eager"], held[row.case, row.mode]) for row in found.rows]
    for row, eager, graphs in pairs:
        memory = graphs.get("memory_gb")
        assert row.eager_ms == round(eager["ms"], 1) and row.graphs_ms == round(graphs["ms"], 1)
        assert row.memory_gb == (memory and round(memory, 2))
        assert row.tokens == graphs["tokens"] and {eager["gpu"], graphs["gpu"]} == {found.gpu}
    assert found.date == max(r["date"] for _, *both in pairs for r in both)
    assert [row.tokens for row in found.rows] == sorted(row.tokens for row in found.rows)


def test_costs_are_those_of_the_records_around_a_size():
    costs = Costs(of_encoder(TOWER, "auto"), TOWER)
    rows = {row.tokens: row for row in of_encoder(TOWER, "auto")[0].rows}
    assert costs.eager(784) == (784 / rows[784].ratio,) * 2
    assert costs.eager(1000) == (1000 / rows[2304].ratio, 1000 / rows[784].ratio)
    assert costs.eager(10) == (10 / rows[784].ratio,) * 2
    assert costs.eager(99_999) == (99_999 / rows[32768].ratio,) * 2
    assert costs.memory_gb(16384) == rows[16384].memory_gb


@pytest.mark.parametrize(
    "found", [each for each in records() if each.of.startswith("Qwen2.5-VL")], ids=lambda m: m.kernels[-1]
)
def test_figures_hold_for_the_attention_that_records_are_of(found):
    """PyTorch's kernels or, in long frames, cuDNN's: by default these, with exact kernels those."""
    exact = "exact" in found.kernels
    held = [r for r in read_records(ROOT / found.file) if r["case"].startswith("qwen25_vl_")]
    graphs = [r for r in held if r["mode"] == ("plugin" if exact else "plugin_fast")]
    by_cudnn = any("sdpa" in name for r in graphs for name, *_ in r["top"])
    called = {"cudnn" if by_cudnn else "transformer_engine"}
    assert set(found.attention) == (called | {"auto"} if exact != by_cudnn else called)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"multi_latent_attention": True}, "multi-latent attention was not measured"),
        ({"hidden_size": None}, "model.hidden_size is not known here"),
        ({"hybrid_layer_pattern": "MG*"}, "layers G of hybrid_layer_pattern were not measured"),
        ({"num_moe_experts": 8, "moe_layer_freq": "([1]*8)"}, "which layers have experts is not known"),
    ],
)
def test_sizes_that_no_record_is_like(fields, said):
    with pytest.raises(NotMeasured, match=said.replace("*", r"\*")):
        sizes_of(SHAPES["dense"], **fields)
