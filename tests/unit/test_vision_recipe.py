"""`bridge-cg plan vision --recipe`: the encoder, patches and limits of images that it takes from a recipe."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli.explain.models import QWEN3_VL, QWEN25_VL, QWEN35_VL, Encoder
from bridge_cg_plugin.cli.explain.recipes import processor_of
from bridge_cg_plugin.cli.planner.documents import Processor
from bridge_cg_plugin.cli.planner.records import TOWER, Costs, of_encoder

from .plan_inputs import write

SFT = "qwen3_vl_8b_vision_graphs_h200_sft_config"
COSTS = Costs(of_encoder(TOWER, "auto"), TOWER)
BRIDGES = {"min_pixels": 200_704, "max_pixels": 1_003_520}


def config(data=None, **fields):
    return SimpleNamespace(model=SimpleNamespace(**fields), dataset=SimpleNamespace(task_encoder=data))


def test_a_processor_has_the_providers_sizes_and_the_datas_limits():
    assert processor_of(config(), Encoder(QWEN3_VL)) == Processor(patch=16, **BRIDGES)
    assert processor_of(config(), Encoder(QWEN25_VL)) == Processor(patch=14, **BRIDGES)
    own = config(patch_size=12, spatial_merge_size=3, temporal_patch_size=1)
    assert processor_of(own, Encoder(QWEN35_VL)) == Processor(patch=12, merge=3, temporal=1, **BRIDGES)
    limits = SimpleNamespace(min_pixels=1024, max_pixels=4096, patch_size=14)
    assert processor_of(config(limits), Encoder(QWEN3_VL)) == Processor(min_pixels=1024, max_pixels=4096)


@pytest.fixture
def sizes(tmp_path):
    return str(write(tmp_path / "sizes.json", '{"256x256": 20, "2048x1536": 20}'))


def plan(*words):
    code = f"from bridge_cg_plugin.cli.main import main; raise SystemExit(main({['plan', 'vision', *words]!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def planned(*words):
    done = plan(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_plan_has_the_images_of_a_recipe_and_says_what_was_not_measured(sizes):
    found = planned(sizes, "--recipe", SFT)
    assert found["buckets"] == [28 * 28, 54 * 72] and found["memory_gb"] is None
    assert "docs/benchmarks/vision_bench.jsonl, 2026-11-22, NVIDIA H200 only" in found["origin"]
    assert found["origin"].endswith("; not measured: model.tensor_model_parallel_size=2")
    without = planned(sizes)
    assert without["buckets"] == [16 * 16, 96 * 128] and without["origin"] == COSTS.origin
    assert planned(sizes, "--recipe", SFT, "--max-pixels", "262144")["buckets"] == [28 * 28, 26 * 36]


@pytest.mark.parametrize(
    ("recipe", "encoder"),
    [
        ("qwen25_vl_7b_sft_config", "Qwen2.5-VL encoder of 32 layers of 1280"),
    ],
)
def test_another_encoder_goes_by_its_own_records(sizes, recipe, encoder):
    found = planned(sizes, "--recipe", recipe)
    assert found["origin"].startswith(f"{encoder}, 784 to 6720 tokens: docs/benchmarks/encoders.jsonl")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma3_vl_4b_sft_config", "whose patches are known here; it has a Gemma 3 encoder of 27 layers of 1152"),
        ("qwen3_vl_8b_sft_confg", "Did you mean qwen3_vl_8b_sft_config?"),
    ],
)
def test_a_recipe_that_cannot_be_planned_for_is_refused(sizes, name, said):
    done = plan(sizes, "--recipe", name)
    assert done.returncode == 2 and said in done.stderr
