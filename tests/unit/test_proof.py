"""Replays that are compared with eager: what is found, what happens then, and that nothing is left behind."""

import random
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import tensor_parallel
from torch.utils.checkpoint import checkpoint

from bridge_cg_plugin.graphs.changes.dict_watch import WATCHER
from bridge_cg_plugin.graphs.proofs import comparison, schedule
from bridge_cg_plugin.language.packed import batch
from bridge_cg_plugin.switches import PROOF

from . import packed_parts, packs
from .mixes import FITTING
from .proof_kinds import (
    KINDS,
    PARALLEL,
    ROWS,
    WRONG,
    Attention,
    Decoder,
    Tower,
    close,
    disproved,
    messages,
    proven,
    recordings,
    stale_attribute,
    step,
    then_wrong,
    training,
    wrong_gradient,
    wrong_kernel,
    wrong_metadata,
)
from .test_gradients import DataParallel
from .towers import assert_close, forward, graphs_on, loss_of, new_tower
from .toy import no_memory

pytestmark = pytest.mark.usefixtures("first_proofs")


@pytest.fixture
def always(monkeypatch):
    """Compare a replay of each step."""
    monkeypatch.setattr(schedule, "SHARE", 1e9)
    monkeypatch.setattr(schedule, "LEAST_STEPS", 1)


FAULTS = pytest.mark.parametrize("fault", [wrong_kernel, wrong_metadata, wrong_gradient, stale_attribute])


@KINDS
@FAULTS
@pytest.mark.parametrize("seed", range(2))
def test_a_fault_is_found_and_its_microbatches_take_what_eager_computes(kind, fault, seed, monkeypatch, caplog):
    with training(kind, seed % 2 == 0) as (model, graphs, eager):
        fault(kind, graphs, monkeypatch, random.Random(seed))
        expected = step(kind, eager, None, (0, 1))
        for _ in range(2 * len(graphs._regions) + 1):
            found = step(kind, model, graphs, (0, 1))
        assert_close(found, expected)
        wrong, said = disproved(graphs), messages(caplog)
        assert wrong and len(said) == len(wrong) and all("differs from eager" in each for each in said)
        assert graphs.statistics().fallbacks[WRONG]
        assert all(not region.buckets and not region.sources.current.recordings for region in wrong[:1])


def test_the_warning_names_the_parameter_whose_gradient_differs(monkeypatch, caplog):
    with training(Tower) as (model, graphs, eager):
        for _, recording in recordings(graphs):
            sinks = graphs._regions[0].sources.current.sinks
            monkeypatch.setattr(recording, "backward", partial(then_wrong, recording.backward, sinks, 1, 0))
        for _ in range(2):
            step(Tower, model, graphs)
        names = {parameter: name for name, parameter in model.named_parameters()}
        assert f"gradient of {names[sinks.parameters[1]]} " in messages(caplog)[0]


@pytest.mark.usefixtures("always")
def test_one_failure_alone_is_forgiven(monkeypatch):
    with training(Tower) as (model, graphs, eager):
        for count in (1, 2):
            with monkeypatch.context() as patch:
                wrong_kernel(Tower, graphs, patch, random.Random(0))
                assert_close(step(Tower, model, graphs), step(Tower, eager))
            step(Tower, model, graphs)
            assert len(proven(graphs)) == count and not disproved(graphs)


class Counting(torch.nn.Module):
    """Counts passes in a buffer and in an attribute, adds the count, and draws what it does not use."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, hidden):
        self.passes += 1
        torch.rand(3)
        output, bias = self.inner(hidden)
        return output + 0.1 * self.passes, bias


def project_by(kind, model):
    """Put a module around the projection of a layer's attention; returns the module."""
    attention = model.decoder.layers[1].self_attention
    attention.linear_proj = kind(attention.linear_proj)
    return attention.linear_proj


@KINDS
@PARALLEL
def test_a_proof_leaves_nothing_behind(kind, parallel, monkeypatch):
    found = []
    for switch in "10":
        monkeypatch.setenv(PROOF, switch)
        model = kind.new()
        counting = project_by(Counting, model)
        side = DataParallel(model) if parallel else None
        with kind.graphs(model) as graphs:
            torch.manual_seed(3)
            steps = [[t.clone() for t in step(kind, model, close(graphs), (0, 1))] for _ in range(4)]
            assert switch == "0" or len(proven(graphs)) == len(graphs._regions)
            assert not graphs.statistics().fallbacks
        held = {name: value for name, value in vars(counting).items() if not name.startswith("_")}
        found.append(([*sum(steps, []), counting.passes.clone(), torch.get_rng_state()], held))
        del side
    assert all(map(torch.equal, found[0][0], found[1][0])) and found[0][1] == found[1][1]


