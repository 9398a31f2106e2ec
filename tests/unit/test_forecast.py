"""What `bridge-cg explain` expects of vision graphs, against the records and the limits that it names."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli.explain.answer import NOT_MEASURED, Answer
from bridge_cg_plugin.cli.explain.encoders import GEMMA3, MEASURED, QWEN3_VL, QWEN25_VL, Encoder, encoder_of
from bridge_cg_plugin.cli.explain.forecast import FILLED, as_json, forecast, largest_bucket
from bridge_cg_plugin.cli.explain.table import render
from bridge_cg_plugin.cli.planner.defaults import DEFAULTS, VISION_EXACT, VISION_FIT
from bridge_cg_plugin.cli.runs.results import ROOT, read_records
from bridge_cg_plugin.options import VisionGraphOptions, graph_options
from bridge_cg_plugin.options.columns import text_table
from bridge_cg_plugin.vision.plan import MEMORY_MARGIN

COST = DEFAULTS["vision"]
NAMES = {QWEN3_VL: "qwen3_vl", "Qwen3.5-VL": "qwen35_vl", QWEN25_VL: "qwen25_vl", GEMMA3: "siglip"}


def options_with(vision):
    return replace(graph_options({}), vision=vision)


class Qwen3VLModelProvider:
    vision_cuda_graph_impl = "none"


class Qwen25VLModelProvider(Qwen3VLModelProvider):
    pass


class OtherModelProvider:
    vision_cuda_graph_impl = "none"


def model(kind=Qwen3VLModelProvider, layers=27, width=1152, **fields):
    made = kind()
    vars(made).update(fields, vision_config=SimpleNamespace(depth=layers, hidden_size=width))
    return made


def config(of=None, **fields):
    train = SimpleNamespace(micro_batch_size=2)
    return SimpleNamespace(**{"model": of or model(), "dataset": None, "peft": None, "train": train, **fields})


def on(**fields):
    return VisionGraphOptions(impl="transformer_engine", **fields)


@pytest.mark.parametrize("found", [m for m in MEASURED if m.rows], ids=lambda m: f"{m.encoder.family} {m.kernels[-1]}")
def test_figures_without_a_cost_model_are_the_records(found):
    case = f"{NAMES[found.encoder.family]}_"
    records = [r for r in read_records(ROOT / found.file) if r["case"].startswith(case)]
    assert {(r["date"], r["gpu"]) for r in records} == {(found.date, found.gpu)}
    assert all(r["case"].endswith(f"_{found.encoder.layers}layers") for r in records)
    eager = {r["case"]: r["ms"] for r in records if r["mode"] == "eager"}
    mode = "plugin" if "exact" in found.kernels else "plugin_fast"
    graphs = sorted((r for r in records if r["mode"] == mode), key=lambda r: (r["tokens"], r["images"]))
    rounded = [[round(r[name], 1) for name in ("ms", "memory_gb")] for r in graphs]
    measured = [
        (r["tokens"], r["images"], round(eager[r["case"]], 1), *figures)
        for r, figures in zip(graphs, rounded, strict=True)
    ]
    assert [(r.tokens, r.images, r.eager_ms, r.graphs_ms, r.memory_gb) for r in found.rows] == measured


@pytest.mark.parametrize("found", [m for m in MEASURED if m.encoder.family == QWEN25_VL], ids=lambda m: m.kernels[-1])
def test_figures_hold_for_the_attention_that_records_are_of(found):
    """PyTorch's kernels or, in long frames, cuDNN's: by default these, with exact kernels those."""
    exact = "exact" in found.kernels
    records = [r for r in read_records(ROOT / found.file) if r["case"].startswith("qwen25_vl_")]
    graphs = [r for r in records if r["mode"] == ("plugin" if exact else "plugin_fast")]
    by_cudnn = any("sdpa" in name for r in graphs for name, *_ in r["top"])
    called = {"cudnn" if by_cudnn else "transformer_engine"}
    assert set(found.attention) == (called | {"auto"} if exact != by_cudnn else called)


def test_figures_of_other_attention_are_not_measured():
    def differs(**options):
        return forecast(config(model(Qwen25VLModelProvider, 32, 1280)), on(**options), None).differs

    said = "vision_cuda_graph_tuning.attention="
    assert differs(kernels="exact") == () and differs(kernels="exact", attention="transformer_engine") == ()
    for attention in ("cudnn", "flash"):
        assert differs(kernels="exact", attention=attention) == (f"{said}{attention}",)
    assert len({differs(attention=name) == () for name in ("transformer_engine", "cudnn")}) == 2


def test_figures_come_from_the_cost_model():
    found = forecast(config(), on(max_seq_length=16384), None)
    assert [row.tokens for row in found.rows] == [784, 2304, 8192, 16384]
    last = found.rows[-1]
    assert last.eager_ms == COST.eager_ms([16384]) and last.graphs_ms == COST.graph_ms(16384, [16384], 1, 16384)
    assert last.ratio == last.graphs_ms / last.eager_ms == found.ratios[1]
    assert found.memory_gb == last.memory_gb == COST.memory_gb(16384)
    assert found.holds and found.measured.fit is VISION_FIT


@pytest.mark.parametrize("kind, layers, width", [(Qwen3VLModelProvider, 24, 1024), (OtherModelProvider, 27, 1152)])
def test_another_encoder_has_no_figures(kind, layers, width):
    found = forecast(config(model(kind, layers, width)), on(), "h200")
    assert found.measured is None and found.rows == () and not found.holds
    text = render(Answer(options=options_with(on()), forecast=found, has_model=True))
    assert f"Nothing was measured of this {found.encoder}." in text and "GiB" not in text


def test_a_model_without_an_encoder_has_no_forecast():
    assert forecast(config(SimpleNamespace()), on(), None) is None and encoder_of(None) is None
    (line, _) = Answer(options=options_with(VisionGraphOptions()), has_model=True).lines
    assert (line.runs, line.memory) == ("none", "-")


def test_sizes_that_are_not_numbers_are_unknown():
    of = model(layers=SimpleNamespace(), width=None)
    assert encoder_of(of) == Encoder(QWEN3_VL) and "unknown size" in str(encoder_of(of))


@pytest.mark.parametrize(
    "of, options, gpu, said",
    [
        (model(), on(), "h100", "--gpu h100"),
        (model(), on(), "b200", "--gpu b200"),
        (model(tensor_model_parallel_size=4), on(), None, "model.tensor_model_parallel_size=4"),
        (model(context_parallel_size=2), on(), None, "model.context_parallel_size=2"),
        (model(freeze_vision_model=True), on(), None, "model.freeze_vision_model=True"),
        (model(), on(modules=("attn",)), None, "vision_cuda_graph_modules=['attn']"),
        (model(), on(offload_above_gb=14.0), None, "vision_cuda_graph_offload_above_gb=14.0"),
        (model(), on(streams=1), None, "vision_cuda_graph_tuning.streams=1"),
    ],
)
def test_what_was_not_measured_has_no_figure_in_the_table(of, options, gpu, said):
    found = forecast(config(of), options, gpu)
    assert found.differs == (said,) and not found.holds
    answer = Answer(options=options_with(options), forecast=found, has_model=True)
    assert (answer.lines[0].memory, answer.lines[0].ratio) == (NOT_MEASURED, NOT_MEASURED)
    assert f"Not measured here: {said}. The figures are of one NVIDIA H200" in " ".join(render(answer).split())
    assert as_json(found)["not_measured"] == [said]


@pytest.mark.parametrize(
    "kernels, said", [("exact", "vision_cuda_graph_tuning.kernels=exact"), ("auto", "default options")]
)
def test_figures_say_which_kernels_they_are_of(kernels, said):
    found = forecast(config(model(tensor_model_parallel_size=4)), on(kernels=kernels), None)
    text = render(Answer(options=options_with(on(kernels=kernels)), forecast=found, has_model=True))
    assert f"an encoder trained whole, and {said}." in " ".join(text.split())


def test_adapters_were_not_measured():
    class LoRA:
        pass

    assert forecast(config(peft=LoRA()), on(), "h200").differs == ("peft=LoRA",)


@pytest.mark.parametrize(
    "precision, said",
    [
        (None, ()),
        ("bf16_mixed", ()),
        ("fp16_mixed", ("mixed_precision=fp16_mixed",)),
        (SimpleNamespace(bf16=True, fp16=False, fp8=None), ()),
        (SimpleNamespace(bf16=True, fp8="hybrid"), ("mixed_precision.fp8=hybrid",)),
    ],
)
def test_other_precisions_were_not_measured(precision, said):
    assert forecast(config(mixed_precision=precision), on(), "h200").differs == said


def test_deterministic_algorithms_were_not_measured(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert forecast(config(), on(), None).differs == ("deterministic algorithms",)


def test_the_gpu_of_the_records_and_measured_options_have_figures():
    model_of_one = model(tensor_model_parallel_size=1, context_parallel_size=1, freeze_vision_model=False)
    options = on(modules=("attn", "mlp"), kernels="fast", attention="cudnn", slots=2, strict=True, buckets=(784,))
    assert forecast(config(model_of_one), options, "h200").holds
    exact = forecast(config(), replace(options, kernels="exact"), "h200")
    assert exact.holds and exact.measured.cost is VISION_EXACT
    records_only = forecast(config(model(Qwen25VLModelProvider, 32, 1280)), on(kernels="exact", buckets=(6720,)), None)
    assert records_only.holds and records_only.memory_gb == 14.0


@pytest.mark.parametrize(
    "options, largest",
    [
        (VisionGraphOptions(max_seq_length=8192), None),
        (on(), None),
        (on(max_seq_length=8192), 8192),
        (on(buckets=(784, 4096)), 4096),
        (on(buckets=(784, 4096), max_seq_length=8192), 8192),
        (on(max_seq_length=8192, buckets_max_gb=26.0), 8192),
        (on(buckets_max_gb=10.0), COST.tokens_within(10.0 * MEMORY_MARGIN)),
        (on(max_seq_length=16384, buckets_max_gb=10.0), COST.tokens_within(10.0 * MEMORY_MARGIN)),
    ],
)
def test_the_largest_bucket(options, largest):
    assert largest_bucket(options, COST) == largest
    assert FILLED == MEMORY_MARGIN


def test_without_a_limit_memory_goes_by_size():
    found = forecast(config(), on(), None)
    assert found.largest is found.memory_gb is None and [row.tokens for row in found.rows] == [784, 2304, 8192]
    assert Answer(options=options_with(on()), forecast=found, has_model=True).lines[0].memory == "by size"


def test_the_datas_own_sizes():
    mock = SimpleNamespace(image_size=(1024, 768), num_images=2)
    (row,) = forecast(config(dataset=mock), on(max_seq_length=16384), None).rows
    assert (row.tokens, row.images) == (4 * 3072, 4)
    assert row.eager_ms == COST.eager_ms([3072] * 4)
    assert row.graphs_ms == COST.graph_ms(4 * 3072, [3072] * 4, 4, 3072)


@pytest.mark.parametrize("size, patches", [((256, 256), 28 * 28), ((2048, 1536), 54 * 72)])
def test_the_datas_images_are_resized_as_bridge_does(size, patches):
    mock = SimpleNamespace(image_size=size, num_images=1)
    assert forecast(config(dataset=mock), on(), None).rows[0].tokens == 2 * patches


def test_a_microbatch_beyond_the_largest_bucket_runs_eager():
    mock = SimpleNamespace(image_size=[1024, 768], num_images=1)
    row, *usual = forecast(config(dataset=mock), on(max_seq_length=4096), None).rows
    assert row.eager_ms and row.graphs_ms is None and row.note == "runs eager: the largest bucket has 4096"
    assert [r.tokens for r in usual] == [784, 2304, 4096]


def test_sizes_outside_the_records_have_no_figures():
    mock = SimpleNamespace(image_size=(1024, 768), num_images=6)
    row, *usual = forecast(config(dataset=mock), on(), None).rows
    assert (row.tokens, row.eager_ms, row.graphs_ms, row.memory_gb) == (12 * 3072, None, None, None)
    assert row.note == "measured from 784 to 32768 tokens only" and all(r.ratio for r in usual)
    assert forecast(config(), on(max_seq_length=65536), None).memory_gb is None


def test_the_text():
    answer = Answer(
        options=options_with(on(max_seq_length=16384, buckets_max_gb=26.0)),
        forecast=forecast(config(), on(max_seq_length=16384, buckets_max_gb=26.0), "h200"),
        has_model=True,
    )
    text = render(answer)
    assert text == TEXT and max(map(len, text.splitlines())) <= 80


TEXT = """\
part            runs    memory a  time/eager  why
                        slot
