"""What a seam is: one place where the plugin touches upstream, and what it expects there, in the releases it knows.

Data only: tools and the audit read it without torch.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Literal

BRIDGE, CORE = "megatron-bridge", "megatron-core"
TRANSFORMER_ENGINE, TRANSFORMERS = "transformer-engine", "transformers"
TORCH, FRONTEND = "torch", "nvidia-cudnn-frontend"


@dataclass(frozen=True, slots=True)
class Release:
    """One combination of upstream releases: one that the plugin's tests were run with, or a container's.

    Attributes:
        bridge: Version of megatron-bridge.
        core: Version of megatron-core that belongs to it.
        transformer_engine: Version of transformer-engine.
        transformers: Version of transformers; megatron-bridge 0.5 asks for an older one.
        torch, frontend: Versions of PyTorch and of cuDNN's frontend.
        tests: What was run with it.
    """

    bridge: str
    core: str
    transformer_engine: str = "2.20.2"
    transformers: str = "5.12.1"
    torch: str = "2.11.0"
    frontend: str = "1.32.0"
    tests: str = "seam tests and the demo, without a GPU"

    @property
    def packages(self) -> dict[str, str]:
        """Package -> version."""
        names = (BRIDGE, CORE, TRANSFORMER_ENGINE, TRANSFORMERS, TORCH, FRONTEND)
        versions = (self.bridge, self.core, self.transformer_engine, self.transformers, self.torch, self.frontend)
        return dict(zip(names, versions, strict=True))


# The two newest minor releases, newest first. The first is pinned in requirements/stack.txt.
RELEASES = (
    Release("0.6.2", "0.19.2", tests="all tests, on a GPU too"),
    Release("0.5.1", "0.18.2"),
)
NEWEST, OLDEST = RELEASES[0], RELEASES[-1]
# What ran once beside the table, which `./run test` does not repeat.
RUN_ONCE = (
    Release("0.6.0", "0.19.0", tests="seam tests once, without a GPU"),
    Release("0.5.0", "0.18.0", tests="seam tests once, without a GPU"),
)


# What containers have. `requirements/<name>.txt` pins what of it can be laid over .venv; see scripts/releases.py.
CONTAINERS = {
    "nemo-26.08": Release(
        *("0.6.2", "0.19.2", "2.18.0", "5.12.1", "2.13.0", "1.26.0"),
        tests="seam tests, without a GPU; vision, packs and offloading on an H200 with PyTorch 2.11",
    ),
    "nemo-26.06": Release(
        *("0.5.1", "0.18.2", "2.16.0", "5.8.1", "2.12.0", "1.24.0"),
        tests="seam tests but of encoders that its transformers lacks; vision and packs with Bridge 0.6 on an H200",
    ),
    "nemo-26.04": Release(*("0.4.2", "0.17.1", "2.14.0", "5.3.0", "2.11.0", ""), tests="not supported"),
}


def minor(version: str) -> tuple[int, int]:
    """Return a version's first two numbers; (0, 0) where it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def too_old(bridge: str) -> str:
    """Return why the plugin does not work with a version of megatron-bridge; empty where it is not too old."""
    oldest = minor(OLDEST.bridge)
    if minor(bridge) == (0, 0) or minor(bridge) >= oldest:
        return ""
    return f"megatron-bridge {bridge} is too old for bridge_cg_plugin: use {oldest[0]}.{oldest[1]} or newer"


def is_known(bridge: str, core: str = "") -> bool:
    """Whether versions of megatron-bridge and megatron-core, where it is known, belong to a series that was checked."""
    known = {minor(release.bridge): minor(release.core) for release in RELEASES}
    return minor(bridge) in known and minor(core) in ((0, 0), known[minor(bridge)])


Kind = Literal["function", "class", "value", "module"]
Touch = Literal["patched", "replayed", "swapped", "called", "read"]


class Feature(StrEnum):
    """What the plugin does for a run or a person. A seam serves some of them; `features` names what asks for each.

    Encoders that are declared (`encoders`) have further ones.
    """

    OPTIONS = "options of a model's provider"
    VISION = "vision graphs"
    VISION_QWEN3_VL = "vision graphs of Qwen3-VL and Qwen3.5-VL"
    DEEPSTACK_GRADIENTS = "sums of deepstack gradients"
    OFFLOAD_IN_GRAPHS = "offloading and recompute in graphs"
    LANGUAGE_MODEL = "language-model graphs"
    MULTIMODAL_ROTARY = "language-model graphs with multimodal rotary embedding"
    FULL_ITERATION = "full iteration of a model that takes images"
    PACKED = "packed sequences"
    PACKED_ATTENTION = "packed sequences of attention models"
    PACKED_QWEN3_VL = "packed sequences of Qwen3-VL"
    PACKED_HYBRIDS = "packed sequences of hybrids"
    PACKED_EXPERTS = "packed sequences with experts"
    EXPERTS_INSIDE = "experts inside graphs of packed sequences"
    PACKED_FP8 = "packed sequences in fp8"
    PIPELINES = "interleaved pipelines of Qwen3-VL"
    BETWEEN = "no host waits between encoder and language model"
    CHECKS = "checks of losses and gradients read once for a step"
    COPIES = "batches copied while computing"
    LOOPS = "graphs in other training loops"
    REPORTS = "figures in logs"
    RECIPES = "names of presets"
    PERFORMANCE = "flags of performance scripts"