class Logging(Counting):
    """Also counts in a tensor that no module has, as routers log their losses."""

    logged = torch.zeros(())

    def forward(self, hidden):
        self.logged.add_(1)
        return super().forward(hidden)


@pytest.mark.parametrize("fault", [None, wrong_kernel, wrong_gradient])
def test_each_microbatch_is_logged_once(fault, monkeypatch):
    model = new_tower()
    logging = project_by(Logging, model)
    with Tower.graphs(model, strict=False) as graphs:
        object.__setattr__(graphs._regions[0]._piece, "counts", lambda: [Logging.logged])
        Logging.logged.zero_(), logging.passes.zero_()
        if fault is not None:
            fault(Tower, graphs, monkeypatch, random.Random(0))
        for number in range(1, 5):
            step(Tower, model, graphs, (0, 1))
            assert Logging.logged == logging.passes == 2 * number
        assert bool(disproved(graphs)) == (fault is not None)


class Dropping(torch.nn.Module):
    """Drops a tenth of what it gets."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(torch.nn.functional.dropout(hidden, 0.1, self.training))


def test_a_region_that_draws_random_numbers_is_not_compared(caplog):
    model = new_tower()
    project_by(Dropping, model)
    with Tower.graphs(model) as graphs:
        for _ in range(3):
            step(Tower, model, graphs)
        assert not proven(graphs) and not graphs.statistics().fallbacks and not messages(caplog)
        assert "not compared with eager, vision_encoder: it draws random numbers" in graphs.report()


class Borrowing(torch.nn.Module):
    """Computes with a parameter that an object holds which is no module."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.held = inner, SimpleNamespace(weight=inner.weight)

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.held.weight), None


def test_no_hook_of_a_parameter_takes_a_proof_for_training(monkeypatch):
    found = []
    for switch in "10":
        monkeypatch.setenv(PROOF, switch)
        model = new_tower()
        project_by(Borrowing, model)
        side = DataParallel(model)
        with Tower.graphs(model) as graphs:
            gradients = step(Tower, model, graphs)
            found.append((gradients, side.fired))
            assert switch == "0" or "gradients of vision_encoder: a parameter is held" in graphs.report()
    assert found[0][1] == found[1][1] and all(map(torch.equal, found[0][0], found[1][0]))


def test_eager_may_compute_again_what_it_computed(monkeypatch):
    model = packed_parts.new_model()
    side, calls = DataParallel(model), []

    def reentrant(function, distribute, *args):
        calls.append(1)
        return checkpoint(function, *args, use_reentrant=True)

    monkeypatch.setattr(tensor_parallel, "checkpoint", reentrant)
    with Decoder.graphs(model) as graphs:
        with WATCHER.silent():
            for layer in model.decoder.layers:
                layer.recompute_mlp = True
        step(Decoder, model, close(graphs))
        assert len(calls) == 6 and not graphs.statistics().fallbacks
        assert len(proven(graphs)) == 1 and proven(graphs)[0][1] is not None
    del side


MIXES = st.lists(st.tuples(st.sampled_from(FITTING), st.integers(0, 9)), min_size=1, max_size=3)


@pytest.mark.usefixtures("always")
@settings(max_examples=10)
@given(MIXES)
def test_no_mix_of_images_is_a_false_alarm(mixes):
    model = new_tower()
    side = DataParallel(model)
    with graphs_on(model) as graphs:
        for mix in mixes:
            with close(graphs).step():
                loss_of(forward(model, *mix)).backward()
        assert len(proven(graphs)) == len(mixes) and not graphs.statistics().fallbacks
    del side


