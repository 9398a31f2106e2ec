"""The one setting for all graphs of a model."""

from dataclasses import dataclass
from typing import Literal

from .declaration import Group, option
from .values import one_of

SETTING = "cuda_graphs"
SETTINGS = ("exact", "fastest", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """The one setting, typed. What it means is in its declaration."""

    setting: Literal["exact", "fastest", "off"] | None = option(
        None,
        one_of(SETTINGS),
        "HOW",
        "graphs of everything that can be on graphs: exact, fastest or off",
        "`exact` computes bit-equal outputs and eager's gradients; `fastest` also takes kernels that round gradients "
        "otherwise. Both set the other fields where nobody has: vision graphs, graphs of packed or of unpacked "
        "sequences; what a combination forbids stays eager, and the log says why. None leaves all fields as they are",
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

    def __str__(self) -> str:
        return f"{self.name}: {self.graphs}" + (f" ({self.why})" if self.why else "")
