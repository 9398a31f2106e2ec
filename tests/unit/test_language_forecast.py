"""What `bridge-cg explain` expects of a language model's graphs, and when it expects nothing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli.explain.answer import Answer
from bridge_cg_plugin.cli.explain.language import language_forecast
from bridge_cg_plugin.cli.explain.table import render
from bridge_cg_plugin.cli.planner.rates import language_model_rates, measured, scaled
from bridge_cg_plugin.cli.planner.shapes import Ranks, language_model_of
from bridge_cg_plugin.options import graph_options
from tests.models.language_model import SHAPES, VOCABULARY, settings_of

ROOT = Path(__file__).resolve().parents[2]
PACKS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_max_packed_seqs": "auto", "cuda_graph_modules": []}
RECIPE = "qwen3_vl_8b_vision_graphs_h200_sft_config"


def config(shape="dense", size=None, peft=None, **fields):
    settings = {**settings_of(SHAPES[shape]), "hybrid_layer_pattern": SHAPES[shape].pattern, "vocab_size": VOCABULARY}
    specs = SimpleNamespace(packed_sequence_size=size)
    return SimpleNamespace(
        model=SimpleNamespace(**{**settings, **fields}), dataset=SimpleNamespace(offline_packing_specs=specs), peft=peft
    )


def options(**fields):
    return graph_options({**PACKS, **fields})


@pytest.mark.parametrize("shape", ["dense", "moe", "mamba", "large"])
def test_figures_are_those_of_the_models_sizes(shape):
    found = language_forecast(config(shape), options(), "h200")
    model = language_model_of(config(shape).model)
    cost = scaled(model, Ranks(), language_model_rates())
    assert [(row.tokens, row.documents) for row in found.rows] == [(2048, 5), (4096, 5), (8192, 5)]
    first, lengths = found.rows[0], (410, 410, 410, 409, 409)
    assert first.eager_ms == cost.eager_ms(lengths) and first.graphs_ms == cost.graph_ms(2048, lengths, 5, 410)
    assert first.memory_gb == cost.memory_gb(2048) and first.ratio == first.graphs_ms / first.eager_ms
    errors = language_model_rates().errors[model.kind]
    assert found.errors == errors and found.memory_gb is None
    line = Answer(options=options(), language_model=found, has_model=True).lines[1]
    assert line.memory == "by size" and line.ratio == "-".join(f"{ratio:.2f}" for ratio in found.ratios)


def test_the_datas_own_pack_is_the_largest_bucket():
    found = language_forecast(config(size=6000), options(), None)
    assert [row.tokens for row in found.rows] == [2048, 4096, 6000] and found.memory_gb == found.rows[-1].memory_gb
    line = Answer(options=options(), language_model=found, has_model=True).lines[1]
    assert line.memory == f"{found.memory_gb:.1f} GiB"
    beyond = language_forecast(config(size=32768), options(), None)
    assert [row.tokens for row in beyond.rows] == [2048, 4096, 8192] and beyond.memory_gb is None
    listed = language_forecast(config(), options(cuda_graph_packed_buckets=[2048, 4096]), None)
    assert listed.largest == 4096 and [row.tokens for row in listed.rows] == [2048, 4096]


def test_experts_that_stay_eager_have_figures_of_their_own():
    inside = language_forecast(config("moe"), options(), None)
    outside = language_forecast(config("moe"), options(cuda_graph_modules=["attn", "moe_router"]), None)
    assert outside.errors == language_model_rates().errors["experts_eager"] and outside.left_out is None
    assert all(out.graphs_ms > row.graphs_ms for out, row in zip(outside.rows, inside.rows, strict=True))


class LoRA:
    pass


@pytest.mark.parametrize(
    ("held", "fields", "gpu", "said"),
    [
        ({}, {}, "b200", "--gpu b200"),
        ({"tensor_model_parallel_size": 8}, {}, None, "model.tensor_model_parallel_size=8 was not measured"),
        ({"pipeline_model_parallel_size": 2}, {}, None, "model.pipeline_model_parallel_size=2 was not measured"),
        ({"freeze_language_model": True}, {}, None, "model.freeze_language_model=True"),
        ({"recompute_granularity": "full"}, {}, None, "model.recompute_granularity=full"),
        ({"peft": LoRA()}, {}, None, "peft=LoRA"),
        ({"num_layers": 200}, {}, None, "400 layers are far from the measured"),
        ({"hidden_size": None}, {}, None, "model.hidden_size is not known here"),
        ({}, {"cuda_graph_packed_offload": "mlp"}, None, "cuda_graph_packed_offload=('mlp',) was not measured"),
        ({}, {"cuda_graph_modules": ["attn"]}, None, "cuda_graph_modules=['attn'] was not measured"),
    ],
)
def test_what_no_record_supports_has_no_figure(held, fields, gpu, said):
    made = config(**held)
    found = language_forecast(made, options(**fields), gpu)
    assert len(found.why_not) == 1 and found.why_not[0].startswith(said)
    assert found.rows == () and found.ratios is None
    answer = Answer(options=options(**fields), language_model=found, has_model=True)
    assert answer.lines[1].memory == answer.lines[1].ratio == "not measured"
    assert f"No forecast of the language model: {found.why_not[0]}." in " ".join(render(answer).split())


def test_deterministic_algorithms_were_not_measured(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert language_forecast(config(), options(), None).why_not == ("deterministic algorithms was not measured",)


def test_eager_of_ranks_whose_records_are_far_off_has_no_figure(monkeypatch):
    rates = language_model_rates()
    far = replace(rates.errors["sequence"], eager=0.33, graphs=0.14, ratio=0.7, memory=None)
    changed = replace(rates, errors={**rates.errors, "sequence": far})
    monkeypatch.setattr("bridge_cg_plugin.cli.explain.language.language_model_rates", lambda: changed)
    ranks = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    found = language_forecast(config(**ranks), options(), None)
    assert all(row.eager_ms is None and row.ratio is None and row.graphs_ms for row in found.rows)
    text = " ".join(render(Answer(options=options(), language_model=found, has_model=True)).split())
    assert "Eager has no forecast: its records are off by 33%." in text
    assert "are within 14% (graphs); no record has the memory; whole" in text


def test_other_graphs_have_no_forecast():
    assert language_forecast(config(), graph_options({}), None) is None
    assert language_forecast(config(), graph_options({"cuda_graph_impl": "full_iteration"}), None) is None


def explained(*words):
    done = subprocess.run(
        [sys.executable, "-m", "bridge_cg_plugin.cli.main", "explain", RECIPE, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_measured_recipe_has_its_step():
    pytest.importorskip("megatron.bridge.recipes.qwen_vl")
    found = json.loads(explained("--json"))
    if not found["forecast"]:
        pytest.skip("this megatron-bridge has another recipe")
    step = next(one for one in measured()["steps"] if (one["case"], one["setting"]) == ("8b_sft_tp2", "exact"))
    assert found["whole_step"].items() >= step.items() and found["whole_step"]["not_measured"] == []
    text = explained()
    assert max(map(len, text.splitlines())) <= 80
    said = " ".join(text.split())
    times = f"{step['eager_runs_ms'][0]:.0f} ms eager and {step['graphs_ms']:.0f} ms"
    assert "Whole step, measured for this model and layout" in said and times in said
    assert "This model, not in the fit (8b_sft_tp2), is forecast" in said
    other = " ".join(explained("model.tensor_model_parallel_size=1").split())
    assert "Whole step: not measured with model.tensor_model_parallel_size=1. The nearest" in other
    assert "A full-size model, not in the fit (8b_sft_tp2), is forecast" in other


def test_replaced_rates_are_used(monkeypatch):
    slow = replace(language_model_rates(), ms={name: 2 * ms for name, ms in language_model_rates().ms.items()})
    before = language_forecast(config(), options(), None)
    monkeypatch.setattr("bridge_cg_plugin.cli.explain.language.language_model_rates", lambda: slow)
    after = language_forecast(config(), options(), None)
    assert after.rows[0].graphs_ms == pytest.approx(2 * before.rows[0].graphs_ms)
