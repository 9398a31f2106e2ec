"""Side work: what runs when, what is kept how long, and that a region with it computes the same."""

import gc
import itertools
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.recordings import side_stream as side_stream
from bridge_cg_plugin.graphs.recordings.side_stream import (
    SideStream,
    current_side_stream,
    output_on_side_stream,
    run_on_side_stream,
    start_on_side_stream,
)

from ..regions import new_region
from .test_region import assert_equals_eager
from .towers import assert_close, graphs_on, new_tower, results
from .toy import WIDTH, StaticExecutor, Toy, ToyProgram, assert_same, loss_of, toy_batch


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


def test_work_begins_behind_the_main_stream_and_not_the_other_way(machine):
    side = SideStream(machine.side)
    with side.active():
        first = machine.submit()
        made = run_on_side_stream(machine.submit)
        assert first in machine.side.done and made in machine.side.done
        assert made not in machine.main.done
    assert made in machine.main.done


def test_what_is_asked_for_is_waited_for(machine):
    with SideStream(machine.side).active():
        early, late = start_on_side_stream(machine.submit), start_on_side_stream(machine.submit)
        made = early.result()
        assert made in machine.main.done
        assert machine.main.done == {made}  # the second is not waited for
        assert late.result() in machine.main.done


@given(st.lists(st.sampled_from(["main", "run", "start", "result"]), max_size=80))
def test_nothing_is_dropped_that_may_still_be_read(steps):
    with pytest.MonkeyPatch.context() as patched:
        machine = Machine(patched)
        side, begun, kept = SideStream(machine.side), [], {}
        with side.active():
            for step in steps:
                if step == "main":
                    machine.submit()
                elif step == "result" and begun:
                    begun.pop().result()
                elif step in ("run", "start"):
                    read = torch.zeros(1)
                    made = side.start(machine.submit, read) if step == "start" else side.run(machine.submit, read)
                    if step == "start":
                        begun.append(made)
                    kept[machine.count] = read
                    del read
                held = {id(t) for reads in (*side._reads, *side._before[1]) for t in reads}
                for number, read in kept.items():
                    assert id(read) in held or number in machine.main.done
        assert machine.side.done <= machine.main.done


def test_an_error_is_not_hidden_and_the_stream_is_joined(machine):
    side = SideStream(machine.side)
    with pytest.raises(KeyError, match="first"), side.active():
        made = run_on_side_stream(machine.submit)
        raise KeyError("first")
    assert made in machine.main.done
    assert current_side_stream() is None and side.held == 0


def test_an_error_inside_work_leaves_the_next_work_on_the_side_stream(machine):
    side = SideStream(machine.side)
    with side.active():
        with pytest.raises(ZeroDivisionError):
            run_on_side_stream(lambda: 1 // 0)
        made = run_on_side_stream(machine.submit)
        assert made not in machine.main.done


def test_a_stream_that_nothing_ran_on_is_not_waited_for(machine):
    machine.side.done.add(99)  # in a capture it would be another stream's work
    with SideStream(machine.side).active():
        machine.submit()
    assert 99 not in machine.main.done


def test_a_tensor_that_is_used_twice_in_a_forward_is_told_apart():
    side, once, twice = SideStream(None), torch.zeros(1), torch.zeros(1)
    side.begin()
    for used in (once, twice, twice):
        side.note_use(used)
    assert side.used_once(once) and not side.used_once(twice)
    side.begin()
    assert not side.used_once(once)


class SideWorkProgram(ToyProgram):
    """The toy with a part of its forward and backward on the side."""

    fails = False

    def forward(self, buffers, bucket):
        assert current_side_stream() is not None
        outputs = super().forward(buffers, bucket)
        seen = start_on_side_stream(lambda: [o.detach().sum() for o in outputs])
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda gradient: run_on_side_stream(lambda: gradient.clone(), gradient))
        if self.fails:
            raise RuntimeError("made to fail")
        seen.result()
        return outputs


