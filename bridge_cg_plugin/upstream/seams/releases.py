"""The releases that the plugin was checked against. Data only: tools and the audit read it without torch."""

import re
from dataclasses import dataclass

BRIDGE, CORE = "megatron-bridge", "megatron-core"
TRANSFORMER_ENGINE, TRANSFORMERS = "transformer-engine", "transformers"


@dataclass(frozen=True, slots=True)
class Release:
    """One combination of upstream releases that the plugin's tests were run with.

    Attributes:
        bridge: Version of megatron-bridge.
        core: Version of megatron-core that belongs to it.
        transformer_engine: Version of transformer-engine.
        transformers: Version of transformers; megatron-bridge 0.5 asks for an older one.
        tests: What was run with it.
    """

    bridge: str
    core: str
    transformer_engine: str = "2.20.2"
    transformers: str = "5.12.1"
    tests: str = "seam tests and the demo, without a GPU"

    @property
    def packages(self) -> dict[str, str]:
        """Package -> version."""
        versions = (self.bridge, self.core, self.transformer_engine, self.transformers)
        return dict(zip((BRIDGE, CORE, TRANSFORMER_ENGINE, TRANSFORMERS), versions, strict=True))


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


def is_known(bridge: str) -> bool:
    """Whether a megatron-bridge version belongs to a series that was checked."""
    return minor(bridge) in {minor(release.bridge) for release in RELEASES}
