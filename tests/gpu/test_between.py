"""Bridge's Qwen3-VL step with its model on graphs: from its batch to its loss the host does not wait for the device.

Both runs that are compared have graphs and deterministic algorithms; only what lies between encoder and language model
differs.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from megatron.bridge.models.qwen_vl import qwen3_vl_provider, qwen3_vl_step
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn.functional import silu
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks import batches, between
from bridge_cg_plugin.upstream.hooks.helpers.constructors import decoder_helpers, encoder_helper
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry import seam
from tests.models import packed_parity as parity

from ..unit.vlm import state
from .common import host_may_not_wait
from .towers import IMAGE, START, WIDTH, language_model

pytestmark = [
    pytest.mark.skipif(
        not seam("step_padding").expected_in(bridge_release()), reason="this release's step waits for the device"
    ),
    pytest.mark.usefixtures("deterministic_algorithms"),
]
LENGTH = 250  # the step pads 250 tokens to 256
VIDEO = START + 1
# Of each sample: its images as (height, width) in patches.
SAMPLES = ([(16, 24)], [], [(12, 20), (16, 16)])
PACKED_OPTIONS = {
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_modules": [],
    "cuda_graph_max_packed_seqs": 4,
    "cuda_graph_packed_strict": True,
}


@pytest.fixture(scope="module")
def model(tower_module):
    torch.manual_seed(0)
    with parity.deterministic():  # attention asks when it is built
        return build().cuda().bfloat16().train()


def build():
    provider = qwen3_vl_provider.Qwen3VLModelProvider(
        **language_model(num_layers=3, seq_length=LENGTH),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        language_max_sequence_length=1024,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_config=Qwen3VLVisionConfig(depth=3, deepstack_visual_indexes=[0, 1], out_hidden_size=WIDTH),
        out_hidden_size=WIDTH,
        **PACKED_OPTIONS,
    )
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider.provide(pre_process=True, post_process=True)


def new_batch():
    """Return a batch as collation makes it, on the host."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.zeros(len(SAMPLES), LENGTH, dtype=torch.long)
    for row, images in zip(tokens, SAMPLES, strict=True):
        text = [torch.randint(1, IMAGE, (20,), generator=generator)]
        for height, width in images:
            text += [torch.tensor([START]), torch.full((height * width // 4,), IMAGE), text[0]]
        row[: sum(map(len, text))] = torch.cat(text)
    grid = torch.tensor([(1, *image) for images in SAMPLES for image in images])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 16 * 16, generator=generator).bfloat16()
    return {
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),
        "loss_mask": (tokens > 0).float(),
        "visual_inputs": GenericVisualInputs(pixel_values=pixels, image_grid_thw=grid),
    }


def stepped(model, grads, packed, around=nullcontext):
    """Return the output, the loss and all gradients of a step."""
    grads.zero()
    described = state(graphs=False)
    described.cfg.dataset.enable_in_batch_packing = packed
    batches = iter([new_batch()])
    with around():
        output, loss_function = qwen3_vl_step.forward_step(described, batches, model)
        loss = loss_function(output)[0]
    loss.backward()
    return [output.detach(), loss.detach(), *grads.copy()]


@contextmanager
def graphs_on(model, packed, observed):
    """Put the encoder, and the decoder for packed batches, on graphs of what `observed` runs; yields them."""
    vision = VisionGraphOptions(impl="transformer_engine", strict=True)
    helpers = [encoder_helper(model, model.vision_model.config, options=vision)]
    if packed:
        helpers += decoder_helpers([model], model.config, num_microbatches=1)
    try:
        observed()
        for helper in helpers:
            helper.create_cudagraphs()
            assert helper.graphs.captured, helper.graphs.failure
        yield [helper.graphs for helper in helpers]
    finally:
        for helper in helpers:
            helper.delete_cuda_graphs()


def leave_to_upstream(patch):
    """Let a step ask the device about its tokens."""
    for module in (batches, between):
        patch.setattr(module, "any_on_graphs", lambda: False)


@pytest.mark.first
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_up_to_its_loss_a_step_does_not_wait_and_equals_upstreams(model, tower_module, packed, monkeypatch):
    grads = tower_module.MainGrads(model)
    with graphs_on(model, packed, lambda: stepped(model, grads, packed)) as graphs:
        with monkeypatch.context() as upstreams:
            leave_to_upstream(upstreams)
            expected = stepped(model, grads, packed)
        found = [stepped(model, grads, packed, around) for around in (nullcontext, host_may_not_wait)]
        for each in graphs:
            assert each.statistics().replays == 3 and not each.statistics().fallbacks, each.statistics()
        leave_to_upstream(monkeypatch)
        with pytest.raises(RuntimeError, match="synchronizing"):
            stepped(model, grads, packed, host_may_not_wait)
    for results in found:
        assert all(map(torch.equal, results, expected))
    assert all(gradient.isfinite().all() for gradient in expected)
