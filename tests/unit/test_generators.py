"""Random states around recordings: what a capture that fails does to them, and what a recording leaves of them."""

from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings import capture
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphExecutor

from ..executors import KINDS
from ..regions import new_region
from ..rows_program import RowsProgram


class State:
    """What PyTorch's generators on a GPU share and graphs are tied to."""

    def __init__(self, seed):
        self.seed, self.offset, self.capturing, self.in_graph = seed, 0, False, 0


class Generator:
    """A generator of one GPU."""

    def __init__(self, gpu, state):
        self._gpu, self.state = gpu, state

    def get_state(self):
        return self.state.seed, self.state.offset

    def set_state(self, values):
        self.state.seed, self.state.offset = values

    def clone_state(self):
        return Generator(self._gpu, State(self.state.seed))

    def graphsafe_get_state(self):
        return Generator(self._gpu, self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state

    def draw(self):
        state = self.state
        if self._gpu.capturing != state.capturing:
            raise RuntimeError("a state in capture mode outside of a capture, or the reverse")
        if self._gpu.capturing:
            state.in_graph += 4
            return None
        state.offset += 4
        return state.seed, state.offset - 4


class Graph:
    """A graph of one GPU."""

    def __init__(self, gpu):
        self._gpu, self._increments = gpu, {}

    def register_generator_state(self, generator):
        self._increments[generator.state] = 0

    def capture_begin(self, pool=None, capture_error_mode="global"):
        if self._gpu.broken:
            raise RuntimeError("broken")
        self.register_generator_state(self._gpu.default)
        for state in self._increments:
            state.capturing, state.in_graph = True, 0
        self._gpu.capturing = True

    def capture_end(self):
        gpu = self._gpu
        gpu.capturing, invalid, gpu.invalid = False, gpu.invalid, False
        if invalid:
            raise RuntimeError("the capture was invalidated")
        for state in self._increments:
            state.capturing, self._increments[state] = False, state.in_graph

    def reset(self):
        self._increments.clear()

    def replay(self):
        """Return the numbers that are drawn, by where they are."""
        drawn = []
        for state, increment in self._increments.items():
            for _ in range(increment // 4):
                drawn.append(Generator(self._gpu, state).draw())
        return drawn


class Gpu:
    """PyTorch's generators and graphs, as far as random numbers go.

    Attributes:
        capturing: Whether a capture is under way.
        invalid: Whether work that cannot be captured has made it fail.
        broken: Whether no capture can begin.
        torch: What stands in for PyTorch.
    """

    def __init__(self):
        self.capturing = self.invalid = self.broken = False
        self.default, self.tracked = (Generator(self, State(seed)) for seed in (1, 2))
        self.stream = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), wait_stream=lambda other: None)
        written = SimpleNamespace(zero_=lambda: None)
        self.torch = SimpleNamespace(
            cuda=self._cuda(),
            Generator=lambda device: Generator(self, State(seed=0)),
            zeros=lambda count, device: written,
            OutOfMemoryError=torch.OutOfMemoryError,
        )

    def _cuda(self):
        return SimpleNamespace(
            CUDAGraph=partial(Graph, self),
            default_generators=(self.default,),
            current_stream=lambda device: self.stream,
            stream=lambda stream: nullcontext(),
            synchronize=lambda device: None,
        )

    @contextmanager
    def forked(self):
        """Let the default generator draw from the tracker's state, as Transformer Engine's tracker does."""
        own = self.default.graphsafe_get_state()
        self.default.graphsafe_set_state(self.tracked)
        yield
        self.default.graphsafe_set_state(own)

    def draw(self):
        """Draw from both states."""
        drawn = [self.default.draw()]
        with self.forked():
            return [*drawn, self.default.draw()]

    def capture(self, body):
        """Return a graph of a body."""
        graph = Graph(self)
        with capture.capture_graph(graph, (0, 1), self.stream, (self.tracked,)):
            body()
        return graph


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(capture, "torch", made.torch)
    return made


def reads_the_device(gpu):
    gpu.draw()
    gpu.invalid = True
    raise RuntimeError("made to fail")


def fails(gpu):
    gpu.draw()
    raise RuntimeError("made to fail")


def lacks_memory(gpu):
    raise torch.OutOfMemoryError("made to fail")


def leaves_work_behind(gpu):
    gpu.draw()
    gpu.invalid = True


def fails_within_a_fork(gpu):
    with gpu.forked():
        fails(gpu)


def is_interrupted(gpu):
    gpu.draw()
    raise KeyboardInterrupt("made to fail")


FAULTS = (reads_the_device, fails, lacks_memory, leaves_work_behind, fails_within_a_fork, is_interrupted)
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


def fail(gpu, fault):
    """Let a capture fail in which megatron-core's tracker, as after each fork, keeps another generator of its state."""

    def body():
        gpu.tracked = gpu.tracked.graphsafe_get_state()
        fault(gpu)

    error = KeyboardInterrupt if fault is is_interrupted else CaptureError
    with pytest.raises(error, match="made to fail|invalidated"):
        gpu.capture(body)


@every_fault
def test_after_a_failed_capture_earlier_graphs_and_eager_work_draw_different_numbers(gpu, fault):
    graph = gpu.capture(gpu.draw)
    drawn = [*gpu.draw(), *graph.replay()]
    before = gpu.default.get_state(), gpu.tracked.get_state()
    fail(gpu, fault)
    assert (gpu.default.get_state(), gpu.tracked.get_state()) == before
    later = gpu.capture(gpu.draw)
    for _ in range(2):
        drawn += [*graph.replay(), *gpu.draw(), *later.replay()]
    assert len(drawn) == len(set(drawn)) == 16
    gpu.default.set_state((5, 0))  # a seed reaches earlier graphs
    gpu.tracked.set_state((6, 0))
    assert sorted(graph.replay()) == [(5, 0), (6, 0)] and gpu.draw() == [(5, 4), (6, 4)]


@every_fault
def test_where_nothing_more_can_be_captured_eager_work_draws_from_where_it_was(gpu, fault):
    gpu.draw()

    def last(gpu):
        gpu.broken = True
        fault(gpu)

    with pytest.raises((CaptureError, KeyboardInterrupt)):
        gpu.capture(partial(last, gpu))
    assert gpu.default.draw() == (1, 4) and gpu.tracked.draw() == (2, 4)


class Dropping(nn.Module):
    """Drops elements; its last pass of some fails where it is told so."""

    def __init__(self, last=None):
        super().__init__()
        self.out = nn.Linear(4, 4)
        self._passes = iter(range(last)) if last is not None else None

    def forward(self, x):
        dropped = functional.dropout(self.out(x), 0.5)
        if self._passes is not None and next(self._passes, None) is None:
            raise RuntimeError("made to fail")
        return dropped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [None, 0, 1, 2], ids=["whole", "warm-up fails", "capture fails", "next bucket fails"])
def test_a_recording_leaves_random_states_as_they_were(kind, last):
    program = RowsProgram(Dropping(last), (4,))
    region = new_region(program, KINDS[kind](), [Bucket(8), Bucket(16)])
    before = torch.get_rng_state()
    with nullcontext() if last is None else pytest.raises(CaptureError, match="made to fail"):
        region.capture()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gpus_executor_names_the_default_generator_and_those_it_was_given(monkeypatch):
    default, given = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, default))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in (None, torch.device("cuda"), torch.device("cuda", 1)):
        assert CudaGraphExecutor(device, generators=lambda: (given,)).generators() == (default, given)
