"""The one setting for all graphs of a model."""

from dataclasses import dataclass
from typing import Any, Literal

from .declaration import Group, option
from .values import Parser, one_of, parse_choice

SETTING = "cuda_graphs"
SETTINGS = ("exact", "fastest", "off")
# Names of parts.
VISION_ENCODER, LANGUAGE_MODEL_PART, ALL_PARTS = "vision encoder", "language model", "all"


def _parse(field: str, value: Any) -> str:
    """Return the setting; YAML reads a bare off as false."""
    return parse_choice(field, "off" if value is False else value, SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """The one setting, typed. What it means is in its declaration."""

    setting: Literal["exact", "fastest", "off"] | None = option(
        None,
        Parser(one_of(SETTINGS).allowed, _parse),
        "HOW",
        "every graph that the model supports: exact, fastest or off",
        "`exact` rounds outputs and gradients as eager does, packs as eager on as many rows, encoders that are "
        "[near fp32](encoders.md) aside. `fastest` also uses kernels that round gradients differently, and outputs of "
        "[some encoders](encoders.md#what-differs-by-encoder). Both set only fields that are not set. Parts that "
        "cannot be captured stay eager, and the log gives the reason. None sets no field",
        field=SETTING,
    )


CHOICE = Group(name="choice", kind=ChoiceOptions)


@dataclass(frozen=True, slots=True)
class Part:
    """What the setting comes to for one part of a model.

    Attributes:
        name: The part.
        graphs: What of it is on graphs.
        why: Why it is no more than that; empty where it is all.
    """

    name: str
    graphs: str
    why: str = ""

    @property
    def what(self) -> str:
        """What of it is on graphs, and why no more."""
        return self.graphs + (f" ({self.why})" if self.why else "")

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"
