"""Batches on a GPU's own copy stream: they arrive while the GPU computes, whole, however their memory is used again."""

import pytest
import torch
from megatron.bridge.models.qwen_vl import qwen3_vl_step
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from torch.utils.data._utils.pin_memory import pin_memory

from bridge_cg_plugin.upstream.hooks import batches
from bridge_cg_plugin.upstream.hooks import batches as batch_copies
from bridge_cg_plugin.upstream.hooks.batches import CopyStream

KEYWORDS = {"is_first_pp_stage": True, "is_last_pp_stage": True}
BATCHES = 40
# Clock cycles: long enough to outlast a copy, and so long that it is surely under way when the host looks.
SHORT, LONG = 2_000_000, 1_000_000_000


@pytest.fixture
def copies(monkeypatch):
    made = CopyStream()
    monkeypatch.setattr(batch_copies, "any_on_graphs", lambda: True)
    monkeypatch.setattr(batches, "COPIES", made)
    yield made
    torch.cuda.synchronize()


def source(count, locked=True):
    """Yield batches of 16 MiB of pixels and some tokens, all equal to the batch's number."""
    for number in range(count):
        pixels = torch.full((4 << 20,), float(number))
        batch = {"tokens": torch.full((2, 64), number), "visual_inputs": GenericVisualInputs(pixel_values=pixels)}
        yield pin_memory(batch) if locked else batch


def test_images_are_page_locked(copies):
    batch = next(source(1))
    assert batch["tokens"].is_pinned() and batch["visual_inputs"].pixel_values.is_pinned()


@pytest.mark.first
@pytest.mark.parametrize("locked", [True, False], ids=["page-locked", "pageable"])
def test_batches_arrive_whole_while_the_gpu_computes(copies, locked):
    data, right = source(BATCHES, locked), []
    for number in range(BATCHES):
        batch = qwen3_vl_step.get_batch_from_iterator(data, **KEYWORDS)
        torch.cuda._sleep(SHORT)
        right += [(batch["tokens"] == number).all(), (batch["visual_inputs"].pixel_values == number).all()]
    assert all(right)


def test_a_copy_does_not_wait_for_what_the_gpu_computes(copies):
    data = iter(list(source(2)))  # page-locking may wait for the GPU
    qwen3_vl_step.get_batch_from_iterator(data, **KEYWORDS)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    computed = torch.cuda.Event()
    computed.record()
    batch = qwen3_vl_step.get_batch_from_iterator(data, **KEYWORDS)
    copies._stream_of(torch.cuda.current_stream().device).synchronize()
    assert not computed.query()
    assert (batch["tokens"] == 1).all() and (batch["visual_inputs"].pixel_values == 1).all()
