"""Which measured whole step `bridge-cg explain` names for a configuration, and what it says of it."""

from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli.explain.command import Answer
from bridge_cg_plugin.cli.explain.measured import whole_step
from bridge_cg_plugin.cli.explain.models import sizes_of
from bridge_cg_plugin.cli.runs.results import ROOT, read_records
from bridge_cg_plugin.options import graph_options
from scripts.performance.bench_recipe import CASES

VISION = {"vision_cuda_graph_impl": "transformer_engine", "vision_cuda_graph_tuning.kernels": "exact"}
PACKS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_max_packed_seqs": "auto", "cuda_graph_modules": []}
EXPERTS = {"num_layers": 8, "num_moe_experts": 128, "expert_model_parallel_size": 2}


class Qwen3VLModelProvider(SimpleNamespace):
    vision_cuda_graph_impl = "none"


class LoRA:
    pass


def config(name="Qwen/Qwen3-VL-8B", peft=None, depth=27, **fields):
    tower = SimpleNamespace(depth=depth, hidden_size=1152)
    fused = {"bias_activation_fusion": True, "cross_entropy_loss_fusion": True}
    model = Qwen3VLModelProvider(**{**sizes_of(name), **fused, "vision_config": tower, **fields})
    return SimpleNamespace(model=model, peft=peft, dataset=None)


def options(setting="exact", **fields):
    found = graph_options({**VISION, **PACKS, **fields})
    object.__setattr__(found.choice, "setting", setting)
    return found


def sft(**fields):
    return config(**{"tensor_model_parallel_size": 2, **fields})


def records(case, mode="", file="whole_step"):
    found = read_records(ROOT / f"docs/benchmarks/{file}.jsonl")
    return [r for r in found if r["case"] == case and r["mode"].startswith(mode) and r["ms"]]


MEASURED = {
    "8b_sft_tp2": sft(),
    "8b_lora": config(peft=LoRA()),
    "30b_a3b_8_layers_ep2": config("Qwen/Qwen3-VL-30B-A3B", **EXPERTS),
}


@pytest.mark.parametrize("case", MEASURED)
def test_a_measured_step_is_the_records(case):
    step = whole_step(MEASURED[case], options(), "h200", CASES[case].gpus)
    eager, (graphs,) = records(case, "eager"), [r for r in records(case) if r["mode"] == "plugin"]
    assert step.holds and step.found["case"] == case
    assert step.found["eager_runs_ms"] == pytest.approx([r["ms"] for r in eager], rel=1e-4)
    assert step.found["graphs_ms"] == pytest.approx(graphs["ms"], rel=1e-4)
    assert step.ratio == pytest.approx(graphs["ratio"], rel=1e-3)
    assert step.memory_gb == pytest.approx(graphs["memory_gb"], rel=1e-3)
    text = step.said()
    gpus = "2 NVIDIA H200s" if CASES[case].gpus == 2 else "1 NVIDIA H200"
    assert text.startswith(f"Whole step, measured for this model and layout: {CASES[case].recipe}") and gpus in text
    assert (
        f"{eager[0]['ms']:.0f} ms eager and {graphs['ms']:.0f} ms with cuda_graphs=exact ({graphs['ratio']:.2f})"
        in text
    )
    assert text.endswith(f"docs/benchmarks/whole_step.jsonl, {graphs['date']}.")


@pytest.mark.parametrize(
    ("of", "fields", "place", "case", "differs"),
    [
        (config(), {}, (None, None), "8b_sft_tp2", "model.tensor_model_parallel_size=1"),
        (sft(), {}, ("h100", None), "8b_sft_tp2", "--gpu h100"),
        (sft(), {}, (None, 8), "8b_sft_tp2", "8 GPUs"),
        (sft(), {"cuda_graph_packed_offload": "mlp"}, (None, None), "8b_sft_tp2", "cuda_graph_packed_offload=('mlp',)"),
        (
            config("Qwen/Qwen3-VL-30B-A3B", **{**EXPERTS, "num_layers": 48}),
            {},
            (None, None),
            "30b_a3b_8_layers_ep2",
            "model.num_layers=48",
        ),
        (config(peft=LoRA()), {"setting": "fastest"}, (None, None), "8b_lora", "cuda_graphs=fastest"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_nearest_step_names_what_it_lacks(of, fields, place, case, differs):
    step = whole_step(of, options(**fields), *place)
    assert step.found["case"] == case and step.differs[0] == differs
    assert len(step.differs) == 1
    assert f"Whole step: not measured with {differs}" in step.said() and ". The nearest: qwen3_vl" in step.said()
    assert len(Answer(options=options(), step=step, has_model=True).lines) == 2


@pytest.mark.parametrize(
    ("of", "found"),
    [
        (config(depth=24), options()),
        (sft(), graph_options({})),
        (SimpleNamespace(), options()),
    ],
    ids=["encoder", "no graphs", "no model"],
)
def test_another_model_has_no_step(of, found):
    assert whole_step(of, found, None, None) is None
