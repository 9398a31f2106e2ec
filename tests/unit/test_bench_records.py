"""Records of benchmarks: their form, what is computed without a GPU, what tables and plots make of them."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_tools.benchmarks.measuring.measure import family, kernels_of, median_times, overlap_us
from bridge_cg_tools.benchmarks.models.arithmetic import (
    TFLOPS,
    LanguageModelShape,
    TowerShape,
    Trained,
    language_model_flops,
    limit_ms,
    shape_of,
    step_flops,
)
from bridge_cg_tools.benchmarks.models.workloads import (
    CASES,
    COCO_PIXELS,
    COCO_RATIOS,
    SWEEP,
    coco_microbatches,
    frames_of,
    one_image,
    tokens_of,
    workloads,
)
from bridge_cg_tools.benchmarks.pages.markdown import fill, origin, stack
from bridge_cg_tools.benchmarks.pages.memory_page import memory_parts
from bridge_cg_tools.benchmarks.pages.performance_page import performance_parts
from bridge_cg_tools.benchmarks.pages.results_page import PAGES
from bridge_cg_tools.benchmarks.pages.upstream_page import upstream_parts
from bridge_cg_tools.benchmarks.pages.vision_page import GRAPHS, encoder_parts, kernel_parts, vision_parts
from bridge_cg_tools.benchmarks.records import results

from .towers import tower

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
ORIGIN = {
    "repeats": 9,
    "seed": 0,
    "date": "2026-11-21",
    "gpu": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "commit": "abc"},
    "command": "python x.py",
}


def record(case="1x448", mode="eager", **fields):
    return {"case": case, "mode": mode, "tokens": 784, "images": 1, "ms": 75.0, "ratio": 1.0, **ORIGIN, **fields}


OF_VISION = [performance_parts, upstream_parts, vision_parts, kernel_parts, encoder_parts, memory_parts]


# Their form


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda p: p.name)
def test_committed_records_are_as_the_format_says(path):
    records = results.read_records(path)
    assert records
    for one in records:
        results.check_record(one)


def test_every_field_is_in_the_formats_table():
    text = (FOLDER / "format.md").read_text()
    missing = [name for name in results.FIELDS if f"`{name}`" not in text]
    assert not missing


@pytest.mark.parametrize(
    "change, said",
    [
        ({"gpu": None}, "gpu"),
        ({"speed": 3}, "unknown field 'speed'"),
        ({"ms": "75"}, "ms='75'"),
        ({"kernels": True}, "kernels=True"),
        ({"bit_equal": 1}, "bit_equal=1"),
        ({"tokens": 7.5}, "tokens=7.5"),
    ],
)
def test_other_records_are_refused(change, said, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        results.put_record(tmp_path / "r.jsonl", record(**change))
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("missing", results.REQUIRED)
def test_a_record_says_where_it_comes_from(missing):
    one = record()
    del one[missing]
    with pytest.raises(ValueError, match=f"{missing} missing"):
        results.check_record(one)


def test_a_record_has_a_measurement_or_an_error():
    one = record()
    del one["ms"]
    with pytest.raises(ValueError, match="neither a measurement"):
        results.check_record(one)
    results.check_record({**one, "error": "out of memory"})


def test_a_record_replaces_the_one_of_its_case_and_mode(tmp_path):
    path = tmp_path / "r.jsonl"
    for one in (record(), record(mode="plugin"), record(case="8mix"), record(ms=70.0)):
        results.put_record(path, one)
    found = {(r["case"], r["mode"]): r["ms"] for r in results.read_records(path)}
    assert found == {("1x448", "eager"): 70.0, ("1x448", "plugin"): 75.0, ("8mix", "eager"): 75.0}
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_gpu_measured_records_cannot_be_replaced_by_accident():
    with pytest.raises(ValueError, match="--out: without a GPU .* name a file"):
        results.output_path(None, "vision_bench.jsonl")
    assert results.output_path(Path("x.jsonl"), "vision_bench.jsonl") == Path("x.jsonl")


# What is computed


def test_the_limit_is_the_published_one():
    """Figures that were computed on their own, by hand, for an earlier study."""
    expected = {"1x448": 3.4, "1x768": 12, "4x448": 14, "8mix": 32, "video16": 26, "1x2048": 230}
    assert {name: limit_ms(grid) for name, grid in CASES.items()} == pytest.approx(expected, rel=0.03)


rows = st.tuples(st.integers(1, 4), st.integers(1, 40).map(lambda n: 2 * n), st.integers(1, 40).map(lambda n: 2 * n))
grids = st.lists(rows, min_size=1, max_size=5)


@given(grids, grids)
def test_images_cost_what_they_cost_alone(one, other):
    assert step_flops([*one, *other]) == pytest.approx(step_flops(one) + step_flops(other))


@given(st.integers(1, 8), st.integers(1, 30).map(lambda n: 2 * n))
def test_one_large_frame_costs_more_than_as_many_tokens_in_small_ones(frames, side):
    large, small = step_flops([(1, side, side * frames)]), step_flops([(frames, side, side)])
    assert large >= small and (large > small) == (frames > 1)


def test_the_limit_grows_with_the_tower():
    grid = CASES["1x448"]
    assert limit_ms(grid) == pytest.approx(step_flops(grid) / TFLOPS / 1e9)
    assert step_flops(grid, TowerShape(layers=54)) > 1.8 * step_flops(grid)


QWEN3_8B = LanguageModelShape(layers=36, hidden=4096, queries=4096, keys=1024, mlp=12288, vocabulary=151_936)


def test_a_token_costs_six_operations_a_weight_but_for_attention():
    """Qwen3-8B's published count without embeddings is 6.95e9; the output layer has 0.62e9 more."""
    assert language_model_flops([1], QWEN3_8B) == pytest.approx(6 * (6.95e9 + 0.62e9), rel=5e-3)


