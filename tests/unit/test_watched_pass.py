"""What a forward leaves behind or draws on the host is refused with its name; updates in place stay on graphs."""

import random
import tempfile
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import Refused
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from ..regions import new_region
from ..rows_program import RowsProgram
from ..tape import TapeExecutor

WIDTH = 4
STATISTICS = []
OWN, NUMPY, TORCH = random.Random(0), np.random.default_rng(0), torch.Generator()


class Noting(nn.Linear):
    """Does something besides its forward."""

    shared = None

    def __init__(self, note):
        torch.manual_seed(0)
        super().__init__(WIDTH, WIDTH)
        self.note, self.aux, self.calls = note, None, 0
        self.items, self.nested = [], {"a": [[]]}
        self.stats = SimpleNamespace(aux=None)
        self.running = torch.zeros(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = super().forward(x)
        self.note(self, x, y)
        return y


def set_class(module, x, y):
    type(module).shared = y


def closing_over():
    kept = []
    return lambda module, x, y: kept.append(y.detach())


LEFT = {
    "aux": lambda module, x, y: setattr(module, "aux", y.mean()),
    "mean": lambda module, x, y: setattr(module, "mean", module.mean + y.detach().sum(0)),
    "items": lambda module, x, y: module.items.append(y.detach()),
    "nested.a": lambda module, x, y: module.nested["a"][0].append(y.mean()),
    "stats.aux": lambda module, x, y: setattr(module.stats, "aux", y),
    "note": closing_over(),
    "calls": lambda module, x, y: setattr(module, "calls", module.calls + 1),
    "test_watched_pass.STATISTICS": lambda module, x, y: STATISTICS.append(y),
    "Noting.shared": set_class,
}
KEPT = {
    "nothing": lambda module, x, y: None,
    "a buffer and a tensor": lambda module, x, y: (
        module.running.add_(1),
        module.mean.mul_(0.9).add_(y.detach().mean(), alpha=0.1),
    ),
    "a cache": lambda module, x, y: module.nested.setdefault("table", torch.arange(WIDTH) + 1.0),
    "what does not stay": lambda module, x, y: (setattr(module, "aux", y), setattr(module, "aux", None)),
    "a draw at first": lambda module, *_: module.nested.get("seed") or module.nested.update(seed=random.random()),
    "a temporary file, whose name is random": lambda module, x, y: tempfile.TemporaryDirectory().cleanup(),
}
DRAWS = {
    "Random": [random.random, OWN.random, lambda: OWN.sample(range(9), 2), lambda: random.randint(0, 9)],
    "RandomState": [np.random.rand, lambda: np.random.permutation(3)],
    "Generator": [NUMPY.random],
    "aten.rand": [lambda: torch.rand([], generator=TORCH).item()],
}


def region_of(model):
    region = new_region(RowsProgram(model, (WIDTH,)), TapeExecutor(), [Bucket(8)])
    region.capture()
    return region


def state_of(model):
    """Return what attributes hold besides what a capture itself notes."""
    return {name: repr(getattr(model, name)) for name in ("aux", "calls", "items", "nested", "running", "mean")}


@pytest.mark.parametrize(("where", "note"), LEFT.items(), ids=LEFT)
def test_what_a_forward_leaves_behind_is_refused_with_its_name(where, note):
    model = Noting(note)
    buffer, before = model.mean, state_of(model)
    with pytest.raises(Refused, match=where) as refused:
        region_of(model)
    assert refused.value.reason is Fallback.LEAVES_TENSORS and refused.value.reason.remedy in str(refused.value)
    assert model.mean is buffer
    assert state_of(model) == before
    Noting.shared = None
    STATISTICS.clear()


@pytest.mark.parametrize("note", KEPT.values(), ids=KEPT)
def test_what_a_forward_may_do_besides_is_eagers(note):
    model, reference = Noting(note), Noting(note)
    region, x = region_of(model), torch.ones(8, WIDTH)
    for _ in range(3):
        (found,) = region.run(x)
        torch.testing.assert_close(found, reference(x))
        found.sum().backward()
        torch.testing.assert_close((model.mean, model.running), (reference.mean, reference.running))
    assert region.statistics.replays == 3


@pytest.mark.parametrize(
    ("kind", "draw"),
    [(kind, draw) for kind, draws in DRAWS.items() for draw in draws],
    ids=lambda value: str(value)[:20],
)
def test_numbers_drawn_on_the_host_are_refused(kind, draw):
    with pytest.raises(Refused, match=rf"test_watched_pass.py:\d+\) .*{kind}") as refused:
        region_of(Noting(lambda module, x, y: draw()))
    assert refused.value.reason is Fallback.DRAWS_ON_HOST


def test_a_draw_in_what_wraps_a_forward_is_named_by_its_line():
    model = Noting(KEPT["nothing"])
    forward = model.forward
    model.forward = lambda x: forward(x + 0 * random.random())
    with pytest.raises(Refused, match=r"test_watched_pass.py:\d+\) draws from Random"):
        region_of(model)


def test_other_threads_may_draw_and_keep_tensors():
    ended = threading.Event()

    def work():
        while not ended.is_set():
            random.random(), np.random.rand(), torch.rand([], generator=TORCH).item()
            STATISTICS.append(torch.ones(2) + 1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        region = region_of(Noting(KEPT["a buffer and a tensor"]))
    finally:
        ended.set()
        thread.join()
        STATISTICS.clear()
    assert region.run(torch.ones(8, WIDTH)) is not None


class Fragile(nn.Linear):
    """Cannot run where operations are seen."""

    def forward(self, x):
        if torch._C._len_torch_dispatch_stack():
            raise NotImplementedError("no rule for this mode")
        return super().forward(x)


def test_a_pass_that_cannot_be_looked_at_does_not_prevent_a_capture():
    region = new_region(RowsProgram(Fragile(WIDTH, WIDTH), (WIDTH,)), ReferenceExecutor(), [Bucket(8)])
    region.capture()
    assert region.run(torch.ones(8, WIDTH)) is not None
