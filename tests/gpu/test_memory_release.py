"""Memory of graphs that leaves the GPU between training steps and returns to the same addresses."""

import gc
import time

import pytest
import torch

from bridge_cg_plugin.graphs.errors import OutOfMemoryInCapture
from bridge_cg_plugin.graphs.memory import returning
from bridge_cg_plugin.graphs.memory.pools import Arena, making_in
from bridge_cg_plugin.graphs.memory.ranges import AddressRange, close_left, driver_of
from bridge_cg_plugin.graphs.recordings.capture import capture_graph

from .common import equal, vision_graphs

pytestmark = pytest.mark.alone  # others would take and free memory of the GPU

MB = 2**20
GRID, BUCKETS = [(1, 28, 28)], (1024, 2048)  # deterministic attention takes 66 GiB at 4096
OFFLOADED = {"offload": ("attention", "mlp"), "recompute": ()}
SWITCHES, MOST_SECONDS, MOST_LEFT = 12, 0.5, 200 * MB
# What the driver may round, and what a first replay or an eager pass may take for good.
SLACK = 16 * MB
LARGE = 16 * 2**30


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def canary(leaving: int) -> torch.Tensor:
    """Take all memory but some bytes, as somebody else would, full of sevens: no cached or closing memory is left."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    close_left()
    return torch.full((free_bytes() - leaving,), 7, dtype=torch.uint8, device="cuda")


def alive(bird: torch.Tensor) -> bool:
    """Whether nobody wrote to the canary; compared in pieces, which take little memory."""
    return all(bool((piece == 7).all()) for piece in bird.split(64 * MB))


class Doubling:
    """Doubles a static input twice, by way of its arena's memory and of the host's: kernels, copies and fills."""

    def __init__(self, rows: int = 64 * MB) -> None:
        driver, total = driver_of(torch.device("cuda", 0)), torch.cuda.get_device_properties(0).total_memory
        assert driver is not None, "virtual memory could not be set up; a line says why"
        self.ranges = [AddressRange(driver, total, keeps=keeps) for keeps in (False, True)]
        self.pool = Arena(lambda: self.ranges[0]).begin()
        with making_in(self.ranges[1])():
            self.x = torch.arange(rows, device="cuda", dtype=torch.float32)
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self.host = torch.empty(rows, pin_memory=True)
        with self.pool.taking(), capture_graph(self.graph, self.pool.handle, self.stream):
            between = self.x * 2.0
            self.host.copy_(between.clone(), non_blocking=True)
            y = torch.zeros_like(between)
            y += between.copy_(self.host, non_blocking=True)
            y += between
            del between
        self.y = self.pool.outlasting(y)
        del y
        self.pool.settle()

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.y.clone()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.ranges)

    def release(self) -> int:
        torch.cuda.synchronize()
        return sum(each.release() for each in self.ranges)

    def restore(self) -> None:
        for each in self.ranges:
            each.restore()


@pytest.mark.first
def test_16_gib_leave_and_return_in_a_tenth_of_a_second():
    made = Doubling(LARGE // 8)
    assert made.ranges[0].nbytes >= LARGE
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        left = made.ranges[0].release()
        between = time.perf_counter()
        made.ranges[0].restore()
        seconds.append((between - began, time.perf_counter() - between))
    print(f"{left / 2**30:.1f} GiB leave and return in {[tuple(round(s, 3) for s in each) for each in seconds]} s")
    assert max(map(max, seconds)) <= 0.1
    assert torch.equal(made.replay(), made.x * 4.0)


def test_a_capture_without_memory_fails_as_others_do():
    bird = canary(384 * MB)  # the static input fits, what is made of it does not
    with pytest.raises(OutOfMemoryInCapture):
        Doubling()
    assert alive(bird)
    del bird
    torch.cuda.empty_cache()
    close_left()
    made = Doubling()
    assert torch.equal(made.replay(), made.x * 4.0)


@pytest.fixture
def tower(monkeypatch, tower_module):
    """Return a tower whose steps repeat themselves to the bit, its gradients and a batch."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    model = tower_module.build_tower(layers=8)
    return model, tower_module.MainGrads(model), tower_module.make_batch(GRID, model)


