"""Buffers that a loop replaces by others like them: modules get their own tensors back, with the values of these."""

import pytest
import torch
from torch import nn

from bridge_cg_plugin.upstream.hooks.loops.returning_buffers import ReturningBuffers


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)


def replaced(module, value):
    module.scale = torch.full_like(module.scale, value)
    return module.scale


@pytest.fixture
def scale():
    return torch.ones(3)


def test_a_buffer_returns_with_the_values_of_what_replaced_it(scale):
    module = Scaled(scale)
    returning = ReturningBuffers([module])
    address = replaced(module, 2.0).data_ptr()
    returning.put_back()
    assert module.scale is scale and scale.data_ptr() == address and scale.tolist() == [2.0] * 3


def test_a_buffer_that_returns_counts_as_written_to(scale):
    """Kernels get values on the host once, so recordings of them hold while nobody has written there."""
    module = Scaled(scale)
    returning, versions = ReturningBuffers([module]), [scale._version]
    for value in (2.0, 3.0):
        replaced(module, value)
        returning.put_back()
        versions.append(scale._version)
    assert len(set(versions)) == len(versions)


def test_a_buffer_of_two_modules_keeps_its_values_in_the_other_one(scale):
    one, other = Scaled(scale), Scaled(scale)
    returning = ReturningBuffers([one, other])
    own = replaced(other, 2.0)
    returning.put_back()
    assert one.scale.tolist() == [1.0] * 3 and other.scale is own and own.tolist() == [2.0] * 3


def test_a_buffer_that_an_attribute_has_too_keeps_its_values_there(scale):
    """As rotary embeddings that change with the length keep the frequencies that they began with."""
    module = Scaled(scale)
    module.original = scale
    returning = ReturningBuffers([module])
    replaced(module, 2.0)
    returning.put_back()
    assert module.original.tolist() == [1.0] * 3 and module.scale.tolist() == [2.0] * 3


def test_buffers_of_two_modules_return_where_only_their_memory_is_another(scale):
    one, other = Scaled(scale), Scaled(scale)
    other.original = scale
    returning = ReturningBuffers([one, other])
    for module in (one, other):
        replaced(module, 1.0)
    returning.put_back()
    assert one.scale is other.scale is scale


def test_buffers_of_what_models_share_are_left_to_one_of_them(scale):
    own, shared = Scaled(scale), Scaled(scale.clone())
    returning = ReturningBuffers([nn.ModuleList((own, shared))], [shared])
    found = [replaced(module, 2.0) for module in (own, shared)]
    returning.put_back()
    assert own.scale is scale and shared.scale is found[1]


def test_a_buffer_made_in_inference_mode_replaces_another(scale):
    module = Scaled(scale)
    returning = ReturningBuffers([module])
    with torch.inference_mode():
        replaced(module, 2.0)
        returning.put_back()
    replaced(module, 3.0)
    returning.put_back()
    assert module.scale is scale and scale.tolist() == [3.0] * 3
