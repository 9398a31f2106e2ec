"""The state of every seam: patches say it themselves, what is relied on is compared with upstream's sources."""

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from .patches import Patch, State, bridge_release
from .registry import SEAMS
from .seam import Seam, drift
from .source_reader import NoSourceError, SourceReader


@dataclass(frozen=True, slots=True)
class SeamState:
    """How a seam stands in this process.

    Attributes:
        seam: The seam.
        state: "active" (replaced by the plugin), "native" (upstream's own, as expected), "broken" (not as expected),
            "waiting" (replaced when upstream's module is imported) or "off".
        reason: Why, where that is not obvious.
    """

    seam: Seam
    state: State
    reason: str


def seam_states(patches: Iterable[Patch], on: bool) -> dict[str, SeamState]:
    """Return the state of every seam by name.

    Args:
        patches: The patches of modules imported so far; others wait.
        on: Whether the plugin is on.
    """
    known, installed = {patch.name: patch for patch in patches}, installed_states(bridge_release())
    return {seam.name: _state(seam, known.get(seam.name), on, *installed[seam.name]) for seam in SEAMS}


@functools.cache
def installed_states(release: str) -> dict[str, tuple[State, str]]:
    """Compare every seam with the sources that this process uses; they do not change while it runs."""
    reader = SourceReader()
    return {seam.name: compare(seam, reader, release) for seam in SEAMS}


def _state(seam: Seam, patch: Patch | None, on: bool, state: State, reason: str) -> SeamState:
    if not seam.patched_by:
        return SeamState(seam, state, reason)
    if not on:
        return SeamState(seam, "off", patch.reason if patch is not None else "")
    if seam.module not in sys.modules:
        waits = state == "native" and not reason
        return (
            SeamState(seam, "waiting", f"until {seam.module} is imported") if waits else SeamState(seam, state, reason)
        )
    if patch is None or patch.state == "off":
        return SeamState(seam, "broken", f"the plugin failed to replace {seam.place}; the log says why")
    patch.look()
    if patch.state == "active" and state == "broken":  # behind what was patched, upstream's own is not as expected
        return SeamState(seam, state, reason)
    return SeamState(seam, patch.state, patch.reason)


def compare(seam: Seam, reader: SourceReader, release: str) -> tuple[State, str]:
    """Compare a seam with a release's sources; returns "native", "off" (no source to compare) or "broken", and why."""
    if not seam.packaged:
        return "off", "not in upstream's wheels"
    if not seam.expected_in(release):
        return "native", f"came with megatron-bridge {seam.since}"
    package = seam.module.split(".")
    if not any(reader.has_module(".".join(package[:depth])) for depth in range(2, len(package) + 1)):
        return "off", f"no sources of {'.'.join(package[:2])} here"
    try:
        differences = drift(seam, reader.find(seam))
    except NoSourceError as error:
        return "off", str(error)
    return ("broken", "; ".join(differences)) if differences else ("native", "")
