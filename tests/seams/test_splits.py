"""The split of what a projection made into queries, keys and values, while a region is recorded."""

import pytest
import torch
from megatron.core.transformer import attention
from torch.autograd import Function

from bridge_cg_plugin.upstream.kernels.layers import splits_without_copies

TOKENS, HEADS, WIDTH = 5, 2, 4


class Attention(Function):
    """Has given gradients, as Transformer Engine's attention has those that its kernels wrote."""

    @staticmethod
    def forward(ctx, query, key, value, gradients):
        ctx.gradients = gradients
        return query + key + value

    @staticmethod
    def backward(ctx, unused):
        return *ctx.gradients, None


def split_gradient(gradients, packed: bool):
    """Return the gradient of what is split in the way of megatron-core's `SelfAttention`."""
    mixed, found = torch.zeros(TOKENS, 1, HEADS, 3 * WIDTH, requires_grad=True), []
    mixed.register_hook(found.append)
    query, key, value = attention.SplitAlongDim(mixed, 3, [WIDTH] * 3)
    query = query.reshape(TOKENS, 1, -1, WIDTH)
    products = [product.squeeze(1) if packed else product for product in (query, key, value)]
    Attention.apply(*products, gradients).sum().backward()
    return found[0]


def side_by_side(packed: bool):
    """Return gradients that lie in one buffer, head by head, and the buffer."""
    whole = torch.randn(TOKENS, *([] if packed else [1]), HEADS, 3, WIDTH)
    return whole, whole.unbind(-2)


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_that_lie_side_by_side_are_not_copied(packed):
    whole, gradients = side_by_side(packed)
    with splits_without_copies():
        found = split_gradient(gradients, packed)
    assert found.data_ptr() == whole.data_ptr() and found.is_contiguous()
    assert torch.equal(found, whole.view(TOKENS, 1, HEADS, 3 * WIDTH))


@pytest.mark.parametrize("packed", [True, False])
def test_others_are_put_together(packed):
    whole, gradients = side_by_side(packed)
    with splits_without_copies():
        found = split_gradient([gradient.clone() for gradient in gradients], packed)
    assert torch.equal(found, whole.view(TOKENS, 1, HEADS, 3 * WIDTH))


def test_a_function_that_megatron_core_has_found_stays(monkeypatch):
    def split(*arguments):
        return torch.split(*arguments)

    monkeypatch.setattr(attention, "SplitAlongDim", split)
    with splits_without_copies():
        assert attention.SplitAlongDim is split
