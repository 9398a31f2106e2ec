"""Side work and replays on streams: what runs when, what is kept how long, and that a region computes the same."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.memory.pools import Pool
from bridge_cg_plugin.graphs.recordings import executor as executors
from bridge_cg_plugin.graphs.recordings.executor import CudaGraphRecording, ReferenceExecutor
from bridge_cg_plugin.graphs.recordings.streams import (
    GROUP_SIZE,
    ReplayStream,
    SideStream,
    current_side_stream,
    run_on_side_stream,
)
from bridge_cg_plugin.offload.offloading import RegionOffloading
from bridge_cg_plugin.offload.plan import Policy
from bridge_cg_plugin.offload.registry import OTHER
from bridge_cg_plugin.offload.store import CudaTransfers
from tests.saving import SaverProgram

from ..fake_streams import CPU, Event, Stream, fake_streams
from ..regions import new_region
from ..tape import TapeExecutor
from .test_offload_store import Squares
from .towers import graphs_on, new_tower
from .toy import Toy, ToyProgram, assert_equals_eager, toy_batch

LEAST_BYTES = 1024


@given(st.lists(st.tuples(st.sampled_from(["main", "run"]), st.integers(1, 2 * GROUP_SIZE)), max_size=9))
def test_nothing_is_dropped_that_may_still_be_read(steps):
    with fake_streams() as device:
        main, side, kept = device.current, SideStream(Stream()), {}
        with side.active():
            for number, step in enumerate(step for step, times in steps for _ in range(times)):
                work = partial(lambda number: device.current.past.add(number), number)
                if step == "main":
                    work()
                else:
                    read = torch.zeros(1)
                    side.run(work, read)
                    kept[number] = read
                    del read
                held = {id(t) for reads in (*side._reads, *side._before[1]) for t in reads}
                assert all(id(read) in held or number in main.past for number, read in kept.items())
        assert side._stream.past <= main.past


def test_an_error_is_not_hidden_and_the_stream_is_joined():
    with fake_streams() as device:
        main, side = device.current, SideStream(Stream())
        with side.active():
            side._stream.past.add("others' work")  # nothing ran on it: in a capture it would be another stream's
        assert not main.past
        with pytest.raises(KeyError, match="first"), side.active():
            main.past.add("first")
            with pytest.raises(ZeroDivisionError):
                run_on_side_stream(lambda: 1 // 0)
            run_on_side_stream(lambda: device.current.past.add("made"))
            assert "first" in side._stream.past and "made" in side._stream.past - main.past
            raise KeyError("first")
        assert "made" in main.past
    assert current_side_stream() is None and not side._reads and not side._before[1]


def test_a_tensor_that_is_used_twice_in_a_forward_is_told_apart():
    side, once, twice = SideStream(None), torch.zeros(1), torch.zeros(1)
    for used in (once, twice, twice):
        side.note_use(used)
    assert side.used_once(once) and not side.used_once(twice)
    side.forget()
    assert not side.used_once(once)


class SideWorkProgram(ToyProgram):
    """The toy with a part of its forward and backward on the side."""

    fails = False

    def forward(self, buffers, bucket):
        assert current_side_stream() is not None
        outputs = super().forward(buffers, bucket)
        run_on_side_stream(lambda: [o.detach().sum() for o in outputs], *outputs)
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda gradient: run_on_side_stream(lambda: gradient.clone(), gradient))
        if self.fails:
            raise RuntimeError("made to fail")
        return outputs


def side_work_region():
    """Return a region of `SideWorkProgram` that is not captured yet."""
    return new_region(
        SideWorkProgram(Toy()), TapeExecutor(), [Bucket(4), Bucket(8)], has_side_stream=lambda bucket: True
    )


def test_a_region_with_side_work_equals_eager_and_leaves_none_behind():
    region = side_work_region()
    region.program.fails = True
    with pytest.raises(CaptureError, match="made to fail"):
        region.capture()
    assert current_side_stream() is None
    region.program.fails = False
    region.capture()
    assert_equals_eager(region, toy_batch())
    assert current_side_stream() is None


@pytest.mark.parametrize(
    ("choices", "tokens", "expected"),
    [
        ({}, 4096, True),
        ({}, 4100, False),
        ({"streams": 1}, 64, False),
        ({"offload": ("mlp",)}, 64, False),
        ({"recompute": ("gelu",)}, 64, False),
    ],
)
def test_buckets_that_have_side_work(choices, tokens, expected):
    with graphs_on(new_tower(), capture=False, **choices) as graphs:
        assert graphs.workload.has_side_stream(Bucket(tokens)) is expected


LAUNCHES = st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=12)


@given(launches=LAUNCHES, with_event=st.booleans())
def test_a_replay_comes_behind_all_copies_and_before_what_the_main_stream_is_given_next(launches, with_event):
    with fake_streams() as device:
        mains, earlier_copies = [Stream(), Stream()], set()
        event = Event() if with_event else None
        replays = ReplayStream(Stream(), event)

        def replay(number, copies):
            now = device.current.past
            assert earlier_copies <= now and f"work before {number}" in now
            now.add(f"results of {number}")
            if event is not None and copies:
                event.record(device.current)
            if copies:
                now.add(f"copies of {number}")

        for number, (main, copies) in enumerate(launches):
            device.current = mains[main]
            mains[main].past.add(f"work before {number}")
            replays.launch(partial(replay, number, copies), copies)
            assert device.current is mains[main]
            assert f"results of {number}" in mains[main].past
            earlier_copies.update([f"copies of {number}"] if copies else [])


def test_graphs_without_copies_wait_for_nothing_and_behind_copies_once():
    with fake_streams() as device:
        replays, ran = ReplayStream(Stream(), Event()), []
        for _ in range(3):
            replays.launch(lambda: ran.append(device.current), copies=False)
        assert ran == 3 * [device.current] and device.current.waits == replays.stream.waits == 0
        replays.launch(lambda: ran.append(device.current), copies=True)
        assert ran[-1] is replays.stream and (device.current.waits, replays.stream.waits) == (1, 1)
        for _ in range(3):
            replays.launch(lambda: ran.append(device.current), copies=False)
        assert ran[-3:] == 3 * [device.current] and (device.current.waits, replays.stream.waits) == (2, 1)
        replays = ReplayStream(device.current, Event())  # the current stream itself
        for copies in (True, False, True):
            replays.launch(lambda: None, copies)
        assert device.current.waits == 2


class NotedGraph:
    """Stands in for a CUDA graph, replayed on the stream that is current."""

    def replay(self) -> None:
        torch.cuda.current_stream().past.add(self)


class Capturing(ReferenceExecutor):
    """Makes the recordings of a GPU with graphs that hold nothing."""

    def __init__(self, replays) -> None:
        super().__init__()
        self._replays, self.stream, self.told = replays, Stream(), []

    def record_forward(self, body, pool):
        return CudaGraphRecording(body, Pool(), self.stream, (), self._replays, self.told.append)


POLICIES = {"both": ({OTHER}, {"square"}, True), "recompute": ((), {"square"}, False), "no policy": (None, None, False)}


@pytest.mark.parametrize("scopes, kinds, copies", POLICIES.values(), ids=POLICIES)
def test_only_what_is_copied_takes_events_into_a_graph_and_its_replays_to_their_stream(
    monkeypatch, scopes, kinds, copies
):
    with fake_streams() as device:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", NotedGraph)
        monkeypatch.setattr(executors, "capture_graph", lambda graph, pool, stream, *unused: torch.cuda.stream(stream))
        replays = ReplayStream(Stream(), Event())
        executor, offloading = Capturing(replays), None
        if scopes is not None:
            policy = Policy(frozenset(scopes), frozenset(kinds), least_bytes=1)
            offloading = RegionOffloading(policy, 1, CPU)
            offloading._transfers = CudaTransfers(CPU)
        region = new_region(SaverProgram(Squares()), executor, [Bucket(8)], offloading=offloading)
        region.capture()
        assert replays.event.records == (2 if copies else 0)
        assert (executor.stream.waits > 0) == copies
        if offloading is not None:
            assert (offloading._transfers._side.waits > 0) == copies
        (made,) = region.sources.current.recordings.values()
        main = device.current
        for launch in (made.recording.forward, made.recording.backward):
            launch()
        assert replays.stream.waits == main.waits == (2 if copies else 0)
        assert executor.told == [f"replay of the {work} of saver" for work in ("forward", "backward")]
