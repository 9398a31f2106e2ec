import re
from pathlib import Path

import pytest

from bridge_cg_plugin.upstream.seams.registry import SEAMS
from bridge_cg_plugin.upstream.seams.seam import NEWEST, RELEASES, Feature, Found, Seam, drift, is_known, minor, too_old

ROOT = Path(__file__).resolve().parents[2]


def test_versions_are_compared_by_their_series():
    assert minor("0.19.2") == (0, 19) and minor("0.7.0rc1") == (0, 7) and minor("1.2+local") == (1, 2)
    assert minor("0.7rc1") == (0, 7) and minor("main") == (0, 0) and minor("") == (0, 0)
    assert all(is_known(release.bridge) for release in RELEASES)
    assert is_known("0.6.9") and not is_known("0.7.0") and not is_known("0.4.2")
    assert too_old("0.4.2") == "megatron-bridge 0.4.2 is too old for bridge_cg_plugin: use 0.5 or newer"
    assert not any(map(too_old, ("0.5.0", "0.6.9", "0.7.0", "1.0", "main", "")))
    assert sorted(RELEASES, key=lambda r: minor(r.bridge), reverse=True) == list(RELEASES)


def test_the_readme_has_the_table():
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \| (\d+\.\d+\.\d+) \|", (ROOT / "README.md").read_text(), re.M)
    assert rows == [(release.bridge, release.core) for release in RELEASES]
    header = next(line for line in (ROOT / "docs/releases.md").read_text().splitlines() if line.startswith("| | "))
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
