"""What cuDNN is asked for, and where it can be asked."""

import importlib
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.vision.kernels import cudnn_graphs
from bridge_cg_plugin.vision.kernels.cudnn_graphs import SegmentShape, backward_graph, forward_graph, unavailable

SHAPE = SegmentShape(8, 3392, 6720, 16, 72, torch.bfloat16, 72**-0.5)
# A GPU as cuDNN describes an H200, so that it answers without one.
H200 = {
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
    "supportCoopLaunch": 1, "deviceVer": 900, "driverVer": 13000, "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000, "l2CacheSize": 62914560, "totalGlobalMem": 150000000000, "cudaDeviceId": 0,
    "deviceName": "NVIDIA H200",
}  # fmt: skip
OLD = SimpleNamespace(__version__="1.28.0", backend_version=lambda: 91900)
OLD_LIBRARY = SimpleNamespace(__version__="1.32.0", backend_version=lambda: 90501)
NEW = SimpleNamespace(__version__="2.0.0rc1", backend_version=lambda: 91900)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "nvidia-cudnn-frontend cannot be used"),
        (SimpleNamespace(), "nvidia-cudnn-frontend cannot be used"),
        (OLD, "nvidia-cudnn-frontend is 1.28.0, older than 1.29"),
        (OLD_LIBRARY, "cuDNN is 90501, older than 90600"),
    ],
    ids=["missing", "another package", "old", "old library"],
)
def test_why_cudnn_cannot_be_called(monkeypatch, module, reason):
    monkeypatch.setitem(sys.modules, "cudnn", module)
    assert reason in unavailable()


def test_a_newer_package_is_taken(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", NEW)
    assert unavailable() is None


class NotSupported(Exception):
    pass


@pytest.fixture
def with_plans(monkeypatch):
    """Return a function that lets plans be of a class of the test's."""
    remembered = (cudnn_graphs.segment_plans, cudnn_graphs._handle)
    fake = SimpleNamespace(create_handle=lambda: object(), cudnnGraphNotSupportedError=NotSupported)
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(cudnn_graphs, "forward_graph", lambda cudnn, shape, handle: ("forward", shape, handle))
    monkeypatch.setattr(cudnn_graphs, "backward_graph", lambda cudnn, shape, handle: ("backward", shape, handle))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for function in remembered:
        function.cache_clear()
    yield lambda kind: monkeypatch.setattr(cudnn_graphs, "_Plan", kind)
    for function in remembered:
        function.cache_clear()


@pytest.mark.parametrize(
    "error", [NotSupported("no engine\nmore"), RuntimeError("no engine"), ImportError("no engine")]
)
def test_a_shape_without_a_kernel_is_said_once_and_never_tried_again(with_plans, caplog, error):
    tried = []

    def plan(cudnn, graph, handle):
        tried.append(graph)
        raise error

    with_plans(plan)
    assert cudnn_graphs.segment_plans(SHAPE, 0) is None
    assert cudnn_graphs.segment_plans(SHAPE, 0) is None
    assert len(tried) == 1
    (record,) = caplog.records
    assert "cannot be called directly" in record.message and record.message.endswith(
        f"{type(error).__name__}: no engine"
    )


def test_plans_are_kept_as_recorded_graphs_run_their_kernels(with_plans):
    made = []

    class Plan:
        def __init__(self, cudnn, graph, handle):
            made.append((graph, handle))

    with_plans(Plan)
    first = cudnn_graphs.segment_plans(SHAPE, 0)
    assert cudnn_graphs.segment_plans(SegmentShape(8, 3392, 6720, 16, 72, torch.bfloat16, 72**-0.5), 0) is first
    cudnn_graphs.segment_plans(SHAPE, 1)
    assert [(graph[0], graph[1]) for graph, _ in made] == 2 * [("forward", SHAPE), ("backward", SHAPE)]
    handles = [handle for _, handle in made]
    assert handles[0] is handles[1] is not handles[2]


@pytest.fixture(scope="module")
def cudnn():
    return pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")


def planned_or_refused(cudnn, describe, shape):
    """Return why cuDNN refuses a plan for an H200; None where it makes one."""
    device = cudnn.create_device_properties(json.dumps(H200))
    graph = describe(cudnn, shape, sm_version=90, device_property=device)
    graph.validate()
    graph.build_operation_graph()
    try:
        graph.create_execution_plans([cudnn.heur_mode.A])
    except cudnn.cudnnGraphNotSupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("describe", [forward_graph, backward_graph], ids=["forward", "backward"])
@pytest.mark.parametrize("segments", [1, 8, 512])
def test_cudnn_has_a_kernel_for_packed_segments(cudnn, describe, segments):
    """Without a driver a plan cannot be compiled; nothing else is missing."""
    refusal = planned_or_refused(cudnn, describe, SegmentShape(segments, 1024, 6720, 16, 72, torch.bfloat16, 0.1))
    assert refusal is None or "RUNTIME_PREREQUISITE_MISSING" in refusal
    assert refusal is None or "engineId" in refusal


def test_cudnn_refuses_heads_that_no_kernel_is_made_for(cudnn):
    with pytest.raises(Exception, match="(?i)dim|support|multiple"):
        refusal = planned_or_refused(cudnn, forward_graph, SegmentShape(8, 1024, 6720, 16, 71, torch.bfloat16, 0.1))
        raise AssertionError(refusal)


def test_the_module_is_imported_when_asked_only():
    assert "cudnn" not in vars(importlib.import_module("bridge_cg_plugin.vision.kernels.cudnn_graphs"))
