"""Which vision encoder a model has."""

from dataclasses import dataclass
from typing import Any

from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.upstream.seams.encoders import declared

QWEN3_VL, QWEN35_VL, QWEN25_VL = "Qwen3-VL", "Qwen3.5-VL", "Qwen2.5-VL"
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


def encoder_of(model: Any) -> Encoder | None:
    """Return the vision encoder of a Bridge model provider; None for a model that has none for graphs."""
    if not hasattr(model, PROVIDER_FIELDS["impl"]):
        return None
    names = (base.__name__ for base in type(model).__mro__)
    family = next((_OF_PROVIDERS[name] for name in names if name in _OF_PROVIDERS), "")
    config = getattr(model, "vision_config", None)
    depth = next((value for name in _DEPTHS if (value := _whole(config, name)) is not None), None)
    return Encoder(family, depth, _whole(config, "hidden_size"))


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None
