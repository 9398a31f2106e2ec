import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def upstream_tests():
    spec = importlib.util.spec_from_file_location("upstream_tests", ROOT / "scripts" / "upstream_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_plugin, status, said", [("passed", 0, "SAME"), ("failed", 1, "1 DIFFER")])
def test_both_ways_are_compared(upstream_tests, monkeypatch, capsys, tmp_path, with_plugin, status, said):
    found = {"0": {"t::a": "passed", "t::b": "failed"}, "1": {"t::a": with_plugin, "t::b": "failed"}}
    monkeypatch.setattr(upstream_tests, "run", lambda checkout, tests, switch, folder: found[switch])
    monkeypatch.setattr("sys.argv", ["upstream_tests.py", str(tmp_path)])
    assert upstream_tests.main() == status
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == said and "failed without the plugin: t::b" in out
