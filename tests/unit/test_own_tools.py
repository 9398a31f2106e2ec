"""What tests run with: which process takes which modules, the guard over upstream's files, the tape."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from .. import conftest
from ..schedule import FORKED, LONGEST, module_of, scope_of, turn_of
from ..tape import Tape
from ..upstream_sources import fingerprints, installed_folders

MODULES = {module_of(path): path for path in Path(__file__).parents[1].glob("*/test_*.py")}


def test_listed_modules_are_there_once():
    assert set(LONGEST) <= MODULES.keys() and len(set(LONGEST)) == len(LONGEST)


def test_modules_that_fork_from_one_process_go_together():
    users = {
        name
        for name, path in MODULES.items()
        if re.search(r"import .*\b(forked|interpreted|computed)$", path.read_text(), re.M)
    }
    assert users == set(FORKED)
    assert {scope_of(f"tests/{name}.py::test[a::b]") for name in FORKED} == {"forked"}


def test_what_takes_longest_comes_first():
    turns = {name: turn_of(path) for name, path in MODULES.items()}
    assert sorted(LONGEST, key=turns.get) == list(LONGEST)
    assert {turns[name] for name in MODULES.keys() - set(LONGEST)} == {len(LONGEST)}


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "megatron" / "core"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("a = 1\n")
    (folder / "b.py").write_text("b = 1\n")
    return folder


def test_the_installed_stack_is_covered():
    files = fingerprints(installed_folders())
    for package in ("megatron/core", "megatron/bridge", "transformer_engine"):
        assert sum(f"/{package}/" in name for name in files) > 50, package


def test_a_run_that_changes_upstream_fails(tree, monkeypatch, capsys):
    monkeypatch.setattr(conftest, "installed_folders", lambda: [tree])
    session = SimpleNamespace(exitstatus=0)
    conftest.pytest_sessionstart(session)
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == 0
    (tree / "a.py").write_text("a = 2\n")
    (tree / "b.py").unlink()
    (tree / "c.py").write_text("")
    conftest.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    said = capsys.readouterr().out
    assert all(name in said for name in ("3 of upstream's files", "a.py", "b.py", "c.py"))


def test_what_nothing_wrote_is_nan_after_a_replay():
    with Tape() as tape:
        out = torch.empty(4)
        out[:2].fill_(1.0)
        like = torch.empty_like(out).copy_(torch.zeros(4))
    tape.replay()
    assert out[:2].tolist() == [1.0, 1.0] and out[2:].isnan().all()
    assert like.tolist() == [0.0] * 4
