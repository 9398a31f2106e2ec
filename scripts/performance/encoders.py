"""Encoders of images and audio, eager and on graphs: how they are captured, run, timed and compared."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from bridge_cg_plugin.cli.runs.results import provenance
from scripts.performance.measure import GIB, PeakMemory, median_times, profile
from tests.models import tower
from tests.models.encoder_case import Batch, Encoder, step
from tests.models.workloads import frames_of

if TYPE_CHECKING:
    from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import GraphHelper

SECONDS = 1.0  # no further repeat of a measurement begins after this long
# Ways of the plugin -> options that are not the default.
MODES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "plugin": {"kernels": "exact"},
        "plugin_fast": {"kernels": "fast"},
        "plugin_streams": {"kernels": "fast", "streams": 2},
        "plugin_own_attention": {"kernels": "fast", "attention": "transformer_engine"},
        "plugin_cudnn": {"kernels": "exact", "attention": "cudnn"},
        "plugin_flash": {"kernels": "fast", "attention": "flash"},
    }
)

Results = tuple[list[Any], list[Any]]  # outputs and gradients


def measure(
    name: str, encoder: Encoder, layers: int, repeats: int, modes: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of every size of one encoder, eager and on graphs.

    Args:
        name: In records.
        encoder: The encoder.
        layers: How many it has.
        repeats: Timed runs of each measurement.
        modes: Of `MODES`; None is the encoder's own.
    """
    model = encoder.build(layers)
    grads = tower.MainGrads(model)
    for case, size in encoder.sizes.items():
        batch = encoder.make_batch(model, size, 1)
        eager = run_step(encoder, model, grads, batch)
        peak = PeakMemory()
        noise = differences(run_step(encoder, model, grads, batch), eager)
        common = {"case": case_of(name, case, layers), "tokens": batch.tokens, "images": batch.images}
        common["eager_memory_gb"] = peak.read()
        fields = _times(encoder, model, batch, repeats)
        eager_ms = fields["ms"]
        yield {**common, "mode": "eager", "ratio": 1.0, **fields}
        for mode in encoder.modes if modes is None else modes:
            helper = capture(model, buckets=(batch.tokens,), **settings_of(name, size, mode))
            found = differences(run_step(encoder, model, grads, batch), eager)
            fields = _times(encoder, model, batch, repeats)
            assert helper.graphs is not None
            statistics = helper.graphs.statistics()
            yield {
                **common,
                "mode": mode,
                "ratio": fields["ms"] / eager_ms,
                "forward_rel": found[0],
                "forward_noise": noise[0],
                "bit_equal": found[0] == 0.0,
                "grad_rel": found[1],
                "grad_noise": noise[1],
                "memory_gb": statistics.memory_bytes / GIB,
                "capture_s": statistics.capture_seconds,
                "fallbacks": dict(statistics.fallbacks),
                **fields,
            }
            helper.delete_cuda_graphs()


def settings_of(name: str, size: Any, mode: str) -> dict[str, Any]:
    """Return the options of a mode; Qwen3-VL's buckets are for one microbatch of a case's frames, on one stream."""
    own = {"slots": 1, "max_frames": frames_of(size), "streams": 1} if name == "qwen3_vl" else {}
    return {**own, **MODES[mode]}


def case_of(name: str, case: str, layers: int) -> str:
    """Return a case's name in records; those of Qwen3-VL's whole tower have no more than their size's."""
    return case if (name, layers) == ("qwen3_vl", 27) else f"{name}_{case}_{layers}layers"


def capture(model: nn.Module, **settings: Any) -> "GraphHelper":
    """Capture at once and strictly, with the given graph options; returns the helper.

    Raises:
        RuntimeError: The attention asked for cannot be had.
    """
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.vision.workload import VisionWorkload

    wanted: dict[str, Any] = {"impl": "transformer_engine", "strict": True}
    options = VisionGraphOptions(**wanted, **settings)
    helper: GraphHelper = tower.new_helper(model, options)
    assert helper.graphs is not None and isinstance(helper.graphs.workload, VisionWorkload)
    called = helper.graphs.workload.kernels.attention
    if options.attention not in ("auto", called):
        raise RuntimeError(f"attention={options.attention} cannot be had: {called} is called")
    return helper


def run_step(encoder: Encoder, model: Any, grads: Any, batch: Batch) -> Results:
    """Run one step; returns the outputs and the gradients that say anything."""
    grads.zero()
    outputs = step(encoder, model, batch)
    return outputs, [g for g, said in zip(grads.copy(), encoder.compared(model), strict=True) if said]


def differences(found: Results, expected: Results) -> tuple[float, float]:
    """Return the largest relative L2 difference of an output, and of a gradient."""
    return tower.largest_relative(found[0], expected[0]), tower.largest_relative(found[1], expected[1])


def _times(encoder: Encoder, model: Any, batch: Batch, repeats: int) -> dict[str, Any]:
    """Return the fields of medians, and of how they were measured."""
    times = median_times(lambda between: step(encoder, model, batch, between), repeats, seconds=SECONDS)
    kernels = profile(lambda: step(encoder, model, batch))
    fields: dict[str, Any] = {"ms": times.ms, "fwd_ms": times.fwd_ms, "host_ms": times.host_ms}
    return {**fields, "gpu_busy_ms": kernels.busy_ms, "kernels": kernels.count, **provenance(times.repeats, 1)}