def side_work_region():
    """Return a region of `SideWorkProgram` that is not captured yet."""
    return new_region(
        SideWorkProgram(Toy()), StaticExecutor(), [Bucket(4), Bucket(8)], has_side_stream=lambda bucket: True
    )


def test_a_region_with_side_work_equals_eager():
    region, batch = side_work_region(), toy_batch()
    region.capture()
    assert_equals_eager(region, batch)
    assert current_side_stream() is None


class SideOutputModel(nn.Module):
    """Two layers and, between them, two side outputs; one shares its weight with the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.own = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

    def forward(self, x, offsets):
        hidden = torch.tanh(self.first(x))
        own = output_on_side_stream(lambda h: torch.tanh(self.own(h)), hidden)
        shared = output_on_side_stream(lambda h: self.last(h) ** 2, hidden)
        return self.last(hidden), own, shared


class SideOutputProgram(ToyProgram):
    """The toy's program around `SideOutputModel`."""

    changed = False

    def forward(self, buffers, bucket):
        last, own, shared = self.model(buffers["x"], buffers["offsets"])
        return last, own * 2 if self.changed else own, shared

    def output_rows(self, batch):
        return (batch.x.shape[0],) * 3


def side_output_region(frozen=()):
    model = SideOutputModel()
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    return new_region(
        SideOutputProgram(model), StaticExecutor(), [Bucket(4), Bucket(8)], has_side_stream=lambda bucket: True
    )


FROZEN = [(), ("own",), ("first",), ("last",), ("first", "last")]


@pytest.mark.parametrize(
    ("frozen", "requires_grad"),
    [*itertools.product(FROZEN, (True, False)), (("first", "last", "own"), True)],
)
def test_side_outputs_equal_eager(frozen, requires_grad):
    region = side_output_region(frozen)
    region.capture()
    for seed in range(2):
        batch = toy_batch(seed=seed, requires_grad=requires_grad)
        if requires_grad:
            assert_equals_eager(region, batch)
            continue
        wanted = [p for p in region.program.model.parameters() if p.requires_grad]
        expected = region.program.model(batch.x, batch.offsets)
        gradients = torch.autograd.grad(loss_of(expected), wanted)
        outputs = region.run(batch)
        assert_same(outputs, expected)
        assert_same(torch.autograd.grad(loss_of(outputs), wanted), gradients)


def test_no_side_output_waits_for_a_garbage_collection():
    """Its memory would be missing in the pool for whatever is captured next."""
    region, made = side_output_region(), []
    forward = region.program.forward

    def noted(buffers, bucket):
        outputs = forward(buffers, bucket)
        made.extend(map(weakref.ref, outputs))
        return outputs

    region.program.forward = noted
    gc.disable()
    try:
        region.capture()
        loss_of(region.run(toy_batch())).backward()
        assert made and not any(output() is not None for output in made)
    finally:
        gc.enable()


def test_side_outputs_are_differentiated_first_and_waited_for_at_their_input(machine):
    x, order = torch.ones(2, requires_grad=True), []
    side = SideStream(machine.side)
    side.begin()
    with side.active():
        hidden = x * 2
        hidden.register_hook(lambda gradient: order.append(("main", machine.count)))
        out = output_on_side_stream(lambda h: (machine.submit(), h * 3)[1], hidden)
    seen = []
    with side.active():
        out.register_hook(lambda gradient: seen.append(machine.submit()))
        left, found = side.differentiate([(out, torch.ones(2)), (hidden, torch.ones(2))], [x])
        assert len(left) == 1 and left[0][0] is hidden and found == [(None,)]
        assert seen and seen[0] not in machine.main.done
        (gradient,) = torch.autograd.grad(hidden, [x], torch.ones(2))
        assert seen[0] in machine.main.done
    assert torch.equal(gradient, torch.full((2,), 2 * (1 + 3.0)))


