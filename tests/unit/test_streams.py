"""Streams and hooks of an executor, without a GPU."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphExecutor, ReferenceExecutor, _recording_stream
from bridge_cg_plugin.graphs.replays.streams import ReplayStream

from .toy import ToyProgram, toy_region


def test_an_event_without_a_stream_of_its_own_is_refused():
    with pytest.raises(ValueError, match="cuda_graph_event: it must be None without cuda_graph_stream"):
        ReplayStream(None, object())


@pytest.fixture
def no_streams_kept():
    _recording_stream.cache_clear()
    yield
    _recording_stream.cache_clear()


@pytest.mark.parametrize(("side_stream", "main"), [(False, 0), (True, -1)])
def test_main_work_goes_before_the_side_work_and_before_nothing_else(monkeypatch, no_streams_kept, side_stream, main):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: SimpleNamespace(priority=priority))
    executor = CudaGraphExecutor(torch.device("cuda", 0), side_stream=side_stream)
    assert executor._stream.priority == main
    assert executor.side_stream()._stream.priority == 0  # the lowest that CUDA has
    other = CudaGraphExecutor(torch.device("cuda", 0), side_stream=side_stream)
    assert other._stream is executor._stream, "PyTorch keeps a workspace for each stream for good"
    assert other.side_stream()._stream is executor.side_stream()._stream is not executor._stream


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_called_once_around_a_recordings_warm_up_also_one_that_fails(monkeypatch, fails):
    calls, own = [], ToyProgram.forward

    def forward(self, buffers, bucket):
        calls.append("pass")
        if fails:
            raise RuntimeError("made to fail")
        return own(self, buffers, bucket)

    monkeypatch.setattr(ToyProgram, "forward", forward)
    hooks = {f"{when}_warmup_hook": partial(calls.append, when) for when in ("pre", "post")}
    with pytest.raises(CaptureError, match="made to fail") if fails else nullcontext():
        toy_region(capacities=(8,), executor=ReferenceExecutor(**hooks))
    assert calls == (["pre", "pass", "post"] if fails else ["pre", "pass", "pass", "post", "pass"])