def test_causal_attention_grows_with_the_square_of_a_document():
    linear = language_model_flops([1], QWEN3_8B) * 4096
    apart = language_model_flops([1024] * 4, QWEN3_8B) - linear
    assert language_model_flops([4096], QWEN3_8B) - linear == pytest.approx(4 * apart, rel=1e-2)
    assert language_model_flops([4096], QWEN3_8B) - linear == pytest.approx(3.5 * 36 * 2 * 4096**2 * 4096, rel=1e-2)


def test_frozen_weights_have_no_product_of_their_own_gradient():
    grid, frozen = CASES["1x448"], Trained(weights=False)
    assert language_model_flops([1], QWEN3_8B, frozen) == pytest.approx(
        2 / 3 * language_model_flops([1], QWEN3_8B), 1e-3
    )
    forward = step_flops(grid, trained=Trained(weights=False, inputs=False))
    assert forward < step_flops(grid, trained=frozen) < step_flops(grid) < 3.2 * forward


def test_a_models_own_sizes_are_read():
    shape = shape_of(tower())
    assert (shape.layers, shape.hidden, shape.mlp, shape.mergers, shape.out) == (3, 32, 64, 3, 24)
    assert (shape.patch, shape.merged) == (1536, 4)


@pytest.mark.parametrize("tokens", SWEEP)
def test_one_image_has_the_tokens_and_is_nearly_square(tokens):
    ((frames, height, width),) = one_image(tokens)
    assert (frames, height * width) == (1, tokens)
    assert width in (height, 2 * height) and height % 2 == 0


def test_a_size_that_is_a_case_is_measured_once():
    found = workloads(CASES, SWEEP)
    assert "tokens_16384" not in found and len(found) == len(CASES) + len(SWEEP) - 1
    assert "tokens_16384" in workloads([], SWEEP)


@pytest.mark.parametrize(
    "cases, tokens, said",
    [(["2x448"], [], "--cases 2x448: it must"), ([], [300], "--tokens 300: it must"), ([], [2], "--tokens 2")],
)
def test_unknown_cases_are_refused(cases, tokens, said):
    with pytest.raises(ValueError, match=said):
        workloads(cases, tokens)


