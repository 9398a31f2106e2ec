"""Which process of a parallel run takes which test modules, and in which order."""

import re
from pathlib import Path

from ..schedule import FORKED, LONGEST, module_of, scope_of, turn_of

MODULES = {module_of(path): path for path in Path(__file__).parents[1].glob("*/test_*.py")}


def test_listed_modules_are_there_once():
    assert set(LONGEST) <= MODULES.keys() and len(set(LONGEST)) == len(LONGEST)


def test_modules_that_fork_from_one_process_go_together():
    users = {
        name for name, path in MODULES.items() if re.search(r"import .*\b(forked|interpreted)$", path.read_text(), re.M)
    }
    assert users == set(FORKED)
    assert {scope_of(f"tests/{name}.py::test[a::b]") for name in FORKED} == {"forked"}


def test_what_takes_longest_comes_first():
    turns = {name: turn_of(path) for name, path in MODULES.items()}
    assert sorted(LONGEST, key=turns.get) == list(LONGEST)
    assert {turns[name] for name in MODULES.keys() - set(LONGEST)} == {len(LONGEST)}
