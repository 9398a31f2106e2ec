"""What graphs are recorded by: streams of their own for those that offload, memory that all sizes share."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.announce import announce_once
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphExecutor, ReferenceExecutor, _recording_stream
from bridge_cg_plugin.graphs.recordings.streams import ReplayStream
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.helpers import constructors as helpers
from bridge_cg_plugin.upstream.hooks.helpers import graph_helper
from bridge_cg_plugin.upstream.hooks.helpers.constructors import decoder_helpers, encoder_helper
from bridge_cg_plugin.upstream.kernels.recompute import random_states

from ..executors import new_executor
from .packs import DEFAULTS as PACKED
from .packs import new_model
from .towers import DEFAULTS, new_tower
from .toy import ToyProgram, toy_region


def keeping(asked):
    return lambda states=None, *args, replays_aside, **kwargs: asked.append((states, replays_aside)) or new_executor()


CASES = {
    "with offloading": ({"offload": ("mlp",)}, True),
    "with a target": ({"offload_above_gb": 1.0}, True),
    "without either": ({}, False),
}


@pytest.mark.parametrize("options, aside", CASES.values(), ids=CASES)
def test_megatrons_random_states_are_known_and_replays_of_what_offloads_are_aside(monkeypatch, options, aside):
    """Attention asks for their state; a generator that a capture does not know ends it."""
    asked, model, packs = [], new_tower(), new_model()
    monkeypatch.setattr(helpers, "default_executor", keeping(asked))
    encoder_helper(model, model.config, options=VisionGraphOptions(**DEFAULTS, **options)).delete_cuda_graphs()
    for name, value in {**PACKED, **{f"cuda_graph_packed_{name}": value for name, value in options.items()}}.items():
        setattr(packs.config, name, value)
    decoder_helpers([packs], packs.config)[0].delete_cuda_graphs()
    assert asked == [(random_states, aside)] * 2


@pytest.mark.parametrize(
    "shared, register, arenas",
    [(False, None, True), (True, None, False), (True, "1", False), (True, "0", True)],
    ids=["one rank", "unset", "registered", "not registered"],
)
def test_graphs_with_exchanges_share_memory_where_nccl_registers_none(monkeypatch, capsys, shared, register, arenas):
    given = {}
    announce_once.cache_clear()
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if register is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(graph_helper, "CudaGraphExecutor", lambda **kwargs: given.update(kwargs))
    for _ in range(2):
        graph_helper.default_executor(shared=shared)
    assert given["arenas"] == arenas
    assert capsys.readouterr().out.count("NCCL_GRAPH_REGISTER=0") == (not arenas)


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