vision encoder  graphs  16.8 GiB  0.09-0.81   one graph per bucket over the
                                              whole encoder; buckets chosen from
                                              what warm-up steps show, up to
                                              16384 tokens
language model  eager   -         -           cuda_graph_impl=none
options: vision_cuda_graph_buckets_max_gb=26.0

Qwen3-VL encoder of 27 layers of 1152, forward and backward of a microbatch:
  tokens  images   eager ms  graphs ms  ratio  GiB a slot
     784       1      117.1       10.3   0.09         0.9
    2304       1      117.1       26.2   0.22         2.5
    8192       1      209.6      148.0   0.71         8.4
   16384       1      586.5      476.4   0.81        16.8
By a cost model fitted to docs/benchmarks/vision_bench.jsonl, 2026-11-22, NVIDIA
  H200. Records left out of the fit in turn are within 24% (eager), 3% (graphs),
  22% (ratio) and 12% (memory). Eager waits for the host: a busier one took 180
  ms for 1024 tokens."""


def test_names_longer_than_a_cell_are_divided_at_their_joints():
    cells = ["set model.vision_cuda_graph_tuning.gradient_accumulation_fusion=false there"]
    lines = text_table([cells], [34])
    assert "".join(lines).replace(" ", "") == (
        "setmodel.vision_cuda_graph_tuning.gradient_accumulation_fusion=falsethere"
    )
    assert all(len(line) <= 34 for line in lines) and all(line[-1] in "_.= e" for line in lines)
