"""Outputs of a frozen encoder, computed once: on a GPU they leave for page-locked memory and come back to the bit."""

import pytest
import torch

from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper
from bridge_cg_plugin.vision.kernels.fingerprint import Piece, add, add_by_kernel, fingerprint

IMAGES = [[1, 28, 28], [1, 16, 24]]
ONE = [[1, 28, 32]]  # large enough to attend unpacked, by Transformer Engine's own call


@pytest.fixture
def frozen(model):
    return model.requires_grad_(False)


@pytest.mark.first
def test_three_passes_of_a_batch_encode_it_once(frozen, graphs_of, tower_module):
    batches = [tower_module.make_batch(IMAGES, frozen, seed) for seed in range(3)]
    with torch.no_grad():
        expected = [tower_module.forward(frozen, batch) for batch in batches]
    helper = graphs_of(frozen_outputs_gb=1.0, buckets=(1280,))
    asked = helper.graphs.workload.frozen
    for _ in range(3):
        with helper.graphs.step():
            for batch, outputs in zip(batches, expected, strict=True):
                found = tower_module.forward(frozen, batch)
                assert all(map(torch.equal, found, outputs))
                found[0].fill_(torch.nan)
    assert (asked.found, asked.replays) == (6, 3)


def test_one_large_image_is_encoded_once_and_draws_nothing(frozen, graphs_of, tower_module):
    batch = tower_module.make_batch(ONE, frozen, 0)
    with torch.no_grad():
        expected = tower_module.forward(frozen, batch)
    helper = graphs_of(frozen_outputs_gb=1.0, buckets=(896,), max_frames=1)
    asked, default = helper.graphs.workload.frozen, torch.cuda.default_generators[torch.cuda.current_device()]
    before = default.get_state()
    for _ in range(3):
        with helper.graphs.step():
            assert all(map(torch.equal, tower_module.forward(frozen, batch), expected))
    assert (asked.found, asked.replays) == (2, 1)
    assert torch.equal(default.get_state(), before)
    assert not torch.equal(torch.rand(4, device="cuda"), torch.rand(4, device="cuda"))


@pytest.fixture
def reference(frozen, tower_module):
    """Return another tower of the same weights, whose modules Transformer Engine has numbered on."""
    made = tower_module.build_tower(layers=len(frozen.decoder.layers)).requires_grad_(False)
    with torch.no_grad():
        for one, other in zip(frozen.parameters(), made.parameters(), strict=True):
            other.copy_(one)
    return made


@pytest.mark.parametrize("images", [IMAGES, ONE], ids=["two images", "one image"])
def test_a_policy_and_its_reference_encode_a_batch_once(frozen, reference, graphs_of, tower_module, images):
    settings = {"frozen_outputs_gb": 1.0, "buckets": (1280,), "max_frames": len(images)}
    first = graphs_of(**settings)
    options = VisionGraphOptions(impl="transformer_engine", strict=True, **settings)
    second = VisionTECudaGraphHelper(reference, reference.config, options=options)
    try:
        second.create_cudagraphs()
        for seed in range(3):
            batch = tower_module.make_batch(images, frozen, seed)
            with torch.no_grad(), first.graphs.step():
                expected = tower_module.forward(frozen, batch)
            with torch.no_grad(), second.graphs.step():
                assert all(map(torch.equal, tower_module.forward(reference, batch), expected))
        asked = [helper.graphs.workload.frozen for helper in (first, second)]
        assert [(each.found, each.replays) for each in asked] == [(0, 3), (2, 1)]
    finally:
        second.delete_cuda_graphs()


def test_weights_written_behind_pytorchs_back_are_seen(frozen, graphs_of, tower_module):
    batch = tower_module.make_batch(IMAGES, frozen, 0)
    helper = graphs_of(frozen_outputs_gb=1.0, buckets=(1280,))
    with helper.graphs.step():
        before = tower_module.forward(frozen, batch)[0]
    frozen.merger.linear_fc2.weight.data[5, 7] += 1.0
    with helper.graphs.step():
        after = tower_module.forward(frozen, batch)[0]
    assert not torch.equal(before, after)
    assert helper.graphs.workload.frozen.found == 0


@pytest.mark.parametrize("count", [1, 4095, 4_000_001])
def test_the_kernel_adds_as_pytorch_does(count):
    words = torch.randint(-(2**31), 2**31, (count,), device="cuda", dtype=torch.int64).int()
    by_kernel, by_pytorch = (torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(2))
    add_by_kernel(by_kernel, [Piece(words.data_ptr(), count, 2**40 + 3)])
    add(by_pytorch, words, 2**40 + 3)
    assert torch.equal(by_kernel, by_pytorch)


def test_host_and_device_agree():
    tensors = [torch.randn(33, 5), torch.randn(7).bfloat16(), torch.randint(0, 99, (12,)), torch.randn(600_001)]
    tensors += [torch.randn(4, 6).t(), torch.randn(0)]
    assert fingerprint(tensors) == fingerprint([each.cuda() for each in tensors])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_a_tensor_may_begin_inside_a_word(dtype):
    whole = (torch.randn(4097) * 50).to(dtype)
    assert fingerprint([whole.cuda()[1:]]) == fingerprint([whole[1:]])
