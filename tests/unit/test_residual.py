"""Which gradients meet in the residual stream, and what happens to those that do not."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from bridge_cg_plugin.vision.kernels.residual import ResidualStream, residual_stream

from .mixes import IMAGES
from .towers import assert_close, graphs_on, new_tower, results


def wait():
    return True


def test_a_branch_ends_only_with_the_tensor_that_its_norm_read():
    stream, x, weight = ResidualStream(), torch.ones(2, 3), torch.ones(3)
    stream.begin(x, weight, wait)
    branch = stream.end(x)
    assert branch.place == (x.data_ptr(), weight.data_ptr())
    assert stream.end(x) is None
    # The same memory, but another place in autograd's graph.
    for other in (x.view(2, 3), x.detach()):
        stream.begin(x, weight, wait)
        assert stream.end(other) is None


def test_a_left_gradient_is_taken_once_by_its_own_norm():
    stream, x, weight, gradient = ResidualStream(), torch.ones(2, 3), torch.ones(3), torch.ones(2, 3)
    stream.begin(x, weight, wait)
    branch = stream.end(x)
    stream.leave(branch, gradient)
    assert stream.take(x, torch.ones(3)) is None
    assert stream.take(torch.ones(2, 3), weight) is None
    with pytest.raises(RuntimeError, match='vision_cuda_graph_kernels="exact"'):
        stream.check()
    with pytest.raises(RuntimeError, match="two branches"):
        stream.leave(branch, torch.zeros(2, 3))
    found = stream.take(x.view(1, 2, 3), weight)
    assert found[0] is branch and found[1] is gradient
    assert stream.take(x, weight) is None
    stream.check()


def test_the_sum_of_a_gradient_is_known_once_while_it_is_what_it_was():
    gradient = torch.ones(4, 3)

    def found(hand):
        stream, total = ResidualStream(), gradient.sum(0)
        stream.know(gradient, total)
        return stream.sum_of(hand(gradient)) is total, stream.sum_of(gradient)

    assert found(lambda g: g.view(4, 1, 3)) == (True, None)
    assert not any(found(hand)[0] for hand in (lambda g: g[:2], lambda g: g.view(3, 4), lambda g: g.clone()))
    assert not found(lambda g: g.view(12).mul_(2).view(4, 3))[0]


def test_a_lost_gradient_leaves_the_encoder_eager():
    @contextmanager
    def loses_gradients(modules):
        with residual_stream() as stream:
            stream.begin(modules[0].pos_embed.weight, modules[0].pos_embed.weight, wait)
            stream.leave(stream.end(modules[0].pos_embed.weight), torch.ones(1))
            yield

    model = new_tower()
    expected = results(model, IMAGES)
    with graphs_on(model, capture=False, strict=False, kernels="fast") as graphs:
        kernels = graphs.workload.kernels
        kernels.family = replace(kernels.family, reordering_kernels=loses_gradients)
        assert graphs.capture() is False
        assert graphs.failure.startswith("CaptureError")
        assert "1 residual gradients were never added" in graphs.failure
        found = results(model, IMAGES)
        assert graphs.statistics().fallbacks == {"capture_failed": 1}
    assert_close(found[0] + list(found[1]), expected[0] + list(expected[1]), 0.0)
