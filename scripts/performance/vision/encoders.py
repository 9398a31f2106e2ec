"""Times and parity of the encoders beside Qwen3-VL's, eager and on graphs."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from bridge_cg_plugin.cli.runs.results import provenance
from scripts.performance.models.encoder_case import Batch, Encoder, step

if TYPE_CHECKING:
    from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper

GIB = 2**30
SECONDS = 1.0  # no further repeat of a measurement begins after this long
# Ways of the plugin -> options that are not the default.
MODES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "plugin": {"kernels": "exact"},
        "plugin_fast": {"kernels": "fast"},
        "plugin_own_attention": {"kernels": "fast", "attention": "transformer_engine"},
        "plugin_cudnn": {"kernels": "exact", "attention": "cudnn"},
        "plugin_flash": {"kernels": "fast", "attention": "flash"},
    }
)


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
    from scripts.performance.models import tower

    model = encoder.build(layers)
    grads = tower.MainGrads(model)
    for case, size in encoder.sizes.items():
        batch = encoder.make_batch(model, size, 1)
        eager = run_step(encoder, model, grads, batch)
        noise = differences(run_step(encoder, model, grads, batch), eager)
        common = {"case": f"{name}_{case}_{layers}layers", "tokens": batch.tokens, "images": batch.images}
        eager_ms, fields = _times(encoder, model, batch, repeats)
        yield {**common, "mode": "eager", "ratio": 1.0, **fields}
        for mode in encoder.modes if modes is None else modes:
            helper = capture(model, buckets=(batch.tokens,), **MODES[mode])
            found = differences(run_step(encoder, model, grads, batch), eager)
            ms, fields = _times(encoder, model, batch, repeats)
            assert helper.graphs is not None
            statistics = helper.graphs.statistics()
            yield {
                **common,
                "mode": mode,
                "ratio": ms / eager_ms,
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


def capture(model: nn.Module, **settings: Any) -> "VisionTECudaGraphHelper":
    """Capture at once and strictly, with the given graph options; returns the helper.

    Raises:
        RuntimeError: The attention asked for cannot be had.
    """
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper
    from bridge_cg_plugin.vision.workload import VisionWorkload
    from scripts.performance.models.modes import check_attention

    options = VisionGraphOptions(
        impl="transformer_engine", evaluation=False, strict=True, cost_fallback=False, **settings
    )
    helper = VisionTECudaGraphHelper(model, model.config, options=options)
    helper.create_cudagraphs()
    assert helper.graphs is not None and isinstance(helper.graphs.workload, VisionWorkload)
    check_attention(options.attention, helper.graphs.workload.attention)
    return helper


def run_step(encoder: Encoder, model: Any, grads: Any, batch: Batch) -> tuple[list[Any], list[Any]]:
    """Run one step; returns the outputs and the gradients that say anything."""
    grads.zero()
    outputs = step(encoder, model, batch)
    return outputs, [g for g, said in zip(grads.copy(), encoder.compared(model), strict=True) if said]


def differences(found: tuple[list[Any], list[Any]], expected: tuple[list[Any], list[Any]]) -> tuple[float, float]:
    """Return the largest relative L2 difference of an output, and of a gradient."""
    from scripts.performance.models.tower import largest_relative

    return largest_relative(found[0], expected[0]), largest_relative(found[1], expected[1])


def _times(encoder: Encoder, model: Any, batch: Batch, repeats: int) -> tuple[float, dict[str, Any]]:
    """Return the median in ms, and the fields that say how it was measured."""
    from scripts.performance.measuring.measure import median_times, profile

    times = median_times(lambda between: step(encoder, model, batch, between), repeats, seconds=SECONDS)
    kernels = profile(lambda: step(encoder, model, batch))
    fields: dict[str, Any] = {"ms": times.ms, "fwd_ms": times.fwd_ms, "host_ms": times.host_ms}
    fields |= {"gpu_busy_ms": kernels.busy_ms, "kernels": kernels.count, "families": kernels.families()}
    return times.ms, {**fields, "top": [list(row) for row in kernels.largest(8)], **provenance(times.repeats, 1)}


def print_record(r: dict[str, Any]) -> None:
    """Print one record as a line."""
    line = f"{r['case']:28} {r['mode']:20} {r['tokens']:>6} tokens {r['ms']:>8.1f} ms (ratio {r['ratio']:.2f}), "
    line += f"busy {r['gpu_busy_ms']:.1f} ms, {r['kernels']} kernels"
    if "forward_rel" in r:
        line += f"; outputs {r['forward_rel']:.1e} (two eager runs {r['forward_noise']:.1e}), "
        line += f"gradients {r['grad_rel']:.1e} ({r['grad_noise']:.1e}), {r['memory_gb']:.1f} GiB"
    print(line, flush=True)
