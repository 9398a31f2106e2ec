"""Capture: what can go wrong, and that the process goes on."""

import gc

import pytest
import torch

from ..regions import new_region


def usable(tower_module, model, batch) -> bool:
    """Whether eager training and random numbers work."""
    outputs = tower_module.step(model, batch)
    torch.randn(4, device="cuda")
    torch.cuda.synchronize()
    return all(o.isfinite().all() for o in outputs)


@pytest.mark.first
def test_host_read_during_capture(tower_module, model, grads, graphs_of, monkeypatch):
    helper = graphs_of(capture=False, buckets=(1024,), strict=False)
    batch = tower_module.make_batch([(1, 28, 28)], model)
    original = model.decoder.forward

    def reads_the_device(*args, **kwargs):
        if torch.cuda.is_current_stream_capturing():
            kwargs["hidden_states"].sum().item()
        return original(*args, **kwargs)

    model.decoder.forward = reads_the_device
    helper.create_cudagraphs()
    assert not helper.graphs.captured
    assert "CaptureError" in helper.graphs.failure
    assert usable(tower_module, model, batch)
    del model.decoder.forward
    helper.create_cudagraphs()
    assert helper.graphs.captured
    assert usable(tower_module, model, batch)
    assert helper.graphs.statistics().replays == 1


def test_out_of_memory_falls_back(tower_module, model, grads, graphs_of, caplog):
    batch = tower_module.make_batch([(1, 28, 28)], model)
    tower_module.step(model, batch)
    helper = graphs_of(capture=False, buckets=(1024, 65536), strict=False)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 6 * 2**30) / total)
    try:
        helper.create_cudagraphs()
        assert not helper.graphs.captured
        assert "max_vision_cuda_graph_seq_length" in caplog.text
        assert len([r for r in caplog.records if "could not be captured" in r.message]) == 1
        assert usable(tower_module, model, batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_live_autograd_graph_of_an_eager_pass(tower_module, model, grads, graphs_of):
    batch = tower_module.make_batch([(1, 28, 28)], model)
    alive = tower_module.forward(model, batch)
    helper = graphs_of(buckets=(1024,))
    assert helper.graphs.captured
    torch.autograd.backward(alive, batch.gradients)
    assert usable(tower_module, model, batch)


def test_after_an_eager_batch_of_the_buckets_own_shape(tower_module, model, grads, graphs_of):
    """Transformer Engine then compares its cached, on-device max_seqlen with the captured one, which waits."""
    batch = tower_module.make_batch([(1, 28, 28)] + [(1, 2, 2)] * 31, model)
    tower_module.step(model, batch)
    helper = graphs_of(capture=False, buckets=(batch.tokens,), max_frames=32)
    from bridge_cg_plugin.graphs.buckets import Bucket

    program = helper.graphs.workload.encoder
    region = new_region(program, helper.graphs.executor, [Bucket(batch.tokens, (32, 784))])
    region.capture()
    assert region.slots


@pytest.mark.first
def test_memory_is_released(tower_module, model, grads, graphs_of):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    helper = graphs_of(buckets=(1024, 4096))
    taken = helper.graphs.statistics().graph_bytes
    helper.delete_cuda_graphs()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 0.05 * taken
