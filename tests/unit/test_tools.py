import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/><testcase classname="a" name="two"><failure message="x"/></testcase>
<testcase classname="a" name="three"><skipped/></testcase><testcase classname="b" name="one"><error/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def upstream_tests():
    spec = importlib.util.spec_from_file_location("upstream_tests", ROOT / "scripts" / "upstream_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_outcomes_of_a_report(upstream_tests, tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert upstream_tests.outcomes(tmp_path / "report.xml") == {
        "a::one": "passed",
        "a::two": "failed",
        "a::three": "skipped",
        "b::one": "error",
    }


@pytest.mark.parametrize("with_plugin, status, said", [("passed", 0, "SAME"), ("failed", 1, "1 DIFFER")])
def test_both_ways_are_compared(upstream_tests, monkeypatch, capsys, tmp_path, with_plugin, status, said):
    found = {"0": {"t::a": "passed", "t::b": "failed"}, "1": {"t::a": with_plugin, "t::b": "failed"}}
    monkeypatch.setattr(upstream_tests, "run", lambda checkout, tests, switch, folder: found[switch])
    monkeypatch.setattr("sys.argv", ["upstream_tests.py", str(tmp_path)])
    assert upstream_tests.main() == status
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == said and "failed without the plugin: t::b" in out


def test_upstreams_tests_run_with_this_checkout(upstream_tests, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "first")
    assert upstream_tests.environment("0")["PYTHONPATH"].split(":") == ["first", str(ROOT)]
    assert upstream_tests.environment("1")["BRIDGE_CG_PLUGIN"] == "1"
