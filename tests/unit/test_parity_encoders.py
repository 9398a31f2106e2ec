"""The parity script of encoders, on small ones: mixes of every size are replayed and compared."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.cli.runs.results import provenance, read_records
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.upstream.encoders.radio import TileLayers
from scripts.performance import parity_encoders
from scripts.performance.parity_encoders import EXACT_SHARE, failures
from scripts.performance.records import check_record
from tests.models import tower
from tests.models.encoders import ENCODERS
from tests.models.mixes import CountMixes

MODELS = {}
# Of grids, of images of one size and of tokens; every encoder's replays are compared in tests of their own.
TRIED = ("qwen25_vl", "siglip", "nemotron_omni")


def model_of(name):
    """Return a small encoder, built once."""
    if name not in MODELS:
        tower.start_process()
        MODELS[name] = ENCODERS[name].build(2)
    return MODELS[name]


@pytest.mark.parametrize("name", TRIED)
def test_mixes_are_replayed_and_equal_eager_and_fp32(name, tmp_path):
    out = tmp_path / "records.jsonl"
    words = ["--encoders", name, "--layers", "2", "--mixes", "3", "--tokens", "256", "--out", str(out)]
    assert parity_encoders.main(words) == 0
    found = read_records(out)
    assert [r["mode"] for r in found] == ["eager", "plugin"] * 3
    for r in found:
        check_record(r)
        assert max(r["fp32_output"], r["fp32_worst"]) <= 1e-4  # eager is fp32 here
        if r["mode"] == "plugin":
            assert r["bucket"] and r["forward_rel"] <= 1e-6 and r["grad_rel"] <= 2e-5


def test_an_encoder_that_cannot_be_captured_is_named_and_stops_no_other(tmp_path, monkeypatch, capsys):
    def refused(self):
        raise CaptureError("not on this machine")

    monkeypatch.setattr(TileLayers, "recording", refused)
    out = tmp_path / "records.jsonl"
    words = ["--encoders", "nemotron_vl,siglip", "--layers", "2", "--mixes", "1", "--tokens", "256", "--out", str(out)]
    assert parity_encoders.main(words) == 1
    assert [r["case"] for r in read_records(out)] == ["siglip_0_2layers"] * 2
    said = capsys.readouterr().out
    assert "nemotron_vl: " in said and "not on this machine" in said


@pytest.mark.parametrize("name", TRIED)
@settings(max_examples=30)
@given(number=st.integers(0, 10**6), most=st.sampled_from((256, 1024, 8192)))
def test_every_mix_fits_the_largest_bucket(name, number, most):
    model, encoder = model_of(name), ENCODERS[name]
    capacities = encoder.mixes.capacities(model, most)
    size = encoder.mixes.draw(model, random.Random(number), most)
    tokens = encoder.make_batch(model, size, 1).tokens
    assert tokens <= max(capacities) <= most
    assert tokens > most // EXACT_SHARE or isinstance(encoder.mixes, CountMixes)  # images of one size need no kernel
    assert size == encoder.mixes.draw(model, random.Random(number), most)


def record(mode="plugin", **changes):
    made = {"case": "one", "mode": mode, "fp32_output": 1e-2, "fp32_mean": 2e-2, "fp32_worst": 5e-2}
    if mode == "plugin":
        made |= {"bucket": "1024", "fallback": None, "forward_rel": 0.0, "bit_equal": True}
        made |= {"grad_rel": 1e-2, "forward_noise": 0.0, "grad_noise": 1e-2}
    made |= {**provenance(1, 0), **changes}
    check_record(made)
    return made


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"forward_rel": 1e-2, "grad_rel": 5e-2}, None),  # other kernels, as near to fp32
        ({"forward_rel": 1e-2, "fp32_output": 1.1e-2}, "forward 1.00e-02"),
        ({"forward_rel": NAN, "fp32_output": NAN}, "forward nan"),
        ({"grad_rel": 1.6e-2, "fp32_mean": 2.2e-2}, "gradient 1.60e-02 > 1.50e-02"),
        ({"grad_rel": NAN, "fp32_mean": NAN}, "gradient nan"),
        ({"bucket": None, "fallback": "other_batch"}, "not replayed (other_batch)"),
    ],
)
def test_what_misses_its_limit_is_named(changes, said):
    missed = failures([record("eager"), record(**changes)])
    assert missed == [] if said is None else said in missed[0]
