"""Graphs that draw random numbers from another generator than the default one, as megatron-core's tracker does."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.executor import CudaGraphExecutor
from tests.rows_program import RowsProgram

from ..regions import new_region

WIDTH, TOKENS = 16, 64


class Dropping(nn.Module):
    """Drops elements by numbers of a generator that takes the default one's place for the while."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.fails = False
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")

    def forward(self, x):
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        kept = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator)
        try:
            dropped = functional.dropout(x, 0.5)
        finally:
            default.graphsafe_set_state(kept)
        if self.fails and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("planned")
        return dropped, self.out(dropped)


@pytest.fixture
def region():
    generator = torch.cuda.default_generators[torch.cuda.current_device()].clone_state()
    generator.manual_seed(7)
    executor = CudaGraphExecutor(generators=lambda: (generator,))
    return new_region(
        RowsProgram(Dropping(generator), (WIDTH,), outputs=2), executor, [Bucket(TOKENS)], evaluation=False
    )


def assert_draws_anew(region):
    """Every replay drops other elements, and its backward the same ones."""
    seen = []
    for _ in range(3):
        x = torch.ones(TOKENS, WIDTH, device="cuda", requires_grad=True)
        dropped, _ = region.run(x)
        dropped.sum().backward()
        torch.testing.assert_close(x.grad, dropped.detach())
        seen.append(dropped.detach())
    assert not any(torch.equal(a, b) for a, b in zip(seen, [*seen[1:], seen[0]], strict=True))


@pytest.mark.first
def test_every_replay_draws_anew(region):
    region.capture()
    assert_draws_anew(region)


def test_after_a_failed_capture(region):
    region.program.model.fails = True
    with pytest.raises(CaptureError, match="planned"):
        region.capture()
    torch.randn(4, device="cuda")
    region.program.model.fails = False
    region.capture()
    assert_draws_anew(region)
