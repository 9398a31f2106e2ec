"""The brief pass that warms up a further bucket: one layer of each kind computes."""

import gc
import logging
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import OutOfMemoryInCapture
from bridge_cg_plugin.graphs.instance import InstanceMethod
from bridge_cg_plugin.graphs.recordings.warm_up import one_layer_of_each_kind

from ..regions import new_region
from ..rows_program import RowsProgram
from ..tape import Tape, TapeExecutor, TapeRecording
from . import hugging_face_towers as hf
from . import packs, towers
from .packs import EXPERTS


class Layer(nn.Module):
    """Adds to its hidden states, and notes that it did."""

    def __init__(self, number: int, ran: list[int], returns=lambda out: out) -> None:
        super().__init__()
        self.layer_number, self.linear = number, nn.Linear(4, 4)
        self._ran, self._returns = ran, returns

    def forward(self, hidden):
        self._ran.append(self.layer_number)
        return self._returns(hidden + self.linear(hidden))


class Model(nn.Module):
    """Calls its layers in turn."""

    def __init__(self, *layers) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden


def ran_in(make, wants_gradients=True):
    ran: list[int] = []
    model = make(ran)
    before = [dict(vars(layer)) for layer in model.layers]
    with one_layer_of_each_kind([model], {}):
        model(torch.ones(2, 4, requires_grad=wants_gradients)).sum().backward()
    assert [dict(vars(layer)) for layer in model.layers] == before
    return ran


def numbered(ran, **changes):
    return [Layer(n, ran, **changes) for n in range(4)]


def with_setting(name, value, layer=2):
    """Return what makes layers of which one, or all, have a setting."""

    def make(ran):
        layers = numbered(ran)
        for each in layers if layer is None else [layers[layer]]:
            setattr(each, name, value)
        return Model(*layers)

    return make


def with_a_frozen_layer(ran):
    model = Model(*numbered(ran))
    model.layers[1].linear.weight.requires_grad_(False)
    return model


def with_another_class(ran):
    model = Model(*numbered(ran))
    model.layers[3].linear = nn.Sequential(model.layers[3].linear)
    return model


def with_a_wrapped_layer(ran):
    model = Model(*numbered(ran))
    linear = model.layers[2].linear
    linear.forward = partial(linear.forward)
    return model


def with_stand_ins(make):
    """Return what makes layers in which something of the plugin's stands in for a method, as for parts of layers."""

    def stood_in(ran):
        model = make(ran)
        for layer in model.layers:
            layer.held = InstanceMethod(layer.linear, "forward", partial(layer.linear.forward))
        return model

    return stood_in


def with_functions(*rates):
    """Return what makes layers that each have a function of their own, as Transformer Engine's attention has."""

    def make(ran):
        layers = numbered(ran)
        for layer, rate in zip(layers, rates, strict=True):
            layer.linear.mask = masking(rate)
        return Model(*layers)

    return make


def masking(rate):
    return lambda hidden: hidden * rate


@pytest.mark.parametrize(
    ("make", "computed"),
    [
        (lambda ran: Model(*numbered(ran)), [0]),
        (lambda ran: Model(*numbered(ran, returns=lambda out: (out, None))), [0]),
        (lambda ran: Model(*numbered(ran, returns=lambda out: (out, out))), [0, 1, 2, 3]),
        (lambda ran: Model(*numbered(ran, returns=lambda out: (out.sum() + out, out.sum()))), [0, 1, 2, 3]),
        (with_setting("window_size", (128, 0)), [0, 2]),
        (with_setting("kind", "sliding"), [0, 2]),
        (with_setting("out_dtype", torch.bfloat16), [0, 2]),
        (with_setting("kind", "sliding", layer=None), [0]),
        (with_setting("name", "a layer's own"), [0]),
        (with_a_frozen_layer, [0, 1]),
        (with_another_class, [0, 3]),
        (with_a_wrapped_layer, [0, 2]),
        (with_stand_ins(lambda ran: Model(*numbered(ran))), [0]),
        (with_stand_ins(with_a_wrapped_layer), [0, 2]),
        (with_functions(1, 1, 1, 1), [0]),
        (with_functions(1, 1, 2, 1), [0, 2]),
    ],
)
def test_one_layer_of_each_kind_computes(make, computed):
    assert ran_in(make) == computed
    wants_gradients_later = ran_in(lambda ran: Model(*numbered(ran)), wants_gradients=False)
    assert wants_gradients_later == [0, 1], "a gradient is wanted from the second layer on"


def count_calls(monkeypatch, layer):
    """Count the calls of a layer's own forward, on whichever instance."""
    calls, own = [], type(layer).forward

    def forward(self, *args, **kwargs):
        calls.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(layer), "forward", forward)
    return calls


def vision_graphs(model):
    return towers.graphs_on(model, buckets=(64, 128), max_frames=1)


def pack_graphs(model):
    return packs.graphs_on(model, packs.pack((300,)), cuda_graph_modules=[])


