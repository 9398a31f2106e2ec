"""What a replayed microbatch costs the host, counted: calls of PyTorch and of Python, whatever a machine's speed."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import bridge_cg_plugin
from bridge_cg_plugin.switches import PROOF
from examples.photographs.small_tower import build_tower
from tests.models.tower import MainGrads, make_batch, step

from ..python_calls import python_calls
from .towers import graphs_on

LEAST_BYTES = 1024

ONE = [(1, 4, 4)]
EIGHT = [(1, h, w) for h, w in ((4, 4), (4, 6), (2, 8), (4, 4), (6, 4), (4, 4), (8, 4), (2, 2))]
# Images, and the tokens of their bucket where that is larger.
CASES = {"one image": (ONE, None), "four images, padded": (ONE * 4, 128), "eight mixed images": (EIGHT, None)}


PACKAGE = str(Path(bridge_cg_plugin.__file__).parent)


def launched() -> None:
    """Stand in for the launch of a forward."""


@pytest.fixture(autouse=True)
def no_proofs(monkeypatch):
    """What stands in for recordings gives nothing that eager would."""
    monkeypatch.setenv(PROOF, "0")


class Idle:
    """A recording in whose place nothing runs."""

    def __init__(self, recording):
        self.outputs = recording.outputs
        recording.forward()
        left = recording.backward()
        self.forward, self.backward = launched, (lambda: left)


class Calls(TorchDispatchMode):
    """Names the operations that reach PyTorch's kernels inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> list[str]:
        """Those that run something on the device."""
        return [name for name in self.names if not name.endswith(("::view", "::slice", "::detach", "::empty_like"))]


@contextmanager
def replaying(rows, awaited: bool = False, layers: int = 3, capacity: int | None = None):
    """Yield a function that runs one microbatch of a training step whose recorded work is left out."""
    model = build_tower(layers=layers, width=32, heads=2, out=24)
    grads = MainGrads(model)
    grads._awaited = awaited
    batch = make_batch(rows, model)
    with graphs_on(model, capture=False, buckets=(capacity or batch.tokens,)) as graphs:
        grads.reduce_gradients(model, graphs)
        graphs.capture()
        (region,) = graphs._regions
        for (_, _, mode), recorded in region.sources.current.recordings.items():
            if mode.gradients:
                recorded.recording = Idle(recorded.recording)
        with graphs.step():
            for _ in range(3):
                step(model, batch)
            before = graphs.statistics().replays
            yield lambda: step(model, batch)
            assert graphs.statistics().replays > before


@pytest.mark.parametrize(("rows", "capacity"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("awaited", [False, True])
def test_a_microbatch_launches_a_handful_of_kernels_beside_its_graphs(rows, capacity, awaited):
    with replaying(rows, awaited, capacity=capacity) as run, Calls() as calls:
        run()
    # In: pixels, grid, and the grid's unused rows. Out: all outputs at once. Back: all their gradients at once. Padding
    # adds one each way.
    assert len(calls.launches) <= (7 if capacity else 5), calls.launches
    assert capacity or len(calls.names) <= 18, calls.names


@pytest.mark.parametrize("awaited", [False, True])
def test_pythons_work_does_not_grow_with_images_or_parameters(awaited):
    counts = []
    for rows, layers in ((ONE, 3), (ONE, 6), (EIGHT, 3)):
        with replaying(rows, awaited, layers) as run:
            counts.append(python_calls(run))
    one, deeper, eight = counts
    assert deeper == one
    assert eight <= one + 4 * len(EIGHT)
    assert one <= 300


def way_to(end: str, run) -> tuple[int, int, int]:
    """Return how many of the plugin's functions, of how many files, are under way at the last call of one.

    The third number is that of all its functions that were called until the first such call.
    """
    way, called, came = [], set(), False

    def note(frame, event, argument):
        nonlocal way, came
        if event == "call" and frame.f_code.co_qualname == end:
            way, came, up = [], True, frame
            while (up := up.f_back) is not None:
                way += [up.f_code] if up.f_code.co_filename.startswith(PACKAGE) else []
        elif event == "call" and not came and frame.f_code.co_filename.startswith(PACKAGE):
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(way), len({code.co_filename for code in way}), len(called)


def test_a_microbatch_and_a_capture_pass_few_functions():
    with replaying(ONE) as run:
        functions, files, called = way_to("launched", run)
    assert functions <= 7 and files <= 4 and called <= 58, (functions, files, called)
    model = build_tower(layers=3, width=32, heads=2, out=24)
    with graphs_on(model, capture=False, buckets=(64,)) as graphs:
        functions, files, _ = way_to("RegionBody.forward", graphs.capture)
    assert functions <= 10 and files <= 5, (functions, files)
