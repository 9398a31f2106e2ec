"""Which vision encoder a model has, and what was measured of it. Tests hold every figure to the records."""

from dataclasses import dataclass, replace
from typing import Any

from bridge_cg_plugin.cli.planner.cost import CostModel, Fit
from bridge_cg_plugin.cli.planner.defaults import DEFAULTS, VISION_EXACT, VISION_EXACT_FIT, VISION_FIT
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.upstream.seams.encoders import declared

QWEN3_VL, QWEN35_VL, QWEN25_VL, GEMMA3 = "Qwen3-VL", "Qwen3.5-VL", "Qwen2.5-VL", "Gemma 3"
_OF_PROVIDERS = {
    "Qwen3VLModelProvider": QWEN3_VL,
    "Qwen3VLMoEModelProvider": QWEN3_VL,
    "Qwen35VLModelProvider": QWEN35_VL,
    "Qwen35VLMoEModelProvider": QWEN35_VL,
    **{encoder.model.provider: encoder.name for encoder in declared() if encoder.encodes == "vision"},
}
_DEPTHS = ("depth", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class Encoder:
    """A vision encoder.

    Attributes:
        family: Its kind; empty for one that no record is of.
        layers, width: Its sizes; None where nobody knows them here.
    """

    family: str
    layers: int | None = None
    width: int | None = None

    def __str__(self) -> str:
        sizes = "of unknown size" if self.layers is None else f"of {self.layers} layers"
        return f"{self.family} encoder {sizes}".lstrip() + (f" of {self.width}" if self.width else "")


# Qwen3-VL's from 8B on, which most records are of.
LAYERS, WIDTH = 27, 1152
TOWER = Encoder(QWEN3_VL, LAYERS, WIDTH)


@dataclass(frozen=True, slots=True)
class Row:
    """One microbatch, forward and backward.

    Attributes:
        tokens: Patches.
        images: Images and videos.
        eager_ms, graphs_ms: Times in ms; None where they were not measured and cannot be forecast.
        memory_gb: GiB of a slot whose largest bucket has these tokens; None likewise.
        note: Why there are no figures.
    """

    tokens: int
    images: int = 1
    eager_ms: float | None = None
    graphs_ms: float | None = None
    memory_gb: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Time on graphs over time eager."""
        return None if self.eager_ms is None or self.graphs_ms is None else self.graphs_ms / self.eager_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What records have of an encoder, trained whole on one GPU.

    Attributes:
        encoder: Which one.
        file, date, gpu: Of the records.
        cost: The cost model that was fitted to them; None where there are `rows` only.
        fit: How well it fits.
        rows: The records themselves.
        kernels: Values of `vision_cuda_graph_tuning.kernels` that they hold for.
        attention: Values of `vision_cuda_graph_tuning.attention` that they hold for.
        remark: What else to know of them.
    """

    encoder: Encoder
    file: str
    date: str
    gpu: str
    cost: CostModel | None = None
    fit: Fit | None = None
    rows: tuple[Row, ...] = ()
    kernels: tuple[str, ...] = ("auto", "fast")
    attention: tuple[str, ...] = ("auto", "cudnn")
    remark: str = ""


def _records(
    encoder: Encoder,
    date: str,
    rows: tuple[Row, ...],
    kernels: tuple[str, ...] = ("auto", "fast"),
    attention: tuple[str, ...] = ("auto", "cudnn"),
) -> Measured:
    return Measured(
        encoder=encoder,
        file="docs/benchmarks/encoders.jsonl",
        date=date,
        gpu="NVIDIA H200",
        rows=rows,
        kernels=kernels,
        attention=attention,
        remark="Eager waits for the host: on another one, small images took less than half of these times.",
    )


_BUSY_HOST = "Eager waits for the host: a busier one took 180 ms for 1024 tokens."
_DEFAULT = Measured(
    encoder=TOWER,
    file=VISION_FIT.file,
    date=VISION_FIT.date,
    gpu=VISION_FIT.gpu,
    cost=DEFAULTS["vision"],
    fit=VISION_FIT,
    remark=_BUSY_HOST,
)
_EXACT = replace(
    _DEFAULT,
    cost=VISION_EXACT,
    fit=VISION_EXACT_FIT,
    kernels=("exact",),
    remark=f"Graphs ran on one stream; up to 4096 tokens they now use two and take less. {_BUSY_HOST}",
)
MEASURED = (
    _DEFAULT,
    _EXACT,
    _records(
        Encoder(QWEN35_VL, 27, 1152), "2026-11-26", (Row(784, 1, 219.3, 10.4, 1.3), Row(6720, 8, 219.9, 55.9, 8.4))
    ),
    _records(
        Encoder(QWEN35_VL, 27, 1152),
        "2026-11-26",
        (Row(784, 1, 219.3, 13.1, 1.1), Row(6720, 8, 219.9, 59.2, 8.4)),
        ("exact",),
    ),
    _records(
        Encoder(QWEN25_VL, 32, 1280),
        "2026-11-28",
        (
            Row(784, 1, 163.2, 26.5, 1.5),
            Row(2304, 1, 338.4, 45.6, 4.3),
            Row(6400, 1, 990.4, 98.6, 11.0),
            Row(6720, 8, 680.2, 105.2, 11.6),
        ),
        attention=("transformer_engine",),  # PyTorch's, with kernels that are otherwise the default
    ),
    _records(
        Encoder(QWEN25_VL, 32, 1280),
        "2026-11-28",
        (
            Row(784, 1, 163.2, 33.5, 1.8),
            Row(2304, 1, 338.4, 62.6, 5.1),
            Row(6400, 1, 990.4, 142.2, 13.2),
            Row(6720, 8, 680.2, 155.2, 14.0),
        ),
        ("exact",),
        ("auto", "transformer_engine"),
    ),
    _records(
        Encoder(GEMMA3, 27, 1152),
        "2026-11-26",
        (Row(4096, 1, 89.1, 71.0, 4.2), Row(8192, 2, 137.3, 132.4, 7.9), Row(16384, 4, 259.2, 257.0, 15.5)),
        kernels=("auto", "exact", "fast"),  # there are no others
        attention=("auto", "transformer_engine", "cudnn", "flash"),
    ),
)


def encoder_of(model: Any) -> Encoder | None:
    """Return the vision encoder of a Bridge model provider; None for a model that has none for graphs."""
    if not hasattr(model, PROVIDER_FIELDS["impl"]):
        return None
    names = (base.__name__ for base in type(model).__mro__)
    family = next((_OF_PROVIDERS[name] for name in names if name in _OF_PROVIDERS), "")
    config = getattr(model, "vision_config", None)
    depth = next((value for name in _DEPTHS if (value := _whole(config, name)) is not None), None)
    return Encoder(family, depth, _whole(config, "hidden_size"))


def measured_of(encoder: Encoder, kernels: str) -> Measured | None:
    """Return what was measured of an encoder, with these kernels if possible; None where nothing was."""
    found = [each for each in MEASURED if each.encoder == encoder]
    return next((each for each in found if kernels in each.kernels), found[0] if found else None)


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None
