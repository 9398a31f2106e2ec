"""A small piece of a model with packed segments, as a region program, and what tests need around it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.program import TensorSpec
from bridge_cg_plugin.graphs.region import Region

from ..regions import new_region
from ..rows_program import RowsProgram
from ..tape import TapeExecutor

WIDTH = 6
SEGMENTS = 4


@dataclass(frozen=True)
class ToyBatch:
    x: Tensor
    offsets: Tensor


class Toy(nn.Module):
    """Mixes tokens of a segment; the second output has half as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.pair = nn.Linear(2 * WIDTH, 3, dtype=torch.float64)

    def forward(self, x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        token = torch.arange(len(x))
        segment = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
        inside = token < offsets[-1]
        same = (segment[:, None] == segment[None, :]) & inside[:, None] & inside[None, :]
        weights = (same | torch.eye(len(x), dtype=torch.bool)).double()
        hidden = self.drop(torch.tanh(self.mix(x)))
        mean = weights @ hidden / weights.sum(1, keepdim=True)
        return self.out(hidden - mean), self.pair(mean.reshape(-1, 2 * WIDTH))


class ToyProgram(RowsProgram):
    """The toy, whose second output has half as many rows."""

    name = "toy"

    def __init__(self, model: Toy) -> None:
        super().__init__(model, (WIDTH,))

    def input_specs(self, bucket):
        return {
            "x": TensorSpec((bucket.tokens, WIDTH), torch.float64, differentiable=True),
            "offsets": TensorSpec((SEGMENTS + 1,), torch.int64),
        }

    def size(self, batch):
        return len(batch.x)

    def refuse(self, batch, bucket):
        return Fallback.TOO_MANY_FRAMES if len(batch.offsets) > SEGMENTS + 1 else None

    def load(self, buffers, batch):
        super().load(buffers, batch.x)
        count = len(batch.offsets)
        buffers["offsets"][:count].copy_(batch.offsets)
        buffers["offsets"][count:].fill_(int(batch.offsets[-1]))

    def load_example(self, buffers, bucket):
        super().load_example(buffers, bucket)
        buffers["offsets"].fill_(bucket.tokens)
        buffers["offsets"][0] = 0

    def forward(self, buffers, bucket):
        return self.model(buffers["x"], buffers["offsets"])

    def differentiable_inputs(self, batch):
        return (batch.x,)


def toy_region(model: Toy | None = None, capacities=(4, 8, 16), **settings) -> Region:
    """Build and capture a region; `region.program.model` is the toy."""
    executor = settings.pop("executor", None) or TapeExecutor()
    region = new_region(ToyProgram(model or Toy()), executor, [Bucket(c) for c in capacities], **settings)
    region.capture()
    return region


@contextmanager
def evaluation(region: Region) -> Iterator[None]:
    """Run what is inside as an evaluation does: without gradients, the model in evaluation mode."""
    region.program.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        region.program.model.train()


def toy_batch(lengths=(2, 4), seed: int = 0, requires_grad: bool = True) -> ToyBatch:
    """Return random tokens of segments with these lengths."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), WIDTH, dtype=torch.float64, generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return ToyBatch(x.requires_grad_(requires_grad), offsets)


def loss_of(outputs) -> Tensor:
    """Weigh every element differently, so that swapped rows are seen."""
    terms = [(o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outputs]
    return sum(terms)


def eager_results(model: Toy, batch: ToyBatch):
    """Return outputs and gradients of eager: parameters in order, then the input."""
    x = batch.x.detach().clone().requires_grad_()
    outputs = model(x, batch.offsets)
    wanted = [*(p for p in model.parameters() if p.requires_grad), x]
    return [o.detach() for o in outputs], list(torch.autograd.grad(loss_of(outputs), wanted))


def assert_same(actual, expected) -> None:
    """Compare lists of tensors, NaN and None included."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (b is None), f"tensor {index} is {a} where eager has {b}"
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda m, i=index: f"tensor {i}: {m}")


def poison(region: Region, value: float) -> None:
    """Overwrite all static memory: floats with `value`, integers with a number that fits nothing."""
    for slot in region.slots:
        for flat in slot.static.storages:
            flat.fill_(value if flat.dtype.is_floating_point else 12345)


def no_memory(*unused):
    raise torch.OutOfMemoryError("none left")


def replayed_results(region, batch):
    outputs = region.run(batch)
    assert outputs is not None, dict(region.statistics.fallbacks)
    wanted = [*(p for p in region.program.model.parameters() if p.requires_grad), batch.x]
    kept = [o.detach().clone() for o in outputs]
    return kept, [g.clone() for g in torch.autograd.grad(loss_of(outputs), wanted)]


def assert_equals_eager(region, batch):
    expected = eager_results(region.program.model, batch)
    actual = replayed_results(region, batch)
    assert_same(actual[0], expected[0])
    assert_same(actual[1], expected[1])
