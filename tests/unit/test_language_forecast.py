"""What `bridge-cg explain` expects of a language model's graphs, and when it expects nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli.explain.command import Answer, render
from bridge_cg_plugin.cli.explain.measured import language_forecast
from bridge_cg_plugin.cli.planner.records import measured
from bridge_cg_plugin.options import graph_options
from tests.models.language_model import SHAPES, settings_of

ROOT = Path(__file__).resolve().parents[2]
PACKS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_max_packed_seqs": "auto", "cuda_graph_modules": []}
RECIPE = "qwen3_vl_8b_vision_graphs_h200_sft_config"


def config(shape="dense", size=None, peft=None, **fields):
    settings = {**settings_of(SHAPES[shape]), "hybrid_layer_pattern": SHAPES[shape].pattern}
    specs = SimpleNamespace(packed_sequence_size=size)
    return SimpleNamespace(
        model=SimpleNamespace(**{**settings, **fields}), dataset=SimpleNamespace(offline_packing_specs=specs), peft=peft
    )


def options(**fields):
    return graph_options({**PACKS, **fields})


@pytest.mark.parametrize("shape", ["dense", "moe", "mamba", "large"])
def test_figures_are_the_records_of_the_model(shape):
    found = language_forecast(config(shape), options(), "h200")
    assert found.holds and {row.case.partition("_")[0] for row in found.rows} == {shape}
    assert found.ratios == (min(r.ratio for r in found.rows), max(r.ratio for r in found.rows))
    line = Answer(options=options(), language_model=found, has_model=True).lines[1]
    assert line.memory == "by size" and line.ratio == "-".join(f"{ratio:.2f}" for ratio in found.ratios)


class LoRA:
    pass


@pytest.mark.parametrize(
    ("held", "fields", "gpu", "said"),
    [
        ({}, {}, "b200", "--gpu b200"),
        ({"tensor_model_parallel_size": 8}, {}, None, "model.tensor_model_parallel_size=8"),
        ({"peft": LoRA()}, {}, None, "peft=LoRA"),
        ({"hidden_size": None}, {}, None, "model.hidden_size is not known here"),
        ({}, {"cuda_graph_packed_offload": "mlp"}, None, "cuda_graph_packed_offload=('mlp',)"),
        ({}, {"cuda_graph_modules": ["attn"]}, None, "cuda_graph_modules=['attn']"),
    ],
)
def test_what_no_record_supports_has_no_figure(held, fields, gpu, said):
    made = config(**held)
    found = language_forecast(made, options(**fields), gpu)
    assert found.differs == (said,) and not found.holds
    answer = Answer(options=options(**fields), language_model=found, has_model=True)
    assert answer.lines[1].memory == answer.lines[1].ratio == "not measured"
    assert said in " ".join(render(answer).split())


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
    other = " ".join(explained("model.tensor_model_parallel_size=1").split())
    assert "Whole step: not measured with model.tensor_model_parallel_size=1. The nearest" in other
