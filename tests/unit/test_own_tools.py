"""What tests run with: which process takes which modules, the guard over upstream's files, the tape."""

from pathlib import Path

import torch

from ..schedule import LONGEST, module_of
from ..tape import Tape

MODULES = {module_of(path): path for path in Path(__file__).parents[1].glob("*/test_*.py")}


def test_listed_modules_are_there_once():
    assert set(LONGEST) <= MODULES.keys() and len(set(LONGEST)) == len(LONGEST)


def test_what_nothing_wrote_is_nan_after_a_replay():
    with Tape() as tape:
        out = torch.empty(4)
        out[:2].fill_(1.0)
        like = torch.empty_like(out).copy_(torch.zeros(4))
    tape.replay()
    assert out[:2].tolist() == [1.0, 1.0] and out[2:].isnan().all()
    assert like.tolist() == [0.0] * 4
