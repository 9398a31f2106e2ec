"""Measured ratios: every figure against docs/benchmarks, the nearest records, and what `explain` says of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli.explain.command import NOT_MEASURED, Answer, render
from bridge_cg_plugin.cli.explain.models import sizes_of
from bridge_cg_plugin.cli.measured import (
    TOWER,
    NotMeasured,
    language_forecast,
    layers_of,
    of_encoder,
    records,
    steps,
    vision_forecast,
    whole_step,
)
from bridge_cg_plugin.cli.runs.results import ROOT, read_records
from bridge_cg_plugin.options import VisionGraphOptions, graph_options
from tests.models.language_model import SHAPES, settings_of

TOWER_RECORDS, AUTO = of_encoder(TOWER), "vision_cuda_graph_tuning.kernels=auto"
PACKS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_max_packed_seqs": "auto", "cuda_graph_modules": []}


@pytest.mark.parametrize("found", records(), ids=lambda found: f"{found.of} {found.rows[0].case} {found.rows[0].mode}")
def test_ratios_are_the_records(found):
    held = {(r["case"], r["mode"]): r for r in read_records(ROOT / found.file)}
    pairs = [(row, held[row.case, "eager"], held[row.case, row.mode]) for row in found.rows]
    for row, eager, graphs in pairs:
        memory = graphs.get("memory_gb")
        assert row.ratio == pytest.approx(graphs["ms"] / eager["ms"], abs=1e-3)
        assert row.memory_gb == (memory and round(memory, 2))
        assert row.tokens == graphs["tokens"] and {eager["gpu"], graphs["gpu"]} == {found.gpu}
    assert found.date == max(r["date"] for _, *both in pairs for r in both)
    assert [row.tokens for row in found.rows] == sorted(row.tokens for row in found.rows)


@pytest.mark.parametrize("step", steps(), ids=lambda step: f"{step['case']} {step['setting']}")
def test_steps_are_the_records(step):
    held = [r for r in read_records(ROOT / step["file"]) if r["case"] == step["case"] and r["ms"]]
    eager = [r["ms"] for r in held if r["mode"].startswith("eager")]
    assert step["eager_ms"] == pytest.approx(eager[: len(step["eager_ms"])], abs=0.1)
    graphs = [r for r in held if r["ms"] == pytest.approx(step["graphs_ms"], abs=0.1)]
    assert graphs and graphs[0]["date"] == step["date"]


class Qwen3VLModelProvider(SimpleNamespace):
    vision_cuda_graph_impl = "none"


class LoRA:
    pass


def config(peft=None, depth=27, of=Qwen3VLModelProvider, **fields):
    tower = SimpleNamespace(depth=depth, hidden_size=1152)
    model = of(**{"vision_config": tower, **sizes_of("Qwen/Qwen3-VL-8B"), **fields})
    return SimpleNamespace(model=model, dataset=None, peft=peft)


def text_model(shape="dense", peft=None, **fields):
    settings = {**settings_of(SHAPES[shape]), "hybrid_layer_pattern": SHAPES[shape].pattern}
    return config(peft, of=SimpleNamespace, **{**settings, **fields})


def on(**fields):
    return VisionGraphOptions(impl="transformer_engine", **fields)


def options(setting="exact", **fields):
    found = graph_options({"vision_cuda_graph_impl": "transformer_engine", **PACKS, **fields})
    kernels = "exact" if setting == "exact" else found.vision.kernels
    return replace(found, vision=replace(found.vision, kernels=kernels), choice=replace(found.choice, setting=setting))


def test_figures_are_of_what_the_largest_bucket_takes():
    found = vision_forecast(config(), on(max_seq_length=16384), None)
    assert found.rows == TOWER_RECORDS.rows[:-1] and found.holds
    assert found.memory_gb == found.rows[-1].memory_gb
    assert vision_forecast(config(), on(max_seq_length=4096), None).memory_gb == 3.72 * 4096 / 3136


@pytest.mark.parametrize("shape", ["dense", "moe", "mamba", "large"])
def test_packs_have_the_records_of_their_layers(shape):
    found = language_forecast(text_model(shape), options(), "h200")
    assert found.holds and {row.case.partition("_")[0] for row in found.rows} == {shape}
    line = Answer(options=options(), language_model=found, has_model=True).lines[1]
    assert line.memory == "by size" and line.ratio == "-".join(f"{ratio:.2f}" for ratio in found.ratios)


@pytest.mark.parametrize(
    ("made", "chosen", "gpu", "said"),
    [
        (config(), {}, "h100", "--graphs h100"),
        (config(tensor_model_parallel_size=4), {}, None, "model.tensor_model_parallel_size=4"),
        (config(), {"vision_cuda_graph_offload_above_gb": 14}, None, "vision_cuda_graph_offload_above_gb=14.0"),
        (config(freeze_vision_model=True), {}, None, "model.freeze_vision_model=True"),
        (text_model(), {}, "b200", "--graphs b200"),
        (text_model(tensor_model_parallel_size=8), {}, None, "model.tensor_model_parallel_size=8"),
        (text_model(peft=LoRA()), {}, None, "peft=LoRA"),
        (text_model(hidden_size=None), {}, None, "model.hidden_size is not known here"),
        (text_model(), {"cuda_graph_packed_offload": "mlp"}, None, "cuda_graph_packed_offload=('mlp',)"),
        (text_model(), {"cuda_graph_modules": ["attn"]}, None, "cuda_graph_modules=['attn']"),
    ],
)
def test_what_was_not_measured_has_no_figure_in_the_table(made, chosen, gpu, said):
    of_images, wanted = hasattr(made.model, "vision_cuda_graph_impl"), options(**chosen)
    found = vision_forecast(made, wanted.vision, gpu) if of_images else language_forecast(made, wanted, gpu)
    assert found.differs == (said,) and not found.holds
    answer = Answer(options=wanted, has_model=True, **{"forecast" if of_images else "language_model": found})
    line = answer.lines[0 if of_images else 1]
    assert line.memory == line.ratio == NOT_MEASURED
    assert said in " ".join(render(answer).split()) and found.as_json()["not_measured"] == [said]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"multi_latent_attention": True}, "multi-latent attention was not measured"),
        ({"hybrid_layer_pattern": "MG*"}, "layers G of hybrid_layer_pattern were not measured"),
        ({"num_moe_experts": 8, "moe_layer_freq": 2}, "layers with and without experts were not measured"),
    ],
)
def test_layers_that_no_record_is_like(fields, said):
    with pytest.raises(NotMeasured, match=said):
        layers_of(text_model(**fields).model)


@pytest.mark.parametrize(
    ("made", "place", "fields", "case", "differs"),
    [
        (config(tensor_model_parallel_size=2), ("h200", 2), {}, "8b_sft_tp2", ()),
        (config(LoRA()), (None, None), {}, "8b_lora", ()),
        (config(), (None, None), {}, "8b_sft_tp2", ("model.tensor_model_parallel_size=1",)),
        (config(tensor_model_parallel_size=2), ("h100", 8), {}, "8b_sft_tp2", ("--graphs h100", "8 GPUs")),
        (config(LoRA()), (None, None), {"setting": "fastest"}, "8b_lora", ("cuda_graphs=fastest", AUTO)),
    ],
)
def test_the_nearest_step_names_what_it_lacks(made, place, fields, case, differs):
    step = whole_step(made, options(**fields), *place)
    assert step.found["case"] == case and step.differs == differs and step.holds == (not differs)
    head = f"not measured with {', '.join(differs)}. The nearest" if differs else "measured for this model and layout"
    assert step.said().startswith("Whole step") and head in step.said() and step.as_json()["graphs_ms"]
    assert len(Answer(options=options(), step=step, has_model=True).lines) == (2 if differs else 3)


@pytest.mark.parametrize(
    ("of", "found"),
    [(config(depth=24), options()), (config(), graph_options({})), (SimpleNamespace(model=None), options())],
    ids=["encoder", "no graphs", "no model"],
)
def test_another_model_has_no_step(of, found):
    assert whole_step(of, found, None, None) is None
