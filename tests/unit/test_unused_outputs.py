"""Outputs that no loss reads: weights that only these need get no gradient, as in eager; zeros would decay them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from ..pooled import PooledExecutor
from ..regions import new_region
from .towers import loss_of
from .toy import WIDTH, ToyProgram, assert_same, toy_batch

CUT = 3  # a step that no gradient passes
PLACES = st.integers(0, 5)


class Web(nn.Module):
    """Steps that each take an earlier value; outputs may be the input, the same tensor twice, or need no gradient."""

    def __init__(self, steps, outputs, frozen) -> None:
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(CUT))
        for layer in frozen:
            self.layers[layer].requires_grad_(False)

    def forward(self, x, offsets):
        values = [x]
        for layer, place in self.steps:
            value = values[place % len(values)]
            values.append(value.detach() if layer == CUT else torch.tanh(self.layers[layer](value)))
        return self.layers[0](values[-1]), values[-1], *(values[place % len(values)] for place in self.outputs)


class WebProgram(ToyProgram):
    def output_rows(self, batch):
        return (len(batch.x),) * (2 + len(self.model.outputs))


def gradients_through(outputs, model, x, read):
    model.zero_grad()
    x.grad = None
    loss_of([outputs[i] for i in read]).backward()
    return [tensor.grad for tensor in (*model.parameters(), x)]


@pytest.mark.parametrize("executor", [ReferenceExecutor, PooledExecutor])
@given(
    steps=st.lists(st.tuples(st.integers(0, CUT), PLACES), max_size=6),
    outputs=st.lists(PLACES, max_size=3),
    frozen=st.sets(st.integers(0, CUT - 1), max_size=2),
    requires_grad=st.booleans(),
    data=st.data(),
)
def test_gradients_and_their_absence_are_eagers(executor, steps, outputs, frozen, requires_grad, data):
    model, batch = Web(steps, outputs, frozen), toy_batch(requires_grad=requires_grad)
    region = new_region(WebProgram(model), executor(), [Bucket(8)])
    region.capture()
    for _ in range(2):
        made = model(batch.x, batch.offsets)
        differentiable = [i for i, output in enumerate(made) if output.requires_grad]
        read = data.draw(st.sets(st.sampled_from(differentiable), min_size=1)) if differentiable else ()
        if read:
            expected = gradients_through(made, model, batch.x, read)
            assert_same(gradients_through(region.run(batch), model, batch.x, read), expected)