def test_drawn_images_have_the_published_distribution():
    images = [row for grid in coco_microbatches(1500) for row in grid]
    assert all(t == 1 and h % 2 == 0 and w % 2 == 0 and max(h, w) <= 40 for t, h, w in images)
    pixels = sorted(h * w * 256 for _, h, w in images)
    ratios = sorted(h / w for _, h, w in images)
    # Sides are rounded to 32 pixels and the longer one is cut at 640, so the quantiles move a little.
    for values, (low, high) in ((pixels, COCO_PIXELS), (ratios, COCO_RATIOS)):
        assert values[len(values) // 20] == pytest.approx(low, rel=0.12)
        assert values[-len(values) // 20] == pytest.approx(high, rel=0.12)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 1000))
def test_a_seed_draws_the_same_microbatches_again(count, most, seed):
    drawn = coco_microbatches(count, most, seed)
    assert drawn == coco_microbatches(count, most, seed)
    assert len(drawn) == count and all(1 <= len(grid) <= most for grid in drawn)
    assert all(tokens_of(grid) % 4 == 0 and frames_of(grid) == len(grid) for grid in drawn)


# What is measured


def test_kernels_that_overlap_are_busy_once():
    found = kernels_of([(0, 1000, "gemm"), (500, 1500, "gemm"), (2000, 3000, "Memcpy DtoD")])
    assert (found.count, found.busy_ms) == (3, pytest.approx(2.5))
    assert found.by_name == {"gemm": (pytest.approx(2.0), 2), "Memcpy DtoD": (pytest.approx(1.0), 1)}
    assert found.families() == {"matrix products": pytest.approx(2.0), "copies": pytest.approx(1.0)}
    assert found.largest(1) == [("gemm", pytest.approx(2.0), 2)]


spans = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5)).map(lambda s: (s[0], s[0] + s[1], "k")), max_size=30)


@given(spans)
def test_busy_time_is_at_most_the_kernels_and_the_span(found):
    busy, total = kernels_of(found).busy_ms, sum(b - a for a, b, _ in found) / 1e3
    whole = (max(b for _, b, _ in found) - min(a for a, _, _ in found)) / 1e3 if found else 0.0
    longest = max((b - a for a, b, _ in found), default=0.0) / 1e3
    assert longest - 1e-6 <= busy <= min(total, whole) + 1e-6