@pytest.mark.parametrize("kind", [Attention, Decoder])
def test_padding_between_documents_is_not_compared(kind, monkeypatch):
    arguments, room = packs.pack((140, 290, 20), room=(150, 290, 40)), (150, 290, 40)
    params = arguments["packed_seq_params"]
    offsets = {name: getattr(params, name) for name in (*batch.OFFSETS, *batch.PADDED_OFFSETS)}
    real = batch.real_rows(batch.PackedBatch(torch.zeros(480, 1, 1), None, offsets, room, 480), 1, 0, 1)
    assert real.sum() == 450 and real[:140].all() and not real[140:150].any()
    attend, calls = packs.CausalSegments._attend, count(1)

    def leaving(self, query, key, value, params):
        """Leave another value between documents in each call."""
        out = attend(self, query, key, value, params)
        real_and_padding = torch.nn.functional.pad(real, (0, out.shape[0] - len(real)))
        return torch.where(real_and_padding[:, None], out, float(next(calls)))

    monkeypatch.setattr(packs.CausalSegments, "_attend", leaving)
    model = kind.new()
    with kind.graphs(model, warmup=arguments) as graphs:
        for _ in graphs._regions:
            with close(graphs).step():
                (model(**arguments) * real).sum().backward()
        assert len(proven(graphs)) == len(graphs._regions) and not graphs.statistics().fallbacks


@pytest.mark.usefixtures("always")
def test_gradients_are_compared_only_where_they_are_alone_in_main_grad():
    with training(Tower) as (model, graphs, _):
        step(Tower, model, graphs)
        with graphs.step():
            Tower.run(model).backward()
        assert [gradient is not None for _, gradient in proven(graphs)] == [True, False]


class Cancelling(torch.nn.Module):
    """Adds a bias that the mean takes away again: its gradient is what rounding leaves."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, hidden):
        output, bias = self.inner(hidden)
        shifted = output + self.bias
        return (shifted - shifted.mean(-1, keepdim=True)) * 1.0, bias


def test_a_gradient_may_be_as_far_from_eagers_as_rounding_moves_it(monkeypatch):
    monkeypatch.setattr(comparison, "ABSOLUTE", 0.0)
    model = new_tower()
    cancelling = project_by(Cancelling, model)
    found, widen = [], comparison.Comparison.beside_noise

    def noted(self):
        before = {each.what for each in self._found.values() if not each.passes}
        found.append((before, {each.what for each in widen(self) if not each.passes}))
        return list(self._found.values())

    monkeypatch.setattr(comparison.Comparison, "beside_noise", noted)
    with Tower.graphs(model) as graphs:
        for source, recording in recordings(graphs):
            place = next(i for i, p in enumerate(source.sinks.parameters) if p is cancelling.bias)
            wrong = partial(then_wrong, recording.backward, source.sinks, place, 2)
            monkeypatch.setattr(recording, "backward", wrong)
        step(Tower, model, graphs)
        assert found == [({"the gradient of decoder.layers.1.self_attention.linear_proj.bias"}, set())]
        assert proven(graphs) and not graphs.statistics().fallbacks


@pytest.mark.parametrize("full", [True, False])
def test_outputs_are_bit_equal_where_that_is_promised(full, monkeypatch):
    """Of a batch that fills its bucket; with padding, kernels may be others."""
    with training(Tower) as (model, graphs, _):
        object.__setattr__(graphs._regions[0]._piece, "exact", True)
        for _, recording in recordings(graphs):
            monkeypatch.setattr(recording, "forward", partial(then_nudged, recording.forward, recording.outputs[0]))
        rows = ROWS if full else [*ROWS, [1, 4, 4]]
        with graphs.step():
            loss_of(forward(model, rows)).backward()
        assert graphs.statistics().fallbacks[WRONG] == full


def then_nudged(run, tensor):
    run()
    tensor[0].mul_(1 + 1e-4)


def test_an_eager_pass_that_fails_ends_no_training(monkeypatch, capsys):
    with training(Tower) as (model, graphs, eager):
        monkeypatch.setattr(comparison.Pass, "again", no_memory)
        assert_close(step(Tower, model, graphs), step(Tower, eager))
        monkeypatch.setattr(comparison.Pass, "run", no_memory)
        source = graphs._regions[0].sources.current
        source.unproven.update(source.recordings)
        assert_close(step(Tower, model, graphs), step(Tower, eager))
        assert [gradient for _, gradient in proven(graphs)] == [None] and not graphs.statistics().fallbacks
        assert capsys.readouterr().out.count("OutOfMemoryError") == 1
