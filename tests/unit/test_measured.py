"""Measured ratios: every figure against docs/benchmarks, the nearest records, and what `explain` says of them."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.cli.explain.command import Answer, render
from bridge_cg_plugin.cli.explain.models import sizes_of
from bridge_cg_plugin.cli.measured import CARDS, NotMeasured, layers_of, nearest, records
from bridge_cg_plugin.cli.runs.results import ROOT
from bridge_cg_plugin.options import graph_options
from scripts.performance.bench_recipe import CASES
from scripts.performance.records import read_records
from tests.models.language_model import SHAPES, settings_of

AUTO = "vision_cuda_graph_kernels=auto"
PACKS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_max_packed_seqs": "auto", "cuda_graph_modules": []}


@pytest.mark.parametrize("found", records()["packs"], ids=lambda found: f"{found['of']} {found['rows'][0][:2]}")
def test_ratios_are_the_records(found):
    held = {(r["case"], r["mode"]): r for r in read_records(ROOT / found["file"])}
    dates = set()
    for case, mode, tokens, ratio in found["rows"]:
        eager, graphs = held[case, "eager"], held[case, mode]
        assert ratio == pytest.approx(graphs["ratio"], abs=1e-3)
        assert tokens == graphs["tokens"] and {eager["gpu"], graphs["gpu"]} == {found["gpu"]}
        dates |= {eager["date"], graphs["date"]}
    assert found["date"] == max(dates)


@pytest.mark.parametrize("step", records()["steps"], ids=lambda step: f"{step['case']} {step['setting']}")
def test_steps_are_the_records(step):
    held = [r for r in read_records(ROOT / step["file"]) if r["versions"]["megatron-bridge"] == "0.6.2" and r["ms"]]
    eager = [r for r in held if r["case"] in step["cases"] and r["mode"].startswith("eager")]
    assert {round(r["ms"], 1) for r in eager} == {*step["eager_ms"]}
    (graphs,) = [r for r in held if (r["case"], r["mode"]) == (step["case"], step["mode"])]
    assert (round(graphs["ms"], 1), round(graphs["peak_gb"], 1)) == (step["graphs_ms"], step["peak_gb"])
    assert step["eager_peak_gb"] in {round(r["peak_gb"], 1) for r in eager}
    assert (graphs["date"], graphs["gpu"], graphs.get("gpus", 1)) == (step["date"], step["gpu"], step["gpus"])
    assert step["kind"] == ("experts" if "expert" in step["layers"] else "dense")
    if step["samples"]:
        case = CASES[step["case"]]
        assert (" ".join([case.recipe, *case.words]), case.gpus, case.batch) == (
            step["of"],
            step["gpus"],
            step["samples"],
        )
        assert graphs["tokens_per_s"] / graphs["samples_per_s"] == pytest.approx(step["tokens"])


class Qwen3VLModelProvider(SimpleNamespace):
    vision_cuda_graph_impl = "none"


class LoRA:
    pass


def config(peft=None, depth=27, of=Qwen3VLModelProvider, batch=8, micro=2, optimizer="adam", sharded=True, **fields):
    tower = SimpleNamespace(depth=depth, hidden_size=1152)
    model = of(**{"vision_config": tower, "seq_length": 4096, **sizes_of("Qwen/Qwen3-VL-8B"), **fields})
    return SimpleNamespace(
        model=model,
        dataset=None,
        peft=peft,
        train=SimpleNamespace(global_batch_size=batch, micro_batch_size=micro),
        optimizer=SimpleNamespace(optimizer=optimizer),
        ddp=SimpleNamespace(use_distributed_optimizer=sharded),
    )


def text_model(shape="dense", peft=None, **fields):
    settings = {**settings_of(SHAPES[shape]), "hybrid_layer_pattern": SHAPES[shape].pattern}
    return config(peft, of=SimpleNamespace, **{**settings, **fields})


def options(setting="exact", **fields):
    found = graph_options({"vision_cuda_graph_impl": "transformer_engine", **PACKS, **fields})
    kernels = "exact" if setting == "exact" else found.vision.kernels
    return replace(found, vision=replace(found.vision, kernels=kernels), choice=replace(found.choice, setting=setting))


@pytest.mark.parametrize("shape", ["dense", "moe", "mamba", "large"])
def test_packs_have_the_records_of_their_layers(shape):
    found = nearest(text_model(shape), packs(), "h200", None)
    assert not found.differs and {row[0].partition("_")[0] for row in found.found["rows"]} == {shape}
    assert f"{1 / max(row[3] for row in found.found['rows']):.1f} to " in found.time()


def packs(**fields):
    return graph_options({**PACKS, **fields})


@pytest.mark.parametrize(
    ("made", "chosen", "gpu", "said"),
    [
        (text_model(), {}, "b200", "--gpu b200"),
        (text_model(tensor_model_parallel_size=8), {}, None, "model.tensor_model_parallel_size=8"),
        (text_model(peft=LoRA()), {}, None, "peft=LoRA"),
        (text_model(), {"cuda_graph_packed_offload": "mlp"}, None, "cuda_graph_packed_offload=('mlp',)"),
        (text_model(), {"cuda_graph_modules": ["attn"]}, None, "cuda_graph_modules=['attn']"),
    ],
)
def test_what_was_not_measured_is_named_beside_the_nearest_packs(made, chosen, gpu, said):
    found = nearest(made, packs(**chosen), gpu, None)
    assert found.differs == (said,) and not found.whole
    assert found.time().startswith(f"not measured with {said}. Nearest: ")
    assert found.fits(gpu).startswith("not measured")
    text = render(Answer(options=packs(**chosen), nearest=found, has_encoder=False), details=True)
    assert said in " ".join(text.split()) and found.as_json()["not_measured"] == [said]


@pytest.mark.parametrize(
    ("made", "chosen", "said"),
    [
        (text_model(), {"cuda_graph_max_packed_seqs": None, "cuda_graph_modules": ["attn"]}, "unpacked sequences"),
        (text_model(hidden_size=None), {}, "unknown model.hidden_size"),
        (text_model(multi_latent_attention=True), {}, "multi-latent attention"),
    ],
)
def test_no_figure_of_packs_is_of_other_data_or_layers(made, chosen, said):
    found = nearest(made, packs(**chosen), None, None)
    text = " ".join([found.time(), found.memory(), found.fits(None), found.faster()])
    assert found.time().startswith(f"not measured with {said}") and not re.search(r"times as fast|\d GiB|eager's", text)
    assert (
        "Nearest: packs of 16 attention, 16 MLP layers of 2048, not this model (docs/benchmarks/packed.jsonl, " in text
    )
    assert "rows" not in found.as_json()


UNKNOWN = {"num_layers": None, "hidden_size": None}


@pytest.mark.parametrize(
    ("fields", "of"),
    [
        ({"hidden_size": 8192}, "8 attention, 8 MLP layers of 5120"),
        ({"hidden_size": 2560}, "16 attention, 16 MLP layers of 2048"),
        ({**UNKNOWN, "expert_model_parallel_size": 8}, "16 attention, 16 32-expert layers of 2048"),
        ({**UNKNOWN, "hybrid_layer_pattern": "M*G"}, "2 attention, 7 MLP, 7 Mamba layers of 2048"),
    ],
)
def test_the_nearest_packs_are_of_the_kind_and_width_of_the_layers(fields, of):
    assert nearest(text_model(**fields), packs(), None, None).found["of"] == of


DELTA_NETS = {"num_layers": 8, "hidden_size": 1024, "experimental_attention_variant": "gated_delta_net"}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"linear_attention_freq": 4}, "2 attention, 6 gated-delta-net, 8 MLP"),
        ({"linear_attention_freq": [1, 0] * 4, "num_moe_experts": 16}, "4 attention, 4 gated-delta-net, 8 16-expert"),
        (
            {"linear_attention_freq": 8, "mtp_num_layers": 1},
            "1 attention, 7 gated-delta-net, 8 MLP, 1 multi-token-prediction",
        ),
    ],
)
def test_layers_that_no_packs_are_of_are_told(fields, layers):
    made = text_model(**DELTA_NETS, **fields)
    assert layers_of(made.model) == f"{layers} layers of 1024"
    assert nearest(made, packs(), None, None).time().startswith(f"not measured with {layers} layers of 1024. Nearest: ")


def test_no_packs_are_near_a_model_that_has_no_language_model():
    assert nearest(text_model(num_layers=None, _stands_in=True), packs(), None, None).found == {}


def test_the_layout_of_packs_is_named():
    said = nearest(text_model(context_parallel_size=2, cp_comm_type="a2a"), packs(), None, None).time()
    assert "2 NVIDIA H200, CP2, a2a" in said and "5.5 to" not in said


@pytest.mark.parametrize(("experts", "case"), [(128, "30b_a3b_8_layers_ep2"), (None, "8b_sft_dp4")])
def test_a_model_of_unknown_sizes_has_a_step_of_its_kind(experts, case):
    found = nearest(config(num_layers=None, num_moe_experts=experts), options(), None, 4)
    assert found.found["case"] == case and "its language model's layers" in found.differs


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"multi_latent_attention": True}, "multi-latent attention"),
        ({"experimental_attention_variant": "dsa"}, "linear attention"),
        ({"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 0}, "linear attention"),
        ({"hybrid_layer_pattern": "MG*"}, "layers G of hybrid_layer_pattern"),
        ({"num_moe_experts": 8, "moe_layer_freq": 2}, "layers with and without experts"),
    ],
)
def test_layers_that_no_record_is_like(fields, said):
    with pytest.raises(NotMeasured, match=said):
        layers_of(text_model(**fields).model)


TP2 = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("made", "place", "setting", "case", "differs"),
    [
        (config(**TP2), ("h200", 2), "exact", "8b_sft_tp2", ()),
        (config(LoRA()), (None, None), "exact", "8b_lora", ()),
        (config(batch=16), (None, 4), "exact", "8b_sft_dp4", ()),
        (config(batch=32, **TP2), (None, None), "exact", "8b_sft_tp2", ("train.global_batch_size=32",)),
        # GPUs divide the optimizer's memory: a nearer number of them says more than the same batch.
        (
            config(**TP2),
            ("h100", 8),
            "exact",
            "8b_sft_tp2_dp2",
            ("train.global_batch_size=8", "8 GPUs", "--gpu h100"),
        ),
        (config(micro=4, **TP2), (None, 2), "exact", "8b_sft_tp2", ("train.micro_batch_size=4",)),
        (config(optimizer="sgd", **TP2), (None, 2), "exact", "8b_sft_tp2", ("optimizer.optimizer=sgd",)),
        (config(sharded=False, **TP2), (None, 2), "exact", "8b_sft_tp2", ("ddp.use_distributed_optimizer=False",)),
        (config(LoRA()), (None, None), "fastest", "8b_lora", ("cuda_graphs=fastest", AUTO)),
        (config(depth=24, **TP2), (None, None), "exact", "8b_sft_tp2", ("Qwen3-VL encoder of 24 layers of 1152",)),
        (config(seq_length=2048, **TP2), (None, None), "exact", "8b_sft_tp2", ("model.seq_length=2048",)),
        (
            config(freeze_vision_model=True, **TP2),
            (None, 2),
            "exact",
            "8b_sft_tp2",
            ("model.freeze_vision_model=True",),
        ),
    ],
)
def test_the_nearest_step_names_what_it_lacks(made, place, setting, case, differs):
    found = nearest(made, options(setting), *place)
    assert (found.found["case"], found.differs) == (case, differs)
    step, eager = found.found, found.found["eager_ms"]
    said = found.time()
    assert said.startswith("not measured with " if differs else f"{step['graphs_ms']:.0f} ms on graphs, ")
    assert f"{min(eager):.0f}" in said and f"{max(eager):.0f}" in said and step["date"] in said
    assert "host not recorded" in said and f"{step['samples']} samples of 4096 tokens" in said
    for text in (found.memory(), found.fits(place[0]), found.faster()):
        assert not text or text.startswith("not measured. Nearest, ") == bool(differs)


@given(peak=st.floats(1, 300), eager=st.floats(1, 300), gpu=st.sampled_from([None, *CARDS]))
def test_a_step_fits_a_gpu_with_more_memory_than_its_peak(peak, eager, gpu):
    found = nearest(config(**TP2), options(), None, 2)
    found = replace(found, found={**found.found, "peak_gb": peak, "eager_peak_gb": eager})
    said = found.fits(gpu)
    for card, size in CARDS.items():
        if gpu in (None, card):
            assert f"{card} ({size} GB) {'yes' if peak * 2**30 / 1e9 <= size else 'no'}" in said
        else:
            assert card not in said
    assert not said.startswith("not measured")
    assert found.exceeds(gpu) == (gpu is not None and f"{gpu} ({CARDS[gpu]} GB) no" in said)


@pytest.mark.parametrize(
    "fields, saves",
    [
        ({"vision_cuda_graph_offload_above_gb": 14.0}, "vision_cuda_graph_offload_above_gb=14.0"),
        ({}, "model.recompute_granularity=full"),
    ],
)
def test_a_step_that_does_not_fit_may_with_what_saves_memory(fields, saves):
    made = config(**TP2, **({} if fields else {"recompute_granularity": "full"}))
    found = nearest(made, options(**fields), None, 2)
    said = found.fits(None)
    assert not found.exceeds("h100")
    assert f"h100 (80 GB) no without {saves}, h200 (141 GB) yes, " in said


def test_where_nothing_runs_on_graphs_nothing_is_near():
    assert nearest(config(), graph_options({}), None, None) is None
