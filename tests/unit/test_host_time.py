"""What a replayed microbatch costs the host, counted: calls of PyTorch and of Python, whatever a machine's speed."""

from contextlib import contextmanager
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from examples.photographs.small_tower import build_tower
from tests.models.tower import MainGrads, make_batch, step

from ..python_calls import python_calls
from .towers import graphs_on

LEAST_BYTES = 1024

ONE = [(1, 4, 4)]
EIGHT = [(1, h, w) for h, w in ((4, 4), (4, 6), (2, 8), (4, 4), (6, 4), (4, 4), (8, 4), (2, 2))]
# Images, and the tokens of their bucket where that is larger.
CASES = {"one image": (ONE, None), "four images, padded": (ONE * 4, 128), "eight mixed images": (EIGHT, None)}


class Idle:
    """A recording in whose place nothing runs."""

    def __init__(self, recording):
        self.outputs = recording.outputs
        recording.forward()
        left = recording.backward()
        self.forward, self.backward = (lambda: None), (lambda: left)


# Lets a mode be around replays, which else run eager for it.
UNSEEN = mock.patch("bridge_cg_plugin.graphs.region.operations_are_seen", lambda: False)


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
    with graphs_on(model, buckets=(capacity or batch.tokens,)) as graphs:
        (region,) = graphs._regions
        region.sources.current.sinks._reduction = grads
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
    with replaying(rows, awaited, capacity=capacity) as run, UNSEEN, Calls() as calls:
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
