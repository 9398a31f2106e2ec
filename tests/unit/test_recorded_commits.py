"""Every commit that a page or a record of measurements names is part of this history."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs/benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(BENCHMARKS.glob("*.md"))]
COMMIT = re.compile(r"(?<![\w.+-])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}(?![\w.-])")
# Commits of other repositories: `docs/releases.md` names upstream's.
OTHERS = {"6124fbe38"}


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def named():
    """Return every commit that is named, with the files that name it."""
    found = {}
    for page in PAGES:
        for commit in COMMIT.findall(page.read_text()):
            found.setdefault(commit, set()).add(page.name)
    for file in BENCHMARKS.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            found.setdefault(json.loads(line)["versions"]["commit"], set()).add(file.name)
    return {commit: sorted(files) for commit, files in found.items() if commit not in OTHERS}


def test_every_named_commit_is_an_ancestor():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("there is no history here: an unpacked archive, or a shallow clone")
    found = named()
    assert len(found) > 10
    strangers = {c: files for c, files in found.items() if git("merge-base", "--is-ancestor", c, "HEAD").returncode}
    assert strangers == {}
