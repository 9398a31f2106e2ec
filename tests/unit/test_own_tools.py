"""What tests run with: which process takes which modules, the guard over upstream's files, the tape."""

import re
from pathlib import Path

import torch

from ..schedule import FORKED, LONGEST, module_of, scope_of
from ..tape import Tape

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


def test_what_nothing_wrote_is_nan_after_a_replay():
    with Tape() as tape:
        out = torch.empty(4)
        out[:2].fill_(1.0)
        like = torch.empty_like(out).copy_(torch.zeros(4))
    tape.replay()
    assert out[:2].tolist() == [1.0, 1.0] and out[2:].isnan().all()
    assert like.tolist() == [0.0] * 4
