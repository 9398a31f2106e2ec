"""What the tables of docs/benchmarks/packed.md make of records."""

import pytest

from bridge_cg_plugin.cli.runs.results import ROOT, check_record, provenance, put_record
from scripts.performance.pages import packed_page
from scripts.performance.pages.markdown import fill

NAMES = ("packed_speed", "packed_plans", "packed_experts", "packed_parity", "packed_ranks", "packed_training")


def record(case, mode="plugin", **fields):
    made = {"case": case, "mode": mode, **provenance(3, 0), "gpu": "NVIDIA H200", **fields}
    check_record(made)
    return made


GRAPHS = {"grad_rel": 0.0, "grad_noise": 1e-3, "memory_gb": 2.0, "tokens": 2048}
PLAN = {"bucket": "2048,4096", "max_packed_seqs": 16, "predicted_ms": 33.0}
FAR = {"bit_equal": True, "forward_rel": 0.0, "grad_rel": 0.0}
RUN = {"losses": [3.0, 2.0], "grad_norms": [1.0, 1.0], "peak_gb": 20.0}
RECORDS = {
    "packed": [
        record("moe_2048", "eager", ms=200.0, ratio=1.0, gpu_busy_ms=40.0, eager_memory_gb=9.0),
        record("moe_2048", ms=80.0, ratio=0.4, **GRAPHS),
        record("moe_2048", "plugin_whole", ms=50.0, ratio=0.25, memory_gb=3.0, tokens=2048),
        record("dense_2048", "eager", ms=90.0, ratio=1.0, gpu_busy_ms=30.0, eager_memory_gb=9.0),
        record("dense_2048", ms=30.0, ratio=1 / 3, aim=2.5, bit_equal=True, **GRAPHS),
        record("dense_2048", "plugin_4x", ms=30.3, ratio=0.34, **GRAPHS),
        record("dense_2048", "plugin_layers", ms=33.0, ratio=0.37, **GRAPHS | {"memory_gb": 3.0}),
        record("plan_long", ms=30.0, chosen=True, **PLAN),
        record("plan_long", "exhaustive_chosen", ms=30.6, chosen=True, **PLAN),
        record("plan_long", "exhaustive_4", ms=30.0, chosen=False, **PLAN),
    ],
    "experts": [
        record(f"{layer}_{product}_2048", mode, ms=ms, tokens=2048)
        for layer in ("fc1", "fc2")
        for product in ("forward", "input_gradient", "weight_gradients")
        for mode, ms in (("eager", 0.3), ("plugin", 0.2))
    ],
    "packed_parity": [
        record("rope_0", "plugin_deterministic", replays=2, grad_noise=0.0, fp32_mean=1.1e-2, **FAR),
        record("rope_0", "eager_own_rows", fp32_mean=1e-2, **FAR | {"bit_equal": False, "grad_rel": 2e-2}),
        record("rope_documents_apart", "plugin_deterministic", replays=2, bit_equal=True, forward_rel=0.0),
        record("default_0", replays=2, grad_noise=1e-3, **FAR),
    ],
    "packed_parallel": [
        record("CP2", "plugin_deterministic", replays=10, fallbacks={}, **FAR),
        record("CP2_2048", "eager", ms=100.0, ratio=1.0, tokens=2048),
        record("CP2_2048", ms=50.0, ratio=0.5, tokens=2048),
    ],
    "packed_training": [
        record("in_batch", "eager", ms=100.0, **RUN),
        record("in_batch", ms=50.0, ratio=0.5, inside_spread=True, packed_graphs={"replays": 8}, **RUN),
        record("mamba_in_batch", "eager", ms=None, **RUN),
        record("mamba_in_batch", ms=None, inside_spread=True, packed_graphs={"replays": 8}, **RUN),
    ],
}
LINES = {
    "packed_speed": [
        "| dense | 2048 | 90.0 | 30.0 | 30.0 | **3.00** | 2.50 | to the bit |",
        "| moe | 2048 | 200.0 | 40.0 | 80.0 | **2.50** | 2.00 | to 0e+00, eager to 1e-03 |",
        "| moe, experts too | 2048 | 200.0 | 40.0 | 50.0 | **4.00** | 2.00 "
        "| [as near to fp32](../packed.md#how-exact) |",
        "| dense | 2048 | +1.0% | 33.0 | 9.0 | 2.0 | 3.0 |",
        "| moe | 2048 |  |  | 9.0 | 2.0 |  |",
        "| moe, experts too | 2048 |  |  | 9.0 | 3.0 |  |",
    ],
    "packed_plans": ["| long | 16 | 2048, 4096 | 33.0 | 30.0 | +10.0% | 30.0 | +2.0% |"],
    "packed_experts": ["| 2048 | 0.60 / 0.40 (**1.50**) | 0.60 / 0.40 (**1.50**) | 0.60 / 0.40 (**1.50**) |"],
    "packed_parity": [
        "| rope | plugin_deterministic | 1 | 1 | 0.0e+00 | 0.0e+00 | 1 | 2.0e-02 | 1.10 to 1.10 |",
        "| default | plugin | 1 | 1 | 0.0e+00 | 1.0e-03 |  |  |  |",
    ],
    "packed_ranks": ["| CP2 | 0e+00 | 0e+00 | 10 | 100.0 / 50.0 (**2.00**) |"],
    "packed_training": [
        "| in_batch | 2 | 100 | 50 | **2.00** | inside | 8 | 20.0 | 20.0 |",
        "| mamba_in_batch | 2 |  |  |  | inside | 8 | 20.0 | 20.0 |",
    ],
}


@pytest.fixture
def parts(tmp_path):
    for name, records in RECORDS.items():
        for one in records:
            put_record(tmp_path / f"{name}.jsonl", one)
    return packed_page.packed_parts(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_tables(parts, name):
    blocks = [block.splitlines() for block in parts[name].split("\n\n") if block.startswith("| ")]
    assert [line for lines in blocks for line in lines[2:]] == LINES[name]
    assert all(len({line.count(" | ") for line in lines}) == 1 for lines in blocks)
    assert "NVIDIA H200" in parts[name]


def test_without_records_there_are_no_tables(tmp_path):
    assert packed_page.packed_parts(tmp_path) == dict.fromkeys(NAMES, "")


def test_every_part_has_its_place_on_the_page(parts):
    text = (ROOT / "docs/benchmarks/packed.md").read_text()
    filled = fill(text, parts)
    assert all(line in filled for lines in LINES.values() for line in lines)
    assert fill(filled, parts) == filled