@pytest.mark.parametrize("trained_before", [True, False])
def test_the_input_of_a_side_output_is_kept_until_its_backward_is_waited_for(machine, trained_before):
    """Where nothing before it is trained, only the side output saved it: submitted, it is dropped."""
    x, weight = torch.ones(2, requires_grad=trained_before), torch.ones(2, requires_grad=True)
    side = SideStream(machine.side)
    side.begin()
    with side.active():
        out = output_on_side_stream(lambda h: h * weight, x)
    with side.active():
        side.differentiate([(out, torch.ones(2))], [weight])
        assert x.data_ptr() in {t.data_ptr() for reads in side._reads for t in reads}


def test_a_side_output_that_is_changed_on_its_way_out_is_an_error():
    region = side_output_region()
    region.program.changed = True
    with pytest.raises(CaptureError, match="was changed before it became an output of the region"):
        region.capture()


def test_there_are_no_side_outputs_where_activations_leave_the_device():
    side, x = SideStream(None), torch.ones(2, requires_grad=True)
    side.begin(side_outputs=False)
    with side.active():
        out = output_on_side_stream(lambda h: h * 3, x * 2)
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [6, 6]


def test_without_gradients_a_side_output_is_side_work(machine):
    side = SideStream(machine.side)
    side.begin()
    with side.active(), torch.no_grad():
        made = output_on_side_stream(lambda h: machine.submit(), torch.ones(1))
        assert made in machine.side.done and made not in machine.main.done


def test_a_capture_that_fails_leaves_no_side_work_behind():
    region = side_work_region()
    region.program.fails = True
    with pytest.raises(CaptureError, match="made to fail"):
        region.capture()
    assert current_side_stream() is None
    region.program.fails = False
    region.capture()
    assert region.captured


@pytest.mark.parametrize("streams", ["auto", 1, 2])
def test_a_tower_computes_the_same_on_any_number_of_streams(streams):
    rows = [[1, 4, 6], [2, 4, 4]]
    model = new_tower()
    expected = [*itertools.chain(*results(model, rows))]
    with graphs_on(model, streams=streams) as graphs:
        assert_close([*itertools.chain(*results(model, rows))], expected)
        assert not graphs.statistics().fallbacks


def test_activations_that_leave_the_device_with_a_side_stream():
    rows, model = [[1, 4, 6], [2, 4, 4]], new_tower()
    expected = [*itertools.chain(*results(model, rows))]
    with graphs_on(model, streams=2, offload=("attention", "mlp", "merger", "other"), offload_min_bytes=1) as graphs:
        assert_close([*itertools.chain(*results(model, rows))], expected)
        assert not graphs.statistics().fallbacks


def test_sums_of_two_streams_share_no_memory():
    reduction = pytest.importorskip("bridge_cg_plugin.vision.kernels.reduction")
    side, sums, kind = SideStream(None), reduction.DeferredSums([]), (2, 4, torch.float32, torch.device("cpu"))
    with side.active():
        found = [*sums.place(*kind), *sums.place(*kind), *run_on_side_stream(lambda: sums.place(*kind))]
    main, again, other = (found[i].untyped_storage().data_ptr() for i in (0, 2, 4))
    assert main == again != other


@pytest.mark.parametrize(
    ("choices", "tokens", "expected"),
    [
        ({}, 4096, True),
        ({}, 4100, False),
        ({"streams": 2}, 16384, True),
        ({"streams": 1}, 64, False),
        ({"offload": ("mlp",)}, 64, False),
        ({"recompute": ("gelu",)}, 64, False),
        ({"offload": ("mlp",), "streams": 2}, 64, True),
    ],
)
def test_buckets_that_have_side_work(choices, tokens, expected):
    with graphs_on(new_tower(), capture=False, **choices) as graphs:
        assert graphs.workload.planned.has_side_stream(Bucket(tokens)) is expected
