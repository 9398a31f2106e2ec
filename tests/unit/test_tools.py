import importlib.util
from pathlib import Path

import pytest

from scripts.performance.measuring import autoload as bench_autoload
from scripts.performance.pages.results_page import autoload

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


def test_what_loading_adds_is_the_difference_of_medians():
    def runs(*load):
        return [{"ms": 1500.0, "load_ms": ms, "load_cpu_ms": 1.0} for ms in load]

    off, on = bench_autoload.records({"off": runs(1.0, 2.0, 30.0), "on": runs(5.0, 50.0, 7.5)})
    assert (off["mode"], off["load_ms"], "added_ms" in off) == ("off", 2.0, False)
    assert (on["mode"], on["load_ms"], on["added_ms"], on["repeats"]) == ("on", 7.5, 5.5, 3)
    assert "| on | 1500 | 7.5 | 1.0 | 5.5 |" in autoload([off, on])


def test_a_process_of_the_benchmark():
    found = bench_autoload.one_process("on")
    assert 0 < found["load_ms"] < found["ms"]
