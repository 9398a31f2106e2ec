"""Records of benchmarks: their form, and what tables and plots make of them."""

import json
import math
import re
from pathlib import Path

import pytest

from bridge_cg_plugin.cli.runs import results
from scripts.performance.models.arithmetic import (
    limit_ms,
)
from scripts.performance.models.workloads import (
    CASES,
    SWEEP,
    tokens_of,
    workloads,
)
from scripts.performance.pages.markdown import fill, origin, stack
from scripts.performance.pages.memory_page import memory_parts
from scripts.performance.pages.performance_page import performance_parts
from scripts.performance.pages.results_page import PAGES
from scripts.performance.pages.upstream_page import upstream_parts
from scripts.performance.pages.vision_page import GRAPHS, encoder_parts, kernel_parts, vision_parts

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
    with pytest.raises(ValueError, match="without a GPU. Pass --out FILE"):
        results.output_path(None, "vision_bench.jsonl")
    assert results.output_path(Path("x.jsonl"), "vision_bench.jsonl") == Path("x.jsonl")


# What is computed


# What is measured


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
    less["gpu_busy_ms"] = 70.0
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
    assert lines(parts["encoders"], "| qwen25_vl_8mix |") == [
        "| qwen25_vl_8mix | 6720 | 600.0 |  | 180.0 | **0.30** | 120.0 | **0.20** | 14.1 |"
    ]
    assert not parts["encoder-flash"]
    assert "| siglip_2_images | 27 | exact | 0e+00 | 2.0e-02 | 3.0e-02 |" in parts["encoder-differences"]


def test_the_table_of_flash_attention(tmp_path):
    case = {"case": "glm45v_1x8192_24layers"}
    differences = {"forward_rel": 3e-2, "forward_noise": 0.0, "grad_noise": 2e-2, "bit_equal": False}
    ways = {"eager": {}, "plugin_fast": {"ratio": 0.6, "grad_rel": 4e-2, **differences}}
    ways["plugin_flash"] = {"ms": 50.0, "ratio": 0.5, "grad_rel": 5e-2, **differences}
    results.write_records(tmp_path / "encoders.jsonl", [record() | case | {"mode": m} | ways[m] for m in ways])
    results.write_records(tmp_path / "encoders_parity.jsonl", [])
    found = encoder_parts(tmp_path)["encoder-flash"]
    assert "| glm45v_1x8192 | 75.0 | 0.60 | 50.0 | **0.50** | 3e-02 | 5.0e-02 | 4.0e-02 |" in found


@pytest.mark.parametrize(("mode", "kernels"), [("plugin", "exact"), ("plugin_fast", "default")])
def test_the_table_of_encoders_mixes(tmp_path, mode, kernels):
    far = {"fp32_output": 1e-2, "fp32_worst": 5e-2}
    mixes = []
    for number, (output, gradient) in enumerate(((0.0, 1e-2), (1e-3, 3e-2))):
        case, eager = f"nemotron_vl_{number}_32layers", record()
        eager = {name: value for name, value in eager.items() if name not in ("ms", "ratio")}
        mixes.append({**eager, "case": case, "mode": "eager", "fp32_mean": 2e-2, **far})
        found = {"forward_rel": output, "forward_noise": 0.0, "bit_equal": output == 0.0, "grad_rel": gradient}
        found |= {"grad_noise": 1e-2, "bucket": "1088", "fallback": None, "fp32_mean": 4e-2}
        mixes.append({**eager, "case": case, "mode": mode, **found, **far})
    for one in mixes:
        results.check_record(one)
    results.write_records(tmp_path / "encoders_parity.jsonl", mixes)
    found = encoder_parts(tmp_path)["encoder-parity"]
    row = f"| nemotron_vl | {kernels} | 2 | 1 | 1.0e-03 | 3.0e-02 | 1.0e-02 | 4.0e-02 | 2.0e-02 |"
    assert lines(found, "| nemotron_vl |") == [row]


def test_tables_of_memory(folder):
    parts = memory_parts(folder)
    assert lines(parts["memory"], "| 1x2048 | mixed 40 |")[0].endswith(
        "| **40%** | 75.0 (70.0) | **1.020** | 6.0 | 200 (90%) | yes |"
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
    steps = measured("whole_step")
    of_two = [r["ms"] for (case, mode), r in steps.items() if case == "8b_sft_tp2" and mode.startswith("eager")]
    slowest = round(max(of_two), -1)
    siglip = (measured("encoders")[f"siglip_{n}_images_27layers", "plugin"]["ratio"] for n in (2, 4))
    return [
        f"recipe takes {steps['8b_sft_tp2', 'plugin']['ms']:.0f} ms on two H200",
        f"to {slowest:.0f} ms depending on the host",
        f"with LoRA on one GPU {steps['8b_lora', 'plugin']['ms']:.0f}, eager {steps['8b_lora', 'eager1']['ms']:.0f} to",
        f"busy for {small['gpu_busy_ms']:.0f} of {small['ms']:.0f} ms",
        f"the speedup is {eager_ms / replayed['ms']:.1f} with {replayed['padding_share']:.1%} padding",
        f"In {replayed['microbatches']} microbatches of the COCO sizes, captures took {replayed['capture_s']:.0f} s on "
        f"demand and {coco['coco', 'plugin']['capture_s']:.0f} s at once",
        "take {:.2f} of eager's time with two images, and {:.2f} with four".format(*siglip),
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


def test_cases_of_another_gpu_are_named_behind_it():
    other = [record(case=case, gpu="NVIDIA H100") for case in ("CP2", "CP2_2048", "TP2_4096")]
    said = origin([*(record(case=str(number)) for number in range(4)), *other])
    assert said.startswith("NVIDIA H200; NVIDIA H100: CP2, TP2_4096, 2026-11-21, ")


def test_releases_of_the_stack_are_named_only_where_asked_for():
    measured = {**record(), "versions": {**stack(), "megatron-bridge": "0.4.2", "commit": "abc"}}
    assert "2026-11-21, megatron-bridge 0.4.2, commit abc, " in origin([{**measured, "date": "2026-11-21"}])
    assert f"torch {stack()['torch']}, " in origin([measured], with_stack=True)


def test_plots_are_drawn_from_records(folder):
    from scripts.performance.pages import plots

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
    from scripts.performance.pages import plots

    assert plots.draw(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_a_share_of_the_limit_is_never_drawn_for_errors(folder):
    from scripts.performance.pages import plots

    found = plots.measured(results.read_records(folder / "vision_bench.jsonl"))
    assert found and all("error" not in r and math.isfinite(r["ms"]) for r in found)
