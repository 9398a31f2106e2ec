"""Where the tests find the sources of each release."""

import os
import sys
from pathlib import Path

import pytest

from bridge_cg_plugin.upstream.seams.seam import NEWEST, Release

ROOT = Path(__file__).resolve().parents[1]


def folder_of(release: Release) -> Path:
    """Return the folder of an older release; the test is skipped where `./run releases` never ran."""
    folder = Path(os.environ.get("BRIDGE_CG_RELEASES") or ROOT / ".releases") / release.bridge
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; ./run releases makes it")
    return folder


def sources_of(release: Release) -> list[str]:
    """Return what to audit for a release."""
    if release != NEWEST:
        return [str(folder_of(release))]
    entries = [Path(entry) for entry in sys.path]
    name = f"megatron_bridge-{release.bridge}.dist-info"
    return [next(str(entry) for entry in entries if (entry / name).is_dir())]
