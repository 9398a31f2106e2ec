"""The page of whole steps, from records."""

import pytest

from bridge_cg_plugin.cli.runs.results import check_record, write_records
from scripts.performance.measuring.step_times import PARTS
from scripts.performance.pages import plots
from scripts.performance.pages.whole_step_page import whole_step_parts
from scripts.performance.runs.recipe_cases import SCALING


def record(case, mode, ms, **more):
    versions = {"torch": "2.11.0", "megatron-bridge": "0.6.2", "commit": "abc"}
    origin = {
        "repeats": 10,
        "seed": 1,
        "date": "2026-11-24",
        "gpu": "NVIDIA H200",
        "versions": versions,
        "command": "x",
    }
    shares = dict(zip(PARTS, (0.2, 0.05, 0.4, 0.05, 0.3), strict=True))
    profile = {
        "parts_ms": {part: share * ms for part, share in shares.items()},
        "parts_tflop": {"vision": 35.0, "language model": 140.0},
        **{"idle_share": 0.3, "gpu_busy_ms": 0.7 * ms, "kernels": 900},
        "families": {"matrix products": 0.5 * ms, "communication": 0.2 * ms},
    }
    run = {"ms": ms, "ratio": ms / 1600, "loss_rel": 1e-4, "peak_gb": 90.0, "tflops_per_gpu": 180.0, "gpus": 2}
    return {"case": case, "mode": mode, **origin, **run, **profile, **more}


@pytest.fixture
def folder(tmp_path):
    records = [
        record("8b_sft_tp2", "eager1", 1600.0),
        record("8b_sft_tp2", "plugin", 800.0, inside_spread=True, idle_share=0.025),
        record("8b_sft_tp2", "plugin_vision", 1400.0, inside_spread=False),
        *(record("8b_sft_tp2", f"eager{number}", 1601.0) for number in (2, 3)),
        record("8b_lora", "eager1", 900.0),
    ]
    failed = record("8b_lora", "plugin", 1.0, error="out of memory: a | b")
    for name in ("ms", "ratio"):
        del failed[name]
    records.append(failed)
    for each in records:
        check_record(each)
    write_records(tmp_path / "whole_step.jsonl", records)
    return tmp_path


def test_steps_are_beside_eager_and_repeated_eager_runs_are_counted_only(folder):
    text = whole_step_parts(folder)["whole-steps"]
    assert "| 8b_sft_tp2 | 2 | plugin | 800 | **0.50** | 180 | 2.5% | 90 | 1e-04 (inside eager's of 3) |" in text
    assert (
        "| 8b_sft_tp2 | 2 | plugin_vision | 1400 | **0.88** | 180 | 30.0% | 90 | 1e-04 (**outside** eager's of 3) |"
        in text
    )
    assert text.count("| eager |") == 2 and "eager2" not in text and "NVIDIA H200, 2026-11-24" in text


def test_parts_are_beside_arithmetic(folder):
    text = whole_step_parts(folder)["step-parts"]
    rows = [line for line in text.splitlines() if line.startswith("| 8b_sft_tp2")]
    assert rows[0] == "| 8b_sft_tp2 | eager | 320 | 80 | 640 | 80 | 480 | 1600 |"
    assert rows[-1] == "| 8b_sft_tp2 | arithmetic at 700 TFLOP/s | 50 |  | 200 |  |  | 250 |"


def test_families_and_failures(folder):
    parts = whole_step_parts(folder)
    assert "| 8b_sft_tp2, ms | eager | plugin_vision | plugin |" in parts["step-families"]
    assert "| matrix products | 800 | 700 | 400 |" in parts["step-families"]
    assert parts["whole-step-failures"].endswith("| 8b_lora | plugin | `out of memory: a / b` |")


def test_the_picture_has_a_bar_for_each_run_and_for_arithmetic(folder):
    (path,) = plots.draw(folder)
    text = path.read_text()
    assert path.name == "whole_step.svg" and "whole_step.svg" in whole_step_parts(folder)["step-parts-plot"]
    assert "8b_sft_tp2, plugin<" in text and "8b_lora, arithmetic at 700 TFLOP/s" in text and "> 250 ms<" in text
    assert all(f">{part}<" in text for part in PARTS)


def test_a_page_without_records_says_how_they_are_made(tmp_path):
    parts = whole_step_parts(tmp_path)
    assert all("bench_recipe.py" in parts.pop(name) for name in ("whole-steps", "step-scaling"))
    assert not any(parts.values())


def test_replicas_are_beside_one_gpu(tmp_path):
    cases = zip(SCALING, (1, 2, 4), (10.0, 19.0, 30.0), strict=True)
    records = [
        record(case, mode, 800.0, gpus=gpus, images_per_s=factor * speed)
        for case, gpus, speed in cases
        for mode, factor in (("eager1", 1), ("plugin", 2), *((("plugin_fastest", 3),) if gpus == 2 else ()))
    ]
    write_records(tmp_path / "whole_step.jsonl", records)
    rows = [line for line in whole_step_parts(tmp_path)["step-scaling"].splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| 1 | eager | 10.0 | **1.00** | 30.0% | 160 |",
        "| 2 | eager | 9.5 | **0.95** | 30.0% | 160 |",
        "| 4 | eager | 7.5 | **0.75** | 30.0% | 160 |",
        "| 1 | plugin | 20.0 | **1.00** | 30.0% | 160 |",
        "| 2 | plugin | 19.0 | **0.95** | 30.0% | 160 |",
        "| 4 | plugin | 15.0 | **0.75** | 30.0% | 160 |",
    ]
