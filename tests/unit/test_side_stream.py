"""Side work: what runs when, what is kept how long, and that a region with it computes the same."""

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.recordings import side_stream as side_stream
from bridge_cg_plugin.graphs.recordings.side_stream import SideStream, current_side_stream, run_on_side_stream

from ..regions import new_region
from .test_region import assert_equals_eager
from .towers import assert_close, graphs_on, new_tower, results
from .toy import StaticExecutor, Toy, ToyProgram, toy_batch

LEAST_BYTES = 1024


@dataclass
class Stream:
    """A stream that knows what each of its pieces of work comes behind: the numbers of all earlier ones."""

    device: str = "cuda"
    done: set[int] = field(default_factory=set)

    def wait_stream(self, other: "Stream") -> None:
        self.done |= other.done

    def record_event(self) -> frozenset[int]:
        return frozenset(self.done)

    def wait_event(self, event: frozenset[int]) -> None:
        self.done |= event


class Machine:
    """A main and a side stream, and work on them by number."""

    def __init__(self, monkeypatch) -> None:
        self.main, self.side, self.count = Stream(), Stream(), 0
        self.current = self.main
        monkeypatch.setattr(side_stream.torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(side_stream.torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def submit(self) -> int:
        self.count += 1
        self.current.done.add(self.count)
        return self.count


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@given(st.lists(st.sampled_from(["main", "run"]), max_size=80))
def test_nothing_is_dropped_that_may_still_be_read(steps):
    with pytest.MonkeyPatch.context() as patched:
        machine = Machine(patched)
        side, kept = SideStream(machine.side), {}
        with side.active():
            for step in steps:
                if step == "main":
                    machine.submit()
                else:
                    read = torch.zeros(1)
                    side.run(machine.submit, read)
                    kept[machine.count] = read
                    del read
                held = {id(t) for reads in (*side._reads, *side._before[1]) for t in reads}
                for number, read in kept.items():
                    assert id(read) in held or number in machine.main.done
        assert machine.side.done <= machine.main.done


def test_an_error_is_not_hidden_and_the_stream_is_joined(machine):
    side = SideStream(machine.side)
    with side.active():
        machine.side.done.add(99)  # nothing ran on it: in a capture it would be another stream's work
    assert 99 not in machine.main.done
    with pytest.raises(KeyError, match="first"), side.active():
        first = machine.submit()
        with pytest.raises(ZeroDivisionError):
            run_on_side_stream(lambda: 1 // 0)
        made = run_on_side_stream(machine.submit)
        assert first in machine.side.done and made in machine.side.done - machine.main.done
        raise KeyError("first")
    assert made in machine.main.done
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
        SideWorkProgram(Toy()), StaticExecutor(), [Bucket(4), Bucket(8)], has_side_stream=lambda bucket: True
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


OFFLOADED = {"offload": ("attention", "mlp", "merger", "other")}


@pytest.mark.parametrize("choices", [{"streams": 1}, {"streams": 2, **OFFLOADED}])
def test_a_tower_computes_the_same_on_any_number_of_streams(choices):
    rows = [[1, 4, 6], [2, 4, 4]]
    model = new_tower()
    expected = [*itertools.chain(*results(model, rows))]
    with graphs_on(model, **choices) as graphs:
        assert_close([*itertools.chain(*results(model, rows))], expected)
        assert not graphs.statistics().fallbacks


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