# Builds the model, finds its layers, puts graphs of two buckets on it; the layers' kinds, and eager passes before.
CASES = {
    "Qwen3-VL": (towers.new_tower, lambda model: model.decoder.layers, vision_graphs, 1, 0),
    "Qwen2.5-VL": (hf.new_qwen25, lambda model: model.blocks, vision_graphs, 2, 0),
    "packs with experts": (lambda: packs.new_model(layers=3, **EXPERTS), lambda m: m.decoder.layers, pack_graphs, 1, 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_further_bucket_is_warmed_up_by_one_layer_of_each_kind(case, monkeypatch):
    build, layers_of, graphs_on, kinds, eager = case
    model = build()
    layers = layers_of(model)
    calls = count_calls(monkeypatch, layers[0])
    with packs.ON_CPU(), graphs_on(model):
        pass
    passes = eager + 3  # the first bucket's warm-up, and both recordings
    assert len(calls) == passes * len(layers) + 2 * kinds  # the first bucket's look at a pass is brief, too


class NothingComputed(TapeExecutor):
    """Leaves NaN in what a recording made, as a capture computes nothing.

    Attributes:
        recording: Whether a pass is recorded now.
        alive: How many bodies of brief passes were alive when a whole pass followed.
    """

    def __init__(self):
        super().__init__()
        self.recording, self._brief, self.alive = False, [], []

    def warm_up(self, body, make_output_gradients, briefly=False):
        if briefly:
            self._brief.append(weakref.ref(body))
        elif self._brief:
            self.alive.append(sum(each() is not None for each in self._brief))
        super().warm_up(body, make_output_gradients, briefly)

    def record_forward(self, body, pool):
        self.recording, computed = True, Tape()
        try:
            with computed:
                made = TapeRecording(body)
                made.record_backward()
                made.record_backward = lambda: None
                return made
        finally:
            self.recording = False
            for tensor in (tensor for *_, made, _ in computed._calls for tensor in made):
                if tensor.is_floating_point():
                    tensor.detach().fill_(torch.nan)


class Keeping(nn.Module):
    """Scales rows by numbers that it makes once for each count of rows, and keeps in an attribute."""

    def __init__(self, kept) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), kept

    def forward(self, hidden):
        return hidden + self.linear(hidden) * self.scales(len(hidden))

    def scales(self, rows):
        for scales in self.kept.values() if isinstance(self.kept, dict) else self.kept:
            if len(scales) == rows:
                return scales
        made = torch.arange(float(rows))[:, None]
        if isinstance(self.kept, dict):
            self.kept[rows] = made
        else:
            self.kept.append(made)
        return made


@pytest.mark.parametrize("fails", [False, True], ids=["attributes change", "the recording fails"])
@pytest.mark.parametrize("kind", [list, dict])
def test_a_recording_in_vain_is_freed_before_the_next_one_and_what_it_left_in_attributes_is_not_used(
    kind, fails, caplog
):
    """Though its error is kept."""
    caplog.set_level(logging.INFO, logger="bridge_cg_plugin")
    model = nn.Sequential(nn.ModuleList(Keeping(kind()) for _ in range(3)))
    layers, executor = model[0], NothingComputed()

    def forward(hidden):
        for layer in layers:
            counts = [len(each.kept) for each in layers]
            hidden = layer(hidden)
            if fails and executor.recording and counts != [len(each.kept) for each in layers]:
                raise RuntimeError("a first pass cannot be recorded")
        return hidden

    region = new_region(RowsProgram(model, (4,), forward=forward), executor, [Bucket(4), Bucket(8)])
    gc.collect()
    gc.disable()
    try:
        region.capture()
        assert executor.alive == [0] and "needs whole warm-up passes" in caplog.text
    finally:
        gc.enable()
    model.eval()
    for rows in (8, 4):
        hidden = expected = torch.randn(rows, 4)
        for layer in layers:
            expected = expected + layer.linear(expected) * torch.arange(float(rows))[:, None]
        with torch.no_grad():
            torch.testing.assert_close(forward(hidden), expected)
            torch.testing.assert_close(region.run(hidden), (expected,))


class LeavingMemory(TapeExecutor):
    """Has memory for a recording behind brief passes only where what PyTorch has left over was given back."""

    tidied, warm_ups = 0, 0

    def warm_up(self, body, make_output_gradients, briefly=False):
        self.briefly, self.warm_ups = briefly, self.warm_ups + 1
        super().warm_up(body, make_output_gradients, briefly)

    def tidy(self):
        self.tidied += 1

    def record_forward(self, body, pool):
        if self.briefly and self.tidied < 2:
            raise OutOfMemoryInCapture("no memory")
        return super().record_forward(body, pool)


def test_a_recording_without_memory_is_tried_again_where_what_pytorch_left_over_was_given_back():
    model, executor = nn.Sequential(nn.ModuleList(nn.Linear(4, 4) for _ in range(2))).eval(), LeavingMemory()
    forward = nn.Sequential(*model[0])
    region = new_region(RowsProgram(model, (4,), forward=forward), executor, [Bucket(4), Bucket(8)])
    region.capture()
    assert executor.warm_ups == 3 and executor.tidied == 2  # behind the whole one and the failure
    for rows in (8, 4):
        hidden = torch.randn(rows, 4)
        with torch.no_grad():
            torch.testing.assert_close(region.run(hidden), (forward(hidden),))