# Whatever the plugin captures.
GRAPHS = (Feature.VISION, Feature.PACKED, Feature.FULL_ITERATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One touch point of upstream. Data only; `patches.Patch` acts on it, `source_reader` and `audit` compare with it.

    Attributes:
        name: Short name, for `status`, `doctor`, the audit and messages.
        module: Upstream's module.
        target: "name", "Class" or "Class.method"; empty for the module itself.
        kind: What the target must be.
        touch: What the plugin does with the target: "patched" when upstream is imported, until `deactivate()`;
            "replayed" in its place on an instance, while graphs are on the model; "swapped" for a while, as a rule
            while work is recorded; "called" or "read".
        purpose: What the plugin wants there, in a few words.
        features: What it serves: a `Feature`, or an encoder's. They do not work without it, unless there is `instead`.
        instead: What runs inside graphs in its place where it does not fit, which costs no more than time or memory.
        models: Classes of model providers that it concerns; every one where empty.
        parameters: Parameters that a function, or a class's constructor, must take.
        attributes: Fields, methods and instance attributes that a class must have, inherited ones included.
        uses: Code that the target's body must contain: behaviour relied on. A tuple lists spellings of the same code;
            one of them is enough.
        formerly: Targets that hold the same code in earlier releases. The first one that exists is compared where
            `target` does not exist. Only for seams that no patch replaces.
        since: First release of megatron-bridge that has the target; an earlier one does without.
        packaged: Whether upstream's wheels contain it.
    """

    name: str
    module: str
    target: str
    kind: Kind
    touch: Touch
    purpose: str
    features: tuple[str, ...] = ()
    instead: str = ""
    models: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    uses: tuple[str | tuple[str, ...], ...] = ()
    formerly: tuple[str, ...] = ()
    since: str = RELEASES[-1].bridge
    packaged: bool = True

    @property
    def place(self) -> str:
        """Module and target."""
        return f"{self.module}.{self.target}" if self.target else self.module

    def expected_in(self, bridge: str) -> bool:
        """Whether a release of megatron-bridge should have the target. Releases nobody has seen should."""
        return minor(bridge) == (0, 0) or minor(bridge) >= minor(self.since)


def seams_of(features: str | tuple[str, ...], models: tuple[str, ...] = (), /, **rows: Seam) -> tuple[Seam, ...]:
    """Return the seams of a table, whose rows are seams by name, with what all of them serve."""
    features = (features,) if isinstance(features, str) else features
    return tuple(replace(row, name=name, features=features, models=models) for name, row in rows.items())


def _row(
    touch: Touch, place: str, purpose: str, *uses: str | tuple[str, ...], takes: str = "", has: str = "", **more: Any
) -> Seam:
    """Return a row of a table of seams.

    Args:
        touch: See `Seam`.
        place: The module, "module:target", "module:target(parameter, parameter)", "module:Class[attribute, attribute]"
            or both. A target is a class where its last name begins with a capital, and else a function, unless `more`
            has its kind.
        purpose: See `Seam`.
        uses: See `Seam`.
        takes, has: Parameters and attributes that the line of `place` has no room for.
        more: What else `Seam` has.
    """
    place, _, attributes = place.rstrip("]").partition("[")
    place, _, parameters = place.rstrip(")").partition("(")
    module, _, target = place.partition(":")
    kind = "module" if not target else "class" if target.rpartition(".")[2][0].isupper() else "function"
    words = [tuple(text.replace(",", " ").split()) for text in (parameters or takes, attributes or has)]
    facts = {"kind": kind, "uses": uses, "parameters": words[0], "attributes": words[1], **more}
    return Seam(name="", module=module, target=target, touch=touch, purpose=purpose, **facts)


patched, replayed, swapped = partial(_row, "patched"), partial(_row, "replayed"), partial(_row, "swapped")
called, read = partial(_row, "called"), partial(_row, "read")


@dataclass(frozen=True, slots=True)
class Found:
    """What is at a seam's place.

    Attributes:
        kind: What it is.
        parameters: Of the function or the class's constructor; None where they cannot be known.
        takes_more: Whether a live object takes arguments that it does not name. Of a source this is not asked: what
            upstream's own function does not name it may drop.
        attributes: Of the class; None where a base cannot be read and they cannot be known.
        code: The body, as `ast.unparse` writes it.
    """

    kind: Kind
    parameters: tuple[str, ...] | None = None
    attributes: frozenset[str] | None = None
    code: str = ""
    takes_more: bool = False


def drift(seam: Seam, found: Found | None) -> list[str]:
    """Return how what was found differs from what the seam expects; nothing where it fits."""
    if found is None:
        return [f"{seam.place} does not exist"]
    if found.kind != seam.kind:
        return [f"{seam.place} is a {found.kind}, not a {seam.kind}"]
    differences = []
    lost = [p for p in seam.parameters if found.parameters is not None and p not in found.parameters]
    if lost and found.parameters is not None and not found.takes_more:
        differences.append(f"{seam.place} no longer takes {', '.join(lost)}; it takes {', '.join(found.parameters)}")
    gone = [a for a in seam.attributes if found.attributes is not None and a not in found.attributes]
    if gone:
        differences.append(f"{seam.place} no longer has {', '.join(gone)}")
    spellings = [(code,) if isinstance(code, str) else code for code in seam.uses if found.code]
    unused = [" or ".join(each) for each in spellings if not any(code in found.code for code in each)]
    if unused:
        differences.append(f"{seam.place} no longer contains {'; '.join(unused)}")
    return differences
