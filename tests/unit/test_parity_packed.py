"""What the parity script of packed documents makes of its measurements."""

import pytest

from bridge_cg_plugin.cli.runs.results import check_record, provenance
from scripts.performance.packed.comparison import misses


def record(case, mode="plugin_deterministic", **changes):
    values = {"tokens": 1000, "documents": 3, "bit_equal": True, "forward_rel": 0.0, "grad_rel": 0.0}
    made = {"case": case, "mode": mode, **values, **provenance(2, 0), **changes}
    check_record(made)
    return made


FAR = {"fp32_output": 1e-3, "fp32_mean": 1e-2, "fp32_worst": 5e-2}
NOISY = {"bit_equal": False, "forward_rel": 1e-4, "grad_rel": 1e-3, "forward_noise": 1e-4, "grad_noise": 1e-3}
GOOD = [
    record("rope_0", replays=2, bucket=1024, **FAR),
    record("rope_0", "eager_own_rows", **{**FAR, "bit_equal": False, "grad_rel": 1e-2}),
    record("rope_fallback_too_few_tokens", fallback="too_few_tokens"),
    record("default_0", "plugin", replays=2, **NOISY),
    record("default_1", "plugin", replays=2, **{**NOISY, "forward_noise": 0.0, "grad_noise": 0.0}),
]


def test_what_is_wanted_passes():
    assert misses(GOOD) == []


@pytest.mark.parametrize(
    "index, changes, message",
    [
        (0, {"bit_equal": False}, "rope_0: not equal to the bit"),
        (0, {"replays": 0}, "rope_0: 0 replays"),
        (0, {"fp32_mean": 1.2e-2}, "rope_0: fp32_mean 1.200e-02, eager 1.000e-02"),
        (0, {"fp32_worst": 6e-2}, "worst gradient of all packs 6.000e-02"),
        (0, {"fp32_output": float("nan")}, "rope_0: fp32_output nan"),
        (2, {"fallback": None}, "rope_fallback_too_few_tokens: not counted"),
        (2, {"bit_equal": False}, "rope_fallback_too_few_tokens: not equal to the bit"),
        (4, {"grad_rel": 1.6e-3}, "default_1: grad 1.60e-03, eager runs differ by 1.00e-03"),
        (4, {"forward_rel": float("nan")}, "default_1: forward nan"),
    ],
)
def test_what_misses_it_is_named(index, changes, message):
    (found,) = misses([{**r, **changes} if i == index else r for i, r in enumerate(GOOD)])
    assert message in found
