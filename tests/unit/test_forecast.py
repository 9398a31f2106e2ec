"""What `bridge-cg explain` expects of vision graphs, against the records and the limits that it names."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli.explain.command import NOT_MEASURED, Answer, render
from bridge_cg_plugin.cli.explain.measured import vision_forecast as forecast
from bridge_cg_plugin.cli.explain.models import encoder_of
from bridge_cg_plugin.cli.planner.records import TOWER, of_encoder
from bridge_cg_plugin.options import VisionGraphOptions, graph_options


def options_with(vision):
    return replace(graph_options({}), vision=vision)


class Qwen3VLModelProvider:
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


def test_figures_are_the_records_that_the_largest_bucket_takes():
    found = forecast(config(), on(max_seq_length=16384), None)
    (measured,) = of_encoder(TOWER, "auto")
    assert found.rows == measured.rows[:-1] and found.rows[-1].tokens == 16384
    assert found.ratios == (min(r.ratio for r in found.rows), found.rows[-1].ratio)
    assert found.memory_gb == found.rows[-1].memory_gb and found.holds
    assert forecast(config(), on(max_seq_length=4096), None).memory_gb == measured.rows[2].memory_gb * 4096 / 3136


def test_a_model_without_an_encoder_has_no_forecast():
    assert forecast(config(SimpleNamespace()), on(), None) is None and encoder_of(None) is None
    (line, _) = Answer(options=options_with(VisionGraphOptions()), has_model=True).lines
    assert (line.runs, line.memory) == ("none", "-")


@pytest.mark.parametrize(
    "of, options, gpu, said",
    [
        (model(), on(), "h100", "--gpu h100"),
        (model(tensor_model_parallel_size=4), on(), None, "model.tensor_model_parallel_size=4"),
        (model(), on(offload_above_gb=14.0), None, "vision_cuda_graph_offload_above_gb=14.0"),
    ],
)
def test_what_was_not_measured_has_no_figure_in_the_table(of, options, gpu, said):
    found = forecast(config(of), options, gpu)
    assert found.differs == (said,) and not found.holds
    answer = Answer(options=options_with(options), forecast=found, has_model=True)
    assert (answer.lines[0].memory, answer.lines[0].ratio) == (NOT_MEASURED, NOT_MEASURED)
    assert f"Not measured here: {said}. The figures are of one NVIDIA H200" in " ".join(render(answer).split())
    assert found.as_json()["not_measured"] == [said]


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
vision encoder  graphs  15.9 GiB  0.10-0.81   one graph per bucket over the
                                              whole encoder; buckets chosen from
                                              what warm-up steps show, up to
                                              16384 tokens
language model  eager   -         -           cuda_graph_impl=none
options: vision_cuda_graph_buckets_max_gb=26.0

Qwen3-VL encoder of 27 layers of 1152, forward and backward of a microbatch:
case         tokens  eager ms  graphs ms  ratio  GiB a slot
1x448           784     106.8       10.3   0.10         0.9
1x768          2304     125.4       26.3   0.21         2.7
4x448          3136     125.0       27.4   0.22         3.7
video16        6400     146.3       48.9   0.33         7.0
8mix           6720     147.3       57.6   0.39         7.0
tokens_8192    8192     209.3      147.7   0.71         8.0
1x2048        16384     583.1      473.5   0.81        15.9
Records of docs/benchmarks/vision_bench.jsonl, 2026-11-22, NVIDIA H200. Eager
  waits for the host: its time depends on how fast and how busy that is."""
