"""What cuDNN is asked for, and where it can be asked."""

import dataclasses
import re
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.vision.kernels import cudnn_attention
from bridge_cg_plugin.vision.kernels.cudnn_attention import SegmentShape, unavailable

SHAPE = SegmentShape(8, 3392, 6720, 16, 72, torch.bfloat16, 72**-0.5)


def package(version, library=91900):
    return SimpleNamespace(__version__=version, backend_version=lambda: library)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "nvidia-cudnn-frontend cannot be used"),
        (SimpleNamespace(), "nvidia-cudnn-frontend cannot be used"),
        (package("1.23.0"), "nvidia-cudnn-frontend is 1.23.0, older than 1.24"),
        (package("1.26.0"), "nvidia-cudnn-frontend 1.26.0 needs cuDNN 92200, and this is 91900"),
        (package("1.27.0"), "nvidia-cudnn-frontend 1.27.0 may choose kernels of its own"),
        (package("1.32.0", 90501), "cuDNN is 90501, older than 90600"),
        (package("1.24.0", 92200), None),
        (package("1.28.0"), None),
    ],
    ids=["missing", "another package", "old", "of a later library", "unchosen", "old library", "container", "chosen"],
)
def test_why_cudnn_cannot_be_called(monkeypatch, module, reason):
    monkeypatch.setitem(sys.modules, "cudnn", module)
    found = unavailable()
    assert found is None if reason is None else reason in found


def test_the_pinned_package_is_one_that_is_taken():
    root = Path(__file__).resolve().parents[2]
    (pinned,) = re.findall(
        r"^nvidia-cudnn-frontend==([\d.]+)$", (root / "requirements/attention.txt").read_text(), re.M
    )
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest = ".".join(map(str, cudnn_attention.OLDEST_PACKAGE))
    unchosen = ".".join(map(str, cudnn_attention.UNCHOSEN))
    assert extras["attention"] == [f"{cudnn_attention.PACKAGE}>={oldest},!={unchosen}.*"]
    assert tuple(map(int, pinned.split(".")[:2])) >= cudnn_attention.OLDEST_PACKAGE


class NotSupported(Exception):
    pass


@pytest.fixture
def with_plans(monkeypatch):
    """Return a function that lets plans be of a class of the test's."""
    names = ("segment_plans", "_forward_plan", "_handle", "_say_refused")
    remembered = [getattr(cudnn_attention, name) for name in names]
    fake = SimpleNamespace(create_handle=lambda: object(), cudnnGraphNotSupportedError=NotSupported)
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(cudnn_attention, "forward_graph", lambda cudnn, shape, handle: ("forward", shape, handle))
    monkeypatch.setattr(cudnn_attention, "backward_graph", lambda cudnn, shape, handle: ("backward", shape, handle))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for function in remembered:
        function.cache_clear()
    yield lambda kind: monkeypatch.setattr(cudnn_attention, "_Plan", kind)
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
    other = dataclasses.replace(SHAPE, segments=16)
    assert [cudnn_attention.segment_plans(shape, 0) for shape in (SHAPE, SHAPE, other, other)] == [None] * 4
    assert len(tried) == 2
    (record,) = caplog.records
    what = "attention of 16 heads of 72 in bfloat16, which other kernels compute"
    assert record.message.endswith(f"cuDNN cannot be called directly for {what}: {type(error).__name__}: no engine")


def test_plans_are_kept_for_recorded_graphs_and_a_forward_is_of_all_buckets_as_far_as_segments_go(with_plans):
    made = []

    class Plan:
        def __init__(self, cudnn, graph, handle):
            made.append((graph, handle))

    with_plans(Plan)
    first = cudnn_attention.segment_plans(SHAPE, 0)
    assert cudnn_attention.segment_plans(dataclasses.replace(SHAPE), 0) is first
    cudnn_attention.segment_plans(SHAPE, 1)
    forward = dataclasses.replace(SHAPE, largest=8192, tokens=0)
    assert [(graph[0], graph[1]) for graph, _ in made] == 2 * [("forward", forward), ("backward", SHAPE)]
    handles = [handle for _, handle in made]
    assert handles[0] is handles[1] is not handles[2]
    larger = [dataclasses.replace(SHAPE, largest=largest, tokens=2 * largest) for largest in (8192, 8193)]
    forwards = [cudnn_attention.segment_plans(shape, 0)[0] for shape in larger]
    assert first[0] is forwards[0] is not forwards[1]
    assert [graph[1].largest for graph, _ in made[4:] if graph[0] == "forward"] == [16384]


def test_plans_are_not_built_inside_a_capture(with_plans, monkeypatch):
    with_plans(lambda *args: pytest.fail("was built"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="would be built for the first time inside a capture"):
        cudnn_attention.segment_plans(SHAPE, 0)


class PlannedGraph:
    """A graph of cuDNN's frontend for which it has an engine of its own and then the library's."""

    plans = (SimpleNamespace(engine_id="python"), SimpleNamespace(engine_id="native"))

    def __init__(self):
        self.selected, self.runs = None, []

    def validate(self):
        pass

    build_operation_graph = check_support = build_plans = validate

    def create_execution_plans(self, modes):
        self.modes = modes

    def select_plan(self, index):
        self.selected = index

    def get_workspace_size(self):
        return 0

    def execute(self, pointers, workspace, handle):
        self.runs.append(pointers)


@pytest.fixture
def library(monkeypatch):
    """Return cuDNN's frontend as a plan uses it."""
    engines = SimpleNamespace(is_python_engine=lambda engine: engine == "python")
    monkeypatch.setitem(sys.modules, "cudnn.engines.engine_ids", engines)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return SimpleNamespace(
        heur_mode=SimpleNamespace(A="A"),
        cudnnGraphNotSupportedError=NotSupported,
        set_stream=lambda handle, stream: None,
    )


@pytest.mark.parametrize("chosen", [1, None], ids=["beside others", "which alone has plans"])
def test_the_librarys_first_choice_runs_on_what_is_bound(library, monkeypatch, chosen):
    if chosen is None:
        monkeypatch.delattr(PlannedGraph, "select_plan")
        monkeypatch.delitem(sys.modules, "cudnn.engines.engine_ids")
    graph, lengths = PlannedGraph(), torch.zeros(1)
    cudnn_attention._Plan(library, graph, "handle").run({cudnn_attention.LENGTHS: lengths})
    assert (graph.modes, graph.selected) == (["A"], chosen)
    assert graph.runs == [{cudnn_attention.LENGTHS: lengths.data_ptr()}]


def test_a_plan_runs_outside_a_capture_first(library, monkeypatch):
    graph, tensors = PlannedGraph(), {cudnn_attention.LENGTHS: torch.zeros(1)}
    plan = cudnn_attention._Plan(library, graph, "handle")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="would run for the first time inside a capture"):
        plan.run(tensors)
    assert not graph.runs
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plan.run(tensors)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    plan.run(tensors)
    assert len(graph.runs) == 2
