from types import SimpleNamespace

import pytest

from .. import conftest
from ..upstream_sources import fingerprints, installed_folders


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
