"""Side work: what runs when, what is kept how long, and that a region with it computes the same."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.recordings.side_stream import SideStream, current_side_stream, run_on_side_stream

from ..fake_streams import Stream, fake_streams
from ..regions import new_region
from ..tape import TapeExecutor
from .test_region import assert_equals_eager
from .towers import graphs_on, new_tower
from .toy import Toy, ToyProgram, toy_batch

LEAST_BYTES = 1024


@given(st.lists(st.sampled_from(["main", "run"]), max_size=80))
def test_nothing_is_dropped_that_may_still_be_read(steps):
    with fake_streams() as device:
        main, side, kept = device.current, SideStream(Stream()), {}
        with side.active():
            for number, step in enumerate(steps):
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
