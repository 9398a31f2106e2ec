"""Graphs that draw random numbers from another generator than the default one, as megatron-core's tracker does."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphExecutor
from tests.rows_program import RowsProgram

from ..regions import new_region
from .common import equal

WIDTH, TOKENS = 16, 64


def default_generator():
    return torch.cuda.default_generators[torch.cuda.current_device()]


class Dropping(nn.Module):
    """Drops elements by numbers of a generator that takes the default one's place for the while.

    Attributes:
        fails: Raises while it is captured.
        reads: Reads the device while it is captured, which invalidates the capture.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.fails = self.reads = False
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")

    def forward(self, x):
        default = default_generator()
        kept = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator)
        try:
            dropped = functional.dropout(x, 0.5)
        finally:
            default.graphsafe_set_state(kept)
        if self.fails and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("planned")
        if self.reads and torch.cuda.is_current_stream_capturing():
            dropped.sum().item()
        return dropped, self.out(dropped)


@pytest.fixture
def generator():
    generator = default_generator().clone_state()
    generator.manual_seed(7)
    return generator


@pytest.fixture
def executor(generator):
    return CudaGraphExecutor(generators=lambda: (generator,))


@pytest.fixture
def region(generator, executor):
    return new_region(RowsProgram(Dropping(generator), (WIDTH,), outputs=2), executor, [Bucket(TOKENS)])


def run(region):
    """Return what is left of ones by a replay, whose backward drops the same elements."""
    x = torch.ones(TOKENS, WIDTH, device="cuda", requires_grad=True)
    dropped, _ = region.run(x)
    dropped.sum().backward()
    torch.testing.assert_close(x.grad, dropped.detach())
    return dropped.detach()


def assert_draws_anew(region):
    """Every replay drops other elements, and its backward the same ones."""
    seen = [run(region) for _ in range(3)]
    assert not any(torch.equal(a, b) for a, b in zip(seen, [*seen[1:], seen[0]], strict=True))


def places(generator):
    """Return the states of the default generator and of the other one."""
    return [default_generator().get_state(), generator.get_state()]


@pytest.mark.first
def test_every_replay_draws_anew(region, generator):
    torch.randn(4, device="cuda")
    before = places(generator)
    region.capture()
    assert equal(places(generator), before)
    assert_draws_anew(region)


@pytest.mark.first
@pytest.mark.parametrize("fault", ["fails", "reads"])
def test_graphs_of_before_a_failed_capture_draw_where_their_generator_is(region, generator, executor, fault):
    region.capture()
    model = Dropping(generator)
    setattr(model, fault, True)
    other = new_region(RowsProgram(model, (WIDTH,), outputs=2), executor, [Bucket(TOKENS)])
    before = places(generator)
    with pytest.raises(CaptureError):
        other.capture()
    assert equal(places(generator), before)
    assert_draws_anew(region)
    here, offset = generator.get_state(), generator.get_offset()
    dropped = run(region)
    step = generator.get_offset() - offset
    assert step > 0
    eager = model(torch.ones(TOKENS, WIDTH, device="cuda"))[0]
    assert not torch.equal(eager, dropped) and not torch.equal(run(region), eager)
    generator.set_state(here)
    assert torch.equal(run(region), dropped) and generator.get_offset() == offset + step
    torch.randn(4, device="cuda")
    model.fails = model.reads = False
    other.capture()
    assert_draws_anew(other)
    assert_draws_anew(region)