@pytest.fixture
def helper(request, tower, tower_module):
    """Put graphs on the tower that are not captured yet, with what a test has as options."""
    model, _, batch = tower
    tower_module.step(model, batch)  # workspaces and libraries stay
    given = getattr(request, "param", {})
    made = vision_graphs(model, capture=False, around={"releasable": True}, buckets=BUCKETS, **given)
    yield made
    made.delete_cuda_graphs()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("helper", [{}, OFFLOADED], indirect=True, ids=["kept", "offloaded"])
def test_a_towers_graphs_leave_and_return(tower_module, tower, helper):
    model, grads, batch = tower

    def results():
        grads.zero()
        with helper.graphs.step():
            outputs = tower_module.step(model, batch)
        return [tensor.detach().cpu() for tensor in (*outputs, *grads.copy())]

    torch.cuda.empty_cache()
    without_graphs = free_bytes()
    helper.create_cudagraphs()
    executor = helper.graphs.executor
    assert executor._ranges, "virtual memory could not be set up; a line says why"
    expected = results()
    held, seconds, away, there = sum(each.nbytes for each in executor._ranges), [], [], []
    torch.cuda.empty_cache()
    for switch in range(SWITCHES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        assert helper.graphs.release_memory() == held
        left = time.perf_counter() - began
        away.append(free_bytes())
        began = time.perf_counter()
        executor.restore_memory()
        torch.cuda.synchronize()
        seconds.append(left + time.perf_counter() - began)
        if switch % 4 == 0:
            assert equal(results(), expected)
        torch.cuda.empty_cache()
        there.append(free_bytes())
    left_over = without_graphs - away[-1]
    print(f"{held / MB:.0f} MiB leave and return in {max(seconds):.3f} s at most, {min(seconds):.3f} s at least")
    print(f"{left_over / MB:.0f} MiB of graphs stay on the device")
    assert equal(results(), expected) and not helper.graphs.statistics().fallbacks
    assert max(seconds) < MOST_SECONDS and left_over <= MOST_LEFT
    assert abs(away[-1] - away[4]) <= SLACK and abs(there[-1] - there[4]) <= SLACK


def test_without_room_a_step_runs_eager_and_a_later_one_replays(tower_module, tower, helper, caplog):
    model, grads, batch = tower
    helper.create_cudagraphs()
    grads.zero()
    expected = [output.clone() for output in tower_module.step(model, batch)]
    held = helper.graphs.release_memory()
    bird = canary(held - 64 * MB)
    for _ in range(2):
        with helper.graphs.step():
            assert equal(tower_module.step(model, batch), expected)
    assert alive(bird)
    del bird
    torch.cuda.empty_cache()
    with helper.graphs.step():
        assert equal(tower_module.step(model, batch), expected)
    found = helper.graphs.statistics()
    assert found.replays == 2 and found.fallbacks == {"memory_released": 2}
    assert len([r for r in caplog.records if "memory cannot return" in r.getMessage()]) == 1


@pytest.mark.first
def test_weights_given_other_memory_return_to_the_addresses_of_graphs(tower_module, tower, helper, monkeypatch):
    monkeypatch.setattr(returning, "GROUP_BYTES", 32 * MB)
    model, _, batch = tower
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    before, seconds = [parameter.data for parameter in model.parameters()], []

    def results():
        with helper.graphs.step(), torch.no_grad():
            return [output.clone() for output in tower_module.forward(model, batch)]

    helper.create_cudagraphs()
    try:
        for switch in range(4):
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.data = ((switch + 1) * weight).cuda()
            found, captured = results(), helper.graphs.statistics().capture_seconds
            with helper.graphs.paused():
                assert equal(found, results())
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.data = weight
            free = free_bytes()
            assert (left := helper.graphs.release_memory()) > sum(weight.nbytes for weight in weights)
            torch.cuda.empty_cache()
            assert free_bytes() - free >= left - SLACK
            bird = canary(512 * MB)
            seconds.append(captured)
            assert alive(bird)
            del bird
            torch.cuda.empty_cache()  # weights would take a piece of its segment
    finally:
        for parameter, data in zip(model.parameters(), before, strict=True):
            parameter.data = data
    statistics = helper.graphs.statistics()
    print(f"weights returned {len(seconds)} times: captured in {seconds} s in all")
    assert statistics.replays == len(seconds) and not statistics.fallbacks
    assert len(set(seconds)) == 1
