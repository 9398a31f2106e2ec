"""The record of audited releases, and the tool that writes it."""

import importlib.util
import json
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from bridge_cg_plugin.cli import audit as auditing
from bridge_cg_plugin.upstream.seams.registry import SEAMS
from bridge_cg_plugin.upstream.seams.releases import NEWEST, RELEASES, RUN_ONCE
from bridge_cg_plugin.upstream.seams.seam import Feature, Seam
from bridge_cg_plugin.upstream.seams.states import audit_record, combination_status

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


# Modules of made-up packages: package -> version -> (file, text).
MADE_UP = {
    "megatron-bridge": {
        "0.6.0": ("megatron/bridge/train.py", "def train(model): pass"),
        "0.6.2": ("megatron/bridge/train.py", "def train(model, state): pass"),
        "0.5.1": ("megatron/bridge/train.py", "def train(model, state): pass"),
    },
    "megatron-core": {
        "0.19.0": ("megatron/core/layer.py", "from transformer_engine.x import Base\nclass Layer(Base): pass"),
        "0.18.2": ("megatron/core/layer.py", "class Layer: own = 1"),
    },
    "transformer-engine": {
        "2.9.0": ("transformer_engine/x.py", "class Base: other = 1"),
        "2.10.0": ("transformer_engine/x.py", "class Base: own = 1"),
        "2.11.0": ("transformer_engine/x.py", "class Base: own = 2"),
    },
    "transformers": {"5.0.0": ("transformers/y.py", "def of(): pass")},
}


def seam_of(name, module, target, **expected):
    options = {"kind": "class", "touch": "read", "purpose": "p", "since": "0.5.1", **expected}
    return Seam(name=name, module=module, target=target, features=(Feature.PLANNER,), **options)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the wheels of made-up releases, whose seams are the registry."""
    seams = (
        seam_of("train", "megatron.bridge.train", "train", kind="function", parameters=("model", "state")),
        seam_of("layer", "megatron.core.layer", "Layer", attributes=("own",)),
        seam_of("base", "transformer_engine.x", "Base", attributes=("own",)),
        seam_of("of", "transformers.y", "of", kind="function"),
    )
    monkeypatch.setattr(auditing, "SEAMS", seams)
    for package, releases in MADE_UP.items():
        name = package.replace("-", "_")
        for version, (file, text) in releases.items():
            with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as archive:
                archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
                archive.writestr(file, text)
    return tmp_path


def test_the_command_writes_record_and_page(tool, folder, monkeypatch, capsys):
    record, page = folder / "audited.json", folder / "page.md"
    monkeypatch.setattr(tool, "RECORD", record)
    monkeypatch.setattr(tool, "PAGE", page)
    page.write_text("before\n<!-- audited -->\nold\n<!-- /audited -->\nafter\n")
    assert tool.main(["--wheels", str(folder), "--offline"]) == 0
    written = json.loads(record.read_text())
    assert page.read_text() == f"before\n<!-- audited -->\n{tool.tables(written)}\n<!-- /audited -->\nafter\n"
    assert tool.main(["--wheels", str(folder / "absent"), "--offline"]) == 1
    assert "has no wheel of megatron-bridge, megatron-core, transformer-engine, transformers" in capsys.readouterr().err
