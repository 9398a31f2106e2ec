"""The record of audited releases, and the tool that writes it."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

from bridge_cg_plugin.cli.audit import audit_record, combination_status
from bridge_cg_plugin.upstream.seams.registry import SEAMS
from bridge_cg_plugin.upstream.seams.seam import NEWEST, RELEASES, RUN_ONCE

from ..releases import sources_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megatron-bridge", "megatron-core", "transformer-engine", "transformers")


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("audit_releases_tool", ROOT / "scripts" / "audit_releases.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


def versions(*found):
    return dict(zip(PACKAGES, found, strict=False))


def entry(**releases):
    """Return the recorded entry of these releases."""
    wanted = {name.replace("_", "-"): version for name, version in releases.items()}
    return next(each for each in audit_record()["audits"] if each["releases"] == wanted)


def test_the_page_has_the_releases_that_were_run():
    page = (ROOT / "docs" / "releases.md").read_text()
    for release in (*RELEASES, *RUN_ONCE):
        assert f"| {release.bridge} | {release.core} | {release.transformer_engine} | {release.tests} |" in page


@pytest.mark.parametrize(
    "trio, reason",
    [
        (("0.7.0", "0.19.2", "2.20.2"), "megatron-bridge 0.7.0 with megatron-core 0.19.2 was not audited"),
        (("0.6.2", "0.19.2", "2.13.0"), "transformer-engine 2.13.0 was not audited"),
        (("0.6.2", "0.19.2", "2.20.2", "5.13.0"), "transformers 5.13.0 was not audited"),
        (("0.6.2", None, ""), "not installed: megatron-core, transformer-engine"),
    ],
)
def test_others_are_unknown(trio, reason):
    found = combination_status(versions(*trio))
    assert (found.state, found.reason) == ("unknown", reason)
    assert combination_status({}).state == "unknown"


def test_the_record_is_of_this_registry(tool):
    assert audit_record()["registry"] == tool.registry(), "a seam changed: run python scripts/audit_releases.py"
    assert {name for each in audit_record()["audits"] for name in each["drift"]} <= {seam.name for seam in SEAMS}


def test_the_page_has_the_record(tool):
    page = (ROOT / "docs" / "releases.md").read_text()
    assert tool.TABLES.search(page)[2].strip() == tool.tables(audit_record())
    for bound in (*tool.FLOORS.values(), *tool.CEILINGS.values()):
        assert bound in page


@pytest.mark.parametrize("package", PACKAGES[:3])
def test_the_metadata_spans_the_audited_releases(tool, package):
    releases = [each["releases"][package] for each in audit_record()["audits"] if package in each["releases"]]
    releases.sort(key=tool.numbers)
    assert releases[0] == tool.FLOORS[package]
    (first, second), (major, newest) = (tool.numbers(version)[:2] for version in (releases[0], releases[-1]))
    stack = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["stack"]
    assert f"{package}>={first}.{second},<{major}.{newest + 1}" in stack


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.bridge)
def test_the_record_agrees_with_the_sources_that_are_here(tool, release):
    pair = entry(megatron_bridge=release.bridge, megatron_core=release.core)
    found = tool.compared([*sources_of(release), *sources_of(NEWEST)], "megatron")
    assert found == {"compared": pair["compared"], "drift": pair["drift"]}
