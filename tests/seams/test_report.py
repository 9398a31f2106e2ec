"""What `bridge-cg report` reads is what the installed release of Bridge writes."""

import inspect

import pytest


@pytest.mark.parametrize(
    "words",
    [
        "iteration {:8d}/{:8d} |",
        "elapsed time per iteration (ms): {:.1f} |",
        "global batch size: {:5d} |",
        "{}: {:.6E} |",
        "grad norm: {:.3f} |",
        "throughput per GPU (TFLOP/s/GPU): ",
        "MODEL_TFLOP/s/GPU",
        '"grad-norm"',
        '"iteration-time"',
        '"throughput/tflops/device"',
        '"throughput/samples_per_sec"',
        'f"memory/{mem_stat}"',
        '"mem-max-allocated-bytes"',
        'replace("bytes", "gigabytes")',
    ],
)
def test_bridge_still_writes_what_is_read(words):
    from megatron.bridge.training.utils import train_utils

    source = inspect.getsource(train_utils)
    pieces = {words, words.replace("{:5d}", "{batch_size:5d}").replace("{:.3f}", "{grad_norm:.3f}")}
    assert any(piece in source for piece in pieces)