@pytest.mark.parametrize(
    "name, expected",
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>", "attention: dot_do_o"),
        ("void transformer_engine::normalization::ln_bwd_finalize_tuned_kernel<...>", "norms"),
        ("_layernorm_backward", "norms"),
        ("_rotate", "rotary embedding"),
        ("_bias_gelu_backward", "bias and activation"),
        ("_bias_residual", "bias and activation"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::multi_tensor_apply_kernel<...>", "gradient accumulation"),
        ("void at::native::reduce_kernel<128, 4, ...>", "reductions"),
        ("_add_partials", "reductions"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "element-wise"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda...>", "copies"),
        ("something_new", "other"),
    ],
)
def test_kernels_have_a_family(name, expected):
    assert family(name) == expected


def test_how_long_copies_ran_beside_kernels():
    assert overlap_us([(0, 10)], [(5, 7), (6, 8), (9, 20)]) == 4
    assert overlap_us([(0, 10), (5, 12)], [(0, 20)]) == 12  # two copies at once are one stretch of time
    assert overlap_us([(0, 1)], []) == overlap_us([], [(0, 1)]) == 0


def test_medians_and_how_many_runs_they_are_of():
    calls = []

    def run(between):
        calls.append(1)
        between()

    times = median_times(run, 7, warmup=2)
    assert len(calls) == 9 and times.repeats == 7
    assert 0 <= times.fwd_ms <= times.ms and times.host_ms >= 0
    assert median_times(run, 1).repeats == 3
    assert median_times(run, 1000, seconds=0.0).repeats == 3


# What tables and plots make of them


def sample():
    bench = []
    for name, grid in workloads(CASES, SWEEP).items():
        size = {"tokens": tokens_of(grid), "images": len(grid)}
        bench += [
            record(name, "eager", **size, ms=100.0, host_ms=90.0, eager_memory_gb=3.0),
            record(name, "plugin", **size, ms=40.0, ratio=0.4, bit_equal=True, forward_rel=0.0, grad_rel=0.01),
            record(name, "limit", **size, ms=limit_ms(grid)),
        ]
    bench.append(record("1x448", "plugin_fast", ms=38.0, ratio=0.38, forward_rel=0.0, grad_rel=0.02))
    bench.append(record("1x448", "upstream", ms=20.0, ratio=0.2, wrong="wrong", forward_rel=0.5, grad_rel=2.0))
    failed = record("1x2048", "upstream", error="ValueError: a | b", tokens=16384)
    del failed["ms"]
    families = {"matrix products": 20.0, "attention": 10.0}
    profiles = [
        record(case, mode, families=families, gpu_busy_ms=30.0, kernels=1700, top=[])
        for case in CASES
        for mode in ("eager", "plugin")
    ]
    coco = [
        record("coco", "eager", microbatches=64),
        record("coco", "plugin", microbatches=64, replays=63, fallbacks={"eager_is_faster": 1}, padding_share=0.02),
    ]
    runs = (("eager", 560.0, [4.0, 2.0]), ("plugin", 300.0, [4.0, 2.02]), ("upstream", 500.0, [4.4, 3.0]))
    steps = [record("mixed_4x2048", mode, ms=ms, losses=losses) for mode, ms, losses in runs]
    kinds = {"weights": 3e-3, "biases": 2e-3, "norms": 1e-3}
    figures = {"fp32_output": 1e-2, "fp32_median": 2e-2, "fp32_mean": 3e-2, "fp32_worst": 4e-2, "fp32_kinds": kinds}
    precise = [record("1x448_27layers", mode, **figures) for mode in ("eager", "plugin_fast")]
    moved = {"slots": 1, "memory_gb": 16.0, "pinned_gb": 0.0, "bit_equal": True, "memory_ratio": 1.0, "ratio": 1.0}
    less = {**moved, "memory_ratio": 0.4, "ratio": 1.02, "copy_ms": 200.0, "copy_overlap": 0.9, "pinned_gb": 6.0}
    leaving = [record("1x2048", mode, tokens=16384, **less) for mode in ("offload", "mixed_40")]
    unmet = record("1x2048", "mixed_10", error="CaptureError: too little", slots=1)
    del unmet["ms"]
    noise = {"forward_rel": 0.0, "grad_rel": 0.02, "grad_noise": 0.03}
    others = [
        record("siglip_2_images_27layers", "eager", tokens=8192, ms=135.0),
        record("siglip_2_images_27layers", "plugin", tokens=8192, ms=134.0, ratio=0.99, memory_gb=7.9, **noise),
        record("qwen25_vl_8mix_32layers", "eager", tokens=6720, ms=600.0),
        record("qwen25_vl_8mix_32layers", "plugin", tokens=6720, ms=180.0, ratio=0.3, memory_gb=14.1, **noise),
        record("qwen25_vl_8mix_32layers", "plugin_fast", tokens=6720, ms=120.0, ratio=0.2, **noise),
    ]
    broken = record("mixed_28x2560", "eager", error="out of memory: x")
    del broken["ms"]
    short = record("limit", "eager", error="OutOfSpace: CUDA out of memory. Tried to", limit_gb=40.0)
    del short["ms"]
    look = {"allocated_gb": 4.0, "reserved_gb": 5.0, "pinned_gb": 1.0, "resident_gb": 2.0}
    figures = {"peak_gb": 39.0, "pinned_gb": 9.0, "ratio": 0.8, "loss_rel": 1e-5, "losses": [10.0, 9.0]}
    trained = [
        short,
        record("limit", "plugin_mixed", limit_gb=40.0, **figures),
        record("flat", "plugin_offload", memory_steps={"10": look, "200": look}, flat=True),
    ]
    return {
        "vision_bench": [*bench, failed],
        "vision_profile": profiles,
        "vision_sizes": coco,
        "vision_captures": [
            record("later_784", mode, tokens=784, ms=240.0, grad_rel=0.01) for mode in ("cold", "warm")
        ],
        "steps": [*steps, broken],
        "vision_precision": precise,
        "offload": [record("1x2048", "none", tokens=16384, **moved), *leaving, unmet],
        "encoders": others,
        "offload_training": trained,
    }


@pytest.fixture
def folder(tmp_path):
    for name, records in sample().items():
        for one in records:
            results.check_record(one)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def lines(text, start):
    return [line for line in text.splitlines() if line.startswith(start)]


def test_tables_of_the_performance_page(folder):
    parts = performance_parts(folder)
    assert lines(parts["gains"], "| 1 of 448 x 448 |") == [
        "| 1 of 448 x 448 | 784 | 100.0 | 38.0 | **2.6** | 3.4 | 11.1 |"
    ]
    assert "| mixed | 4x2048 | 560 | 300 | **1.9** | 1e-02 |" in parts["training"]
    assert "28x2560" not in parts["training"]  # without an eager time there is no speedup


def test_tables_of_upstreams_graphs(folder):
    parts = upstream_parts(folder)
    assert lines(parts["upstream"], "| 1 of") == ["| 1 of 448 x 448 | 0.50 | 0 | 2.00 | 0.010 |  |"]
    assert lines(parts["upstream-training"], "| mixed") == ["| mixed | 4x2048 | 2 | 1e-01 | 0e+00 | 5e-01 | 1e-02 |"]


def test_default_options_have_two_streams_for_few_tokens(folder):
    timed = {"forward_rel": 0.0, "grad_rel": 0.02}
    records = [
        record(case, mode, ms=ms, tokens=tokens, **timed)
        for case, tokens in (("1x448", 784), ("8mix", 6720))
        for mode, ms in (("eager", 100.0), ("plugin_fast", 50.0), ("plugin_streams", 25.0))
    ]
    (folder / "vision_bench.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    gains = performance_parts(folder)["gains"]
    assert "| 784 | 100.0 | 25.0 | **4.0** |" in gains and "| 6720 | 100.0 | 50.0 | **2.0** |" in gains


def test_tables_of_the_vision_encoder(folder):
    parts = vision_parts(folder)
    # The last figure is the fastest mode over the limit.
    assert "| 1x448 | 784 | 0.40 | 0.38 |  |  |  | 0.10 | 11.1 |" in parts["ratios"]
    assert lines(parts["times"], "| 1x448 | eager |") == ["| 1x448 | eager | 100.0 | 1.00 | 90.0 |  |  |  | 3.0 |"]
    assert lines(parts["differences"], "| 1x448 | plugin |")[0].startswith("| 1x448 | plugin | bit-equal | 1.0e-02 |")
    assert lines(parts["differences"], "| 1x448 | upstream |") == ["| 1x448 | upstream | 5e-01 | 2.0e+00 |  | wrong |"]
    assert lines(parts["failures"], "| upstream |") == ["| upstream | 1x2048 | `ValueError: a / b` |"]
    assert "1x2048 | upstream" not in parts["times"] + parts["differences"]
    assert len(lines(parts["sweep"], "| ")) == 2 + len(SWEEP) + 2  # head, rule; 784 and 2304 are single images, too
    assert "| 2.0% |  | eager_is_faster 1 |" in parts["sizes"]
    assert "| later | 784 | 0.24 | 0.24 | 1.0e-02 |" in parts["captures"]
    assert "| mixed | 4x2048 | 560 | 500 (0.89, 5e-01) | 300 (0.54, 1e-02) |" in parts["steps"]
    assert "`out of memory: x`" in parts["steps"]


def test_tables_of_kernels_and_precision(folder):
    parts = kernel_parts(folder)
    first = parts["families"].split("\n\n")[1]
    assert lines(first, "| ")[0] == "| 1x448, ms | eager | plugin |"
    assert "| matrix products | 20.0 | 20.0 |" in first and "| commit | abc | abc |" in first
    assert parts["families"].count("| GPU busy | 30.0 | 30.0 |") == len(CASES)
    assert lines(parts["precision"], "| 27 layers |") and lines(parts["precision"], "| 1x448 | plugin_fast |") == [
        "| 1x448 | plugin_fast | 1.00e-02 | 2.00e-02 | 3.00e-02 | 4.00e-02 | 3.00e-03 | 2.00e-03 | 1.00e-03 |"
    ]


def test_tables_of_other_encoders(folder):
    parts = encoder_parts(folder)
    assert "| qwen25_vl_8mix | 32 | 6720 | plugin | 180.0 | 0.30 |  | 14.1 |" in parts["encoders"]
    assert "| qwen25_vl_8mix | 32 | 6720 | plugin_fast | 120.0 | 0.20 |  |  |" in parts["encoders"]
    assert "| siglip_2_images | plugin | 0e+00 | 2.0e-02 | 3.0e-02 |" in parts["encoder-differences"]
    assert "eager |" not in parts["encoder-differences"]


def test_the_table_of_encoders_mixes(tmp_path):
    far = {"fp32_output": 1e-2, "fp32_worst": 5e-2}
    mixes = []
    for number, (output, gradient) in enumerate(((0.0, 1e-2), (1e-3, 3e-2))):
        case, eager = f"nemotron_vl_{number}_32layers", record()
        eager = {name: value for name, value in eager.items() if name not in ("ms", "ratio")}
        mixes.append({**eager, "case": case, "mode": "eager", "fp32_mean": 2e-2, **far})
        found = {"forward_rel": output, "forward_noise": 0.0, "bit_equal": output == 0.0, "grad_rel": gradient}
        found |= {"grad_noise": 1e-2, "bucket": "1088", "fallback": None, "fp32_mean": 4e-2}
        mixes.append({**eager, "case": case, "mode": "plugin", **found, **far})
    for one in mixes:
        results.check_record(one)
    results.write_records(tmp_path / "encoders_parity.jsonl", mixes)
    found = encoder_parts(tmp_path)["encoder-parity"]
    assert lines(found, "| nemotron_vl |") == ["| nemotron_vl | 2 | 1 | 1e-03 | 3e-02 | 1e-02 | 4e-02 | 2e-02 |"]


def test_tables_of_memory(folder):
    parts = memory_parts(folder)
    assert lines(parts["memory"], "| 1x2048 | mixed 40 |")[0].endswith(
        "| **40%** | 75.0 | **1.020** | 6.0 | 200 (90%) | yes |"
    )
    assert lines(parts["memory"], "| 1x2048 | mixed 10 |")[0].endswith("| `CaptureError: too little` |")
    assert lines(parts["memory-limit"], "| eager |")[0].endswith("| `OutOfSpace: CUDA out of memory` |")
    mixed = lines(parts["memory-limit"], "| plugin mixed |")[0]
    assert "| 40.0 | 39.0 | 9.0 |" in mixed and "| 0.80 | 10.0000 to 9.0000 | 1.0e-05 |" in mixed
    assert lines(parts["memory-flat"], "| 200 |") == ["| 200 | 4.0000 | 5.0000 | 1.0000 | 2.0000 |"]


@pytest.mark.parametrize("parts", OF_VISION)
def test_rows_of_a_table_have_as_many_cells_as_its_head(parts, folder):
    for text in parts(folder).values():
        for block in text.split("\n\n"):
            assert len({line.count(" | ") for line in lines(block, "| ")}) <= 1, block


@pytest.mark.parametrize("parts", OF_VISION)
def test_a_page_without_records_has_no_tables(parts, tmp_path):
    assert set(parts(tmp_path).values()) == {""}


@pytest.mark.parametrize("name", PAGES)
def test_every_part_has_its_place_on_its_page(name):
    text, parts = (ROOT / name).read_text(), PAGES[name](FOLDER)
    assert fill(text, parts) == text, "run scripts/performance/tables.py"
    empty = fill(text, dict.fromkeys(parts, ""))
    assert all(part not in empty for part in parts.values() if part)


@pytest.mark.parametrize(
    "page", [*sorted(FOLDER.glob("*.md")), ROOT / "docs/performance.md", ROOT / "README.md"], ids=lambda p: p.name
)
def test_tables_of_results_are_narrow(page):
    """A reader sees about 7 columns of numbers at 1400 pixels; 9 columns where they are short."""
    most = 7 if page.name == "performance.md" else 9
    wide = [line for line in lines(page.read_text(), "| ---") if line.count("---") > most]
    assert not wide


def test_the_performance_page_is_short():
    text = (ROOT / "docs/performance.md").read_text()
    assert len(text.split()) <= 900 and len(lines(text, "| ---")) <= 2


def measured(name):
    return {(r["case"], r["mode"]): r for r in results.read_records(FOLDER / f"{name}.jsonl")}


def figures():
    """Return what the text of the performance page takes from records."""
    bench, coco, profile = measured("vision_bench"), measured("vision_sizes"), measured("vision_profile")
    small, large = bench["1x448", "eager"], bench["1x2048", "eager"]["ms"]
    eager_ms, replayed = coco["coco", "eager"]["ms"], coco["coco", "on_demand"]
    fast, flash = (large / bench["1x2048", mode]["ms"] for mode in ("plugin_fast", "plugin_flash"))
    kernels = profile["1x2048", "plugin_fast"]
    mixed = profile["8mix", "plugin_fast"]
    passes = ("norms", "rotary embedding", "bias and activation", "copies", "element-wise")
    moving = sum(mixed["families"][name] for name in passes)
    less = measured("offload")["1x2048", "mixed_25"]
    graphs = [(case, r["ms"]) for (case, mode), r in bench.items() if mode in GRAPHS and case in CASES]
    over = [min(ms for of, ms in graphs if of == case) / bench[case, "limit"]["ms"] for case in CASES]
    siglip = (measured("encoders")[f"siglip_{n}_images_27layers", "plugin"]["ratio"] - 1 for n in (2, 4))
    return [
        f"busy for {small['gpu_busy_ms']:.0f} of {small['ms']:.0f} ms",
        f"the speedup is {eager_ms / replayed['ms']:.1f} with {replayed['padding_share']:.1%} padding",
        f"on demand took {replayed['capture_s']:.0f} s in {replayed['microbatches']} microbatches",
        f"at once took {coco['coco', 'plugin']['capture_s']:.0f} s",
        "take {:.0%} longer than eager with two images, and {:.0%} longer with four".format(*siglip),
        f"increases the speedup from {fast:.1f} to {flash:.1f}",
        f"differ from eager's by {bench['1x2048', 'plugin_flash']['forward_rel']:.0e}".replace("e-0", "e-"),
        f"to {less['memory_ratio']:.0%} for {less['ratio'] - 1:.0%} more time",
        f"takes {min(over):.1f} to {max(over):.1f} times the limit",
        f"the matrix products alone take {profile['1x448', 'plugin_fast']['families']['matrix products']:.1f} ms",
        f"attention takes {kernels['families']['attention']:.0f} of {kernels['gpu_busy_ms']:.0f} ms",
        f"kernels take {moving:.0f} of {mixed['gpu_busy_ms']:.0f} ms",
    ]


def test_figures_in_the_text_follow_from_records():
    text = " ".join((ROOT / "docs/performance.md").read_text().replace(" %", "%").split())
    assert not [figure for figure in figures() if figure not in text]


def test_a_page_without_marks_is_an_error():
    with pytest.raises(ValueError, match="no marks <!-- goals -->"):
        fill("text", {"goals": "x"})


def test_where_it_was_measured_is_said_by_what_was_measured():
    computed = record(mode="limit", gpu="none", versions={"torch": "1", "commit": "old"})
    assert "NVIDIA H200" in origin([computed, record()]) and "old" not in origin([computed, record()])


def test_records_of_several_days_name_the_first_and_the_last():
    days = [{**record(), "date": f"2026-11-{day}"} for day in (22, 24, 21)]
    assert ", 2026-11-21 to 2026-11-24, " in origin(days) and ", 2026-11-22, " in origin(days[:1])


def test_releases_of_the_stack_are_named_only_where_asked_for():
    measured = {**record(), "versions": {**stack(), "megatron-bridge": "0.4.2", "commit": "abc"}}
    assert "2026-11-21, megatron-bridge 0.4.2, commit abc, " in origin([{**measured, "date": "2026-11-21"}])
    assert f"torch {stack()['torch']}, " in origin([measured], with_stack=True)


def test_plots_are_drawn_from_records(folder):
    from bridge_cg_tools.benchmarks.pages import plots

    written = plots.draw(folder)
    assert [path.name for path in written] == [name for name in plots.PLOTS if name != "whole_step.svg"]
    texts = {path.name: path.read_text() for path in written}
    assert "upstream&#39;s graphs (wrong result)" in texts["time.svg"] or "upstream's graphs" in texts["time.svg"]
    assert "arithmetic limit over time" in texts["limit.svg"]
    assert "attention" in texts["families.svg"] and "1x448, plugin" in texts["families.svg"]
    assert "memory targets" in texts["memory.svg"] and ">offload<" in texts["memory.svg"]
    assert ">560<" in texts["steps.svg"] and "optimizer step" in texts["losses.svg"]
    assert plots.draw(folder) == written
    assert {path.name: path.read_text() for path in written} == texts  # the same records give the same files


def test_nothing_is_drawn_without_records(tmp_path):
    from bridge_cg_tools.benchmarks.pages import plots

    assert plots.draw(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_a_share_of_the_limit_is_never_drawn_for_errors(folder):
    from bridge_cg_tools.benchmarks.pages import plots

    found = plots.measured(results.read_records(folder / "vision_bench.jsonl"))
    assert found and all("error" not in r and math.isfinite(r["ms"]) for r in found)
