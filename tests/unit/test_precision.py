"""The fp32 tower that kernels are measured against, and what is said of the distance to it."""

import pytest
import torch

from bridge_cg_plugin.cli.runs.results import check_record, read_records
from scripts.performance import precision_vision
from scripts.performance.models import tower
from scripts.performance.models.reference import Fp32Tower
from scripts.performance.vision import precision
from tests.unit.towers import new_tower

MIXES = {"image": [(1, 4, 6)], "images": [(1, 4, 4), (1, 2, 6)], "video": [(3, 4, 2), (1, 6, 6)]}


@pytest.mark.parametrize("grid", MIXES.values(), ids=MIXES)
def test_the_reference_is_the_tower(grid):
    model = new_tower()
    batch = tower.make_batch(grid, model)
    outputs, gradients = Fp32Tower(model).step(batch)
    expected = tower.forward(model, batch)
    wanted = torch.autograd.grad(expected, list(model.parameters()), batch.gradients)
    assert tower.largest_relative(outputs, [o.detach() for o in expected]) <= 1e-6
    assert tower.largest_relative(gradients, wanted) <= 1e-5


def test_records_of_all_modes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(precision_vision, "workloads", lambda cases, tokens: {"small": MIXES["image"]})
    out = tmp_path / "r.jsonl"
    assert precision_vision.main(["--layers", "3", "--repeats", "2", "--out", str(out)]) in (0, 1)
    records = read_records(out)
    assert [r["mode"] for r in records] == list(precision.MODES[:-1])
    assert "plugin_flash is left out: there is no GPU with Triton" in capsys.readouterr().err
    for record in records:
        check_record(record)
        assert 0 < record["fp32_median"] <= record["fp32_worst"] <= 1e-5
        assert set(record["fp32_kinds"]) == {"weights", "biases", "norms"}
        assert record["repeats"] == 2


def record(mode, **figures):
    plain = dict.fromkeys(("fp32_output", "fp32_median", "fp32_mean", "fp32_worst"), 1e-2)
    return {"case": "c", "mode": mode, **plain, **figures}


def test_farther_than_eager():
    near = [record("eager"), record("plugin", fp32_mean=1.01e-2), record("plugin_fast", fp32_worst=0.9e-2)]
    assert precision.farther_than_eager(near) == []
    far = [record("eager"), record("plugin_fast", fp32_mean=1.1e-2, fp32_median=float("nan"))]
    lines = precision.farther_than_eager(far)
    assert len(lines) == 2 and all("plugin_fast" in line for line in lines)


@pytest.mark.parametrize("line", [["--layers", "0"], ["--layers", "few"], ["--repeats", "0"], ["--cases", "none"]])
def test_wrong_arguments_end_with_a_message(line, tmp_path, capsys):
    assert precision_vision.main([*line, "--out", str(tmp_path / "r")]) == 2
    assert capsys.readouterr().err.startswith("precision_vision.py: Cannot use --")
