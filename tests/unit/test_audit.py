"""Releases: the table, the record of audits and the tool that writes it, the command, one that is too old."""

import importlib.metadata
import importlib.util
import logging
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from bridge_cg_plugin.cli.answers import AnswerError
from bridge_cg_plugin.cli.audit import audit
from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.options import OptionError, graph_options
from bridge_cg_plugin.upstream.hooks import graph_fields
from bridge_cg_plugin.upstream.seams import activation, patches
from bridge_cg_plugin.upstream.seams.registry import SEAMS
from bridge_cg_plugin.upstream.seams.seam import (
    CONTAINERS,
    FRONTEND,
    NEWEST,
    RELEASES,
    RUN_ONCE,
    TRANSFORMER_ENGINE,
    Feature,
    Found,
    Seam,
    drift,
    is_known,
    minor,
    too_old,
)
from bridge_cg_plugin.upstream.seams.states import audit_record, combination_status, nearest_set

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


@pytest.mark.parametrize(
    "trio, reason",
    [
        (("0.7.0", "0.19.2", "2.20.2"), "megatron-bridge 0.7.0 with megatron-core 0.19.2 was not audited"),
        (("0.6.2", "0.19.2", "2.13.0"), "transformer-engine 2.13.0 was not audited"),
        (("0.6.2", "0.19.2", "2.20.2", "5.99.0"), "transformers 5.99.0 was not audited"),
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
    assert tool.COSTS.search(page)[2].strip() == tool.costs()
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
    assert found == {"compared": pair["compared"], "drift": {}} and pair["drift"] == {}


def test_a_wheel_is_read_and_what_moved_in_it_is_found(tmp_path):
    found, name = tmp_path / "megatron_bridge-0.6.2-py3-none-any.whl", "megatron/bridge/training/train.py"
    text = importlib.metadata.distribution("megatron-bridge").locate_file(name).read_text()
    with zipfile.ZipFile(found, "w") as archive:
        archive.writestr("megatron_bridge-0.6.2.dist-info/RECORD", "")
        archive.writestr(name, text.replace("def _delete_cuda_graphs(", "def _delete_graphs("))
    drift = audit([str(found)]).drift
    assert "train._delete_cuda_graphs does not exist" in drift["train_end"]["found"] and "train_loop" not in drift


CORE = {
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 77\nPATCH = 1\n",
    "megatron/core/transformer/attention.py": "class SelfAttention:\n    pass\n",
}
BRIDGE = {"src/megatron/bridge/package_info.py": "MAJOR = 0\nMINOR = 6\nPATCH = 2\n"}
ENGINE = {"transformer_engine/pytorch/module/linear.py": "class Linear:\n    pass\n"}


@pytest.mark.parametrize(
    ("files", "versions", "drifted"),
    [
        (CORE, "megatron-core 0.77.1 (not in the version table)", "packed_rotary"),
        (BRIDGE, "megatron-bridge 0.6.2", "train_step"),
        (ENGINE, f"megatron-bridge {importlib.metadata.version('megatron-bridge')}", "weight_gradients.Linear"),
    ],
    ids=["core", "Bridge", "Transformer Engine"],
)
def test_a_checkout_is_compared_beside_what_is_installed(tmp_path, capsys, files, versions, drifted):
    """What it has no more is not found in the installed package; its packages' own `__init__` tells them apart."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    package = tmp_path / next(iter(files)).partition("/pytorch")[0]
    (package if package.is_dir() else package.parent).joinpath("__init__.py").write_text("")
    assert main(["audit", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert versions in out.splitlines()[0] and f"drift  {drifted}: " in out and not out.count("\n0 seams fit")
    assert "lost for users: " in out and "lost for users: no feature" not in out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "newest. Run with it: all tests, on a GPU too"),
        ({"torch": "2.14.0"}, "newest (which has torch 2.11.0). Run with it: "),
        ({TRANSFORMER_ENGINE: "2.18.0", "torch": "2.13.0", FRONTEND: "1.26.0"}, "nemo-26.08. Run with it: "),
        ({"megatron-bridge": "0.5.1", "megatron-core": "0.18.2"}, "0.5.1. Run with it: "),
        (dict.fromkeys(CONTAINERS["nemo-26.06"].packages, None) | CONTAINERS["nemo-26.06"].packages, "nemo-26.06. "),
        (dict.fromkeys(NEWEST.packages, "0.0"), "(which has "),
    ],
)
def test_the_nearest_set_is_named_with_how_it_differs(changes, said):
    assert said in nearest_set({**NEWEST.packages, **changes})


def test_sets_are_pinned_as_containers_have_them():
    pinned = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("nemo-*.txt")}
    assert pinned.keys() == {name for name, release in CONTAINERS.items() if not too_old(release.bridge)}
    for name, text in pinned.items():
        packages = dict(re.findall(r"^([a-z-]+)==([\d.]+)$", text, re.MULTILINE))
        assert packages.items() <= CONTAINERS[name].packages.items() and len(packages) == len(text.splitlines()) - 1


def test_arguments_that_are_no_release(tmp_path, capsys):
    (tmp_path / "text.whl").write_text("no archive")
    for argument in (tmp_path / "text.whl", tmp_path / "absent", tmp_path):
        with pytest.raises(AnswerError, match=f"^Cannot audit {argument}: "):
            audit([str(argument)])
    assert main(["audit", str(tmp_path)]) == 2
    assert "no module of Bridge" in capsys.readouterr().err


def test_features_that_drift_takes_away_are_named_and_nothing_of_upstream_is_imported():
    script = """
import sys
from dataclasses import replace
from bridge_cg_plugin.cli import audit
from bridge_cg_plugin.cli.main import main
audit.SEAMS = [replace(s, target="Gone") if s.name == "siglip_forward" else s for s in audit.SEAMS]
assert main(["audit", "installed"]) == 1
bad = [n for n in sys.modules if n.split(".")[0] in ("torch", "megatron", "transformer_engine")]
assert not bad, bad
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"megatron-bridge {importlib.metadata.version('megatron-bridge')}" in done.stdout
    assert "siglip_forward" in done.stdout and done.stdout.count("  lost: ") == 1
    assert "  lost: vision graphs of Gemma 3" in done.stdout
    assert done.stdout.endswith("lost for users: vision graphs of Gemma 3\n")


def test_versions_are_compared_by_their_series():
    assert minor("0.19.2") == (0, 19) and minor("0.7.0rc1") == (0, 7) and minor("1.2+local") == (1, 2)
    assert minor("0.7rc1") == (0, 7) and minor("main") == (0, 0) and minor("") == (0, 0)
    assert all(is_known(release.bridge) for release in RELEASES)
    assert is_known("0.6.9") and not is_known("0.7.0") and not is_known("0.4.2")
    assert is_known("0.6.2", "0.19.5") and not is_known("0.6.2", "0.20.0") and not is_known("0.5.1", "0.19.2")
    assert too_old("0.4.2") == "megatron-bridge 0.4.2 is too old for bridge_cg_plugin: use 0.5 or newer"
    assert not any(map(too_old, ("0.5.0", "0.6.9", "0.7.0", "1.0", "main", "")))
    assert sorted(RELEASES, key=lambda r: minor(r.bridge), reverse=True) == list(RELEASES)


def test_readme_and_page_have_the_releases():
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \| (\d+\.\d+\.\d+) \|", (ROOT / "README.md").read_text(), re.M)
    assert rows == [(release.bridge, release.core) for release in RELEASES]
    page = (ROOT / "docs/releases.md").read_text()
    for release in (*RELEASES, *RUN_ONCE):
        assert f"| {release.bridge} | {release.core} | {release.transformer_engine} | {release.tests} |" in page
    header = next(line for line in page.splitlines() if line.startswith("| | "))
    assert re.findall(r"([\d.]+) / ([\d.]+)", header) == [(r.bridge, r.core) for r in reversed(RELEASES)]


def test_every_seam_is_declared_in_full():
    assert len({seam.name for seam in SEAMS}) == len(SEAMS)
    replaced = [seam.place for seam in SEAMS if seam.touch == "patched"]
    assert len(set(replaced)) == len(replaced), "two patches claim one target"
    for seam in SEAMS:
        assert seam.purpose and seam.features and seam.since in {r.bridge for r in RELEASES}, seam.name
        assert not (seam.touch == "patched" and seam.formerly), seam.name


EACH_ENCODER = "graphs of each encoder in `upstream/seams/encoders.py`"


def test_the_design_has_every_feature():
    page = (ROOT / "docs/design.md").read_text().partition("| feature | asked for by |")[2].partition("\n\n")[0]
    named = {name for row in page.splitlines()[2:] for name in re.split("[,;] ", row.split(" | ")[0].strip("| "))}
    assert named == {feature.value for feature in Feature} | {EACH_ENCODER}


def made_up(**changes):
    return Seam(name="s", module="m", target="t", kind="function", touch="called", purpose="p", **changes)


@pytest.mark.parametrize(
    "seam, found, said",
    [
        (made_up(), None, "m.t does not exist"),
        (made_up(), Found("class"), "is a class, not a function"),
        (made_up(parameters=("a", "b")), Found("function", ("a", "c")), "no longer takes b; it takes a, c"),
        (made_up(parameters=("a",)), Found("function", None), None),
        (made_up(parameters=("a",)), Found("function", ("args",), takes_more=True), None),
        (made_up(attributes=("x",)), Found("function", None, frozenset("y")), "no longer has x"),
        (made_up(uses=("f(",)), Found("function", code="g()"), "no longer contains f("),
        (made_up(uses=("f(",)), Found("function", code="f()"), None),
        (made_up(uses=(("f(", "g("),)), Found("function", code="g()"), None),
        (made_up(uses=("h(", ("f(", "g("))), Found("function", code="i()"), "no longer contains h(; f( or g("),
    ],
)
def test_drift(seam, found, said):
    differences = drift(seam, found)
    assert (differences == []) if said is None else (said in differences[0])


REFUSAL = "megatron-bridge 0.4.2 is too old for bridge_cg_plugin: use 0.5 or newer"


@pytest.fixture
def old_release(monkeypatch):
    monkeypatch.setattr(patches, "bridge_release", lambda: "0.4.2")
    monkeypatch.setattr(graph_fields, "bridge_release", lambda: "0.4.2")
    monkeypatch.setattr(activation, "_on", True)
    activation._stays_off.cache_clear()
    yield
    activation._stays_off.cache_clear()


def test_nothing_is_patched_and_one_line_says_so(old_release, caplog):
    with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
        for name in ("megatron.bridge.training.train", "megatron.core.packed_seq_params"):
            module = ModuleType(name)
            before = dict(vars(module))
            activation.patch_module(module)
            assert vars(module) == before
    assert caplog.messages == [f"[rank 0] {REFUSAL}. The plugin stays off"]


def test_a_release_that_cannot_be_read_breaks_no_import(old_release, monkeypatch, caplog):
    monkeypatch.setattr(patches, "bridge_release", lambda: 1 / 0)
    activation.patch_module(ModuleType("megatron.core.packed_seq_params"))
    assert "could not patch megatron.core.packed_seq_params" in caplog.text


def test_graph_options_are_refused(old_release):
    with pytest.raises(OptionError, match=f"Cannot use graph options: {REFUSAL}"):
        graph_fields.apply_options(graph_options("cuda_graph_impl=local"), SimpleNamespace())


def test_the_audit_refuses_it(tmp_path, capsys):
    (tmp_path / "megatron_bridge-0.4.2.dist-info").mkdir()
    assert main(["audit", str(tmp_path)]) == 2
    assert f"Cannot audit {tmp_path}: {REFUSAL}." in capsys.readouterr().err
