"""Replays that are compared with eager: what is found, what happens then, and that nothing is left behind."""

import random
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import tensor_parallel
from torch import distributed
from torch.utils.checkpoint import checkpoint

from bridge_cg_plugin.graphs import proof
from bridge_cg_plugin.graphs.changes.dict_watch import WATCHER
from bridge_cg_plugin.graphs.errors import ProofError
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.language.packed import batch
from bridge_cg_plugin.switches import PROOF
from bridge_cg_plugin.upstream.environment import check_process

from ..main_grads import reduced
from ..ranks import run_ranks
from ..tape import TapeExecutor
from . import packed_parts, packs
from .dispatching import dispatching_on_cpu
from .mixes import FITTING
from .test_expert_ranks import on_graphs, rank_model
from .test_gradients import DataParallel
from .towers import assert_close, forward, graphs_on, loss_of, new_tower

ROWS = [[1, 6, 4], [3, 4, 2], [1, 2, 8]]
WRONG = Fallback.DIFFERS_FROM_EAGER


@pytest.fixture(autouse=True)
def proofs(monkeypatch):
    """Compare the first replays of recordings at once, whatever that takes."""
    monkeypatch.setattr(proof, "FIRST_SHARE", 1e9)


@pytest.fixture
def always(monkeypatch):
    """Compare a replay of each step."""
    monkeypatch.setattr(proof, "SHARE", 1e9)
    monkeypatch.setattr(proof, "LEAST_STEPS", 1)


class Tower:
    """An encoder: one region whose call is the module's forward."""

    new = staticmethod(new_tower)
    metadata = ("pixels", "grid")

    @staticmethod
    def graphs(model, strict=False):
        return graphs_on(model, executor=TapeExecutor(), strict=strict)

    @staticmethod
    def run(model, seed=0):
        return loss_of(forward(model, ROWS, seed))


class Attention:
    """Attention of each layer over packs: parts, each a region of its own."""

    new = staticmethod(packed_parts.new_model)
    metadata = ("angles", "cu_seqlens_q")

    @staticmethod
    def graphs(model, strict=False, warmup=packs.WARMUP):
        return packed_parts.on_parts(model, offload=None, executor=TapeExecutor(), warmup=[warmup], strict=strict)

    @staticmethod
    def run(model, seed=0):
        return loss_of([packed_parts.losses(model, packed_parts.SMALL, seed)])


class Decoder(Attention):
    """All layers over packs as one region."""

    @staticmethod
    @contextmanager
    def graphs(model, strict=False, warmup=packs.WARMUP):
        seen = warmup if isinstance(warmup, dict) else packs.pack(warmup)
        options = {"executor": TapeExecutor(), "cuda_graph_packed_strict": strict}
        with packs.ON_CPU(), packs.graphs_on(model, seen, **options) as graphs:
            yield graphs


class Rows(Attention):
    """All layers over padded rows as one region."""

    metadata = ("angles",)

    @staticmethod
    @contextmanager
    def graphs(model, strict=False):
        options = {"executor": TapeExecutor(), "cuda_graph_packed_strict": strict, "cuda_graph_max_packed_seqs": None}
        with packs.ON_CPU(), packs.graphs_on(model, packs.unpacked(96), **options) as graphs:
            yield graphs

    @staticmethod
    def run(model, seed=0):
        arguments = packs.unpacked(96)
        tokens = arguments["input_ids"].roll(seed)
        return loss_of([model(**{**arguments, "input_ids": tokens, "labels": tokens})])


KINDS = pytest.mark.parametrize("kind", [Tower, Attention, Decoder, Rows])
PARALLEL = pytest.mark.parametrize("parallel", [False, True])


def close(graphs, tolerance=1e-4):
    """Compare with the bounds of a CPU, where replays are nearer to eager than on a GPU."""
    for region in graphs._regions:
        object.__setattr__(region._piece, "tolerance", tolerance)
    return graphs


@contextmanager
def training(kind, parallel=True, **options):
    """Yield a model on graphs, the graphs, and the same model without."""
    models = kind.new(), kind.new()
    sides = [DataParallel(model) for model in models] if parallel else None
    with reduced() if parallel else nullcontext(), kind.graphs(models[0], **options) as graphs:
        graphs.models = models
        yield models[0], graphs, models[1]
    del sides


def step(kind, model, graphs=None, seeds=(0,)):
    """Train one step from zero; returns losses and gradients."""
    for parameter in model.parameters():
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    losses = []
    with nullcontext() if graphs is None else graphs.step():
        for seed in seeds:
            losses.append(kind.run(model, seed))
            losses[-1].backward()
    return [*(loss.detach() for loss in losses), *(getattr(p, "main_grad", p.grad) for p in model.parameters())]


def proven(graphs):
    return graphs.proofs.results


def unproven(graphs):
    return sum(len(region.unproven) for region in graphs._regions)


def disproved(graphs):
    return [region for region in graphs._regions if region.disproved]


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "bridge_cg_plugin"]


@KINDS
@PARALLEL
def test_recordings_are_proven_by_their_first_training_microbatches(kind, parallel):
    with training(kind, parallel) as (model, graphs, eager):
        regions, left = len(close(graphs)._regions), unproven(graphs)
        for steps in range(1, regions + 3):
            assert_close(step(kind, model, graphs, (0, 1)), step(kind, eager, None, (0, 1)))
            assert len(proven(graphs)) == min(steps, regions), "one a step"
        assert unproven(graphs) == left - regions
        assert all(0 <= outputs < 1e-5 and 0 <= gradients < 1e-5 for outputs, gradients in proven(graphs))
        assert f"proofs: {regions} replays compared with eager, {regions} with gradients" in (report := graphs.report())
        buckets = sorted({bucket for region in graphs._regions for bucket in region.unproven})
        named = f", of {', '.join(map(str, buckets))}" if buckets else ""
        assert f"recordings without a proof: {unproven(graphs)}{named};" in report
        assert not graphs.statistics().fallbacks


def recordings(graphs):
    """Yield the source and the recording of everything with a backward."""
    for source in (source for region in graphs._regions for source in region.sources):
        yield from ((source, made.recording) for (*_, mode), made in source.recordings.items() if mode.gradients)


def wrong_kernel(kind, graphs, patch, pick):
    """Some rows of an output twice as large, as where a kernel adds up a tile twice."""
    first, output = pick.randrange(12), pick.random()
    for _, recording in recordings(graphs):
        rows = recording.outputs[int(output * len(recording.outputs))][first : first + 4]
        patch.setattr(recording, "forward", partial(then_doubled, recording.forward, rows))


def then_doubled(run, tensor):
    run()
    tensor.mul_(2)


def wrong_metadata(kind, graphs, patch, pick):
    """A row of what describes the microbatch is another's, or an image lies on its side."""
    name, row = pick.choice(kind.metadata), pick.choice((1, 2))
    for region in graphs._regions:
        patch.setattr(region.program, "load", partial(then_wrong_row, region.program.load, name, row))


def then_wrong_row(load, name, row, buffers, batch):
    load(buffers, batch)
    if getattr(batch, "loaded", False):
        return
    if name == "grid":  # of none that is as wide as it is high
        buffers[name][row, 1:] = buffers[name][row, 1:].flip(0)
    else:
        buffers[name][row] = buffers[name][row + min(20, len(buffers[name]) // 2)]


def wrong_gradient(kind, graphs, patch, pick):
    """The gradient of a parameter is lost, or there twice."""
    place, factor = pick.random(), pick.choice((0, 2))
    for source, recording in recordings(graphs):
        wrong = int(place * len(source.sinks.parameters))
        patch.setattr(recording, "backward", partial(then_wrong, recording.backward, source.sinks, wrong, factor))


def then_wrong(run, sinks, place, factor):
    gradients = run()
    main_grad = sinks.added_to()[place]
    (gradients.parameters[place] if main_grad is None else main_grad).mul_(factor)
    return gradients


def stale_attribute(kind, graphs, patch, pick):
    """A layer's attribute is written where nobody notices."""
    place, eps = pick.random(), pick.choice((0.5, 5.0))
    with WATCHER.silent():
        for model in graphs.models:
            model.decoder.layers[int(place * len(model.decoder.layers))].input_layernorm.eps = eps


FAULTS = pytest.mark.parametrize("fault", [wrong_kernel, wrong_metadata, wrong_gradient, stale_attribute])


@KINDS
@FAULTS
@pytest.mark.parametrize("seed", range(3))
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


@KINDS
def test_switched_off_no_fault_is_found(kind, monkeypatch, caplog):
    monkeypatch.setenv(PROOF, "0")
    with training(kind) as (model, graphs, eager):
        wrong_kernel(kind, graphs, monkeypatch, random.Random(0))
        found, expected = step(kind, model, graphs), step(kind, eager)
        assert graphs.proofs is None and not messages(caplog)
        with pytest.raises(AssertionError, match="differs by"):
            assert_close(found, expected)


@pytest.mark.parametrize("kind", [Tower, Attention, Decoder])
def test_strict_stops_at_the_second_failure(kind, monkeypatch):
    with training(kind, strict=True) as (model, graphs, _):
        wrong_kernel(kind, graphs, monkeypatch, random.Random(0))
        step(kind, model, graphs)
        with pytest.raises(ProofError, match="output . differs from eager's by .*second time"):
            step(kind, model, graphs)


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


@KINDS
@PARALLEL
def test_a_proof_leaves_nothing_behind(kind, parallel, monkeypatch):
    found = []
    for switch in "10":
        monkeypatch.setenv(PROOF, switch)
        model = kind.new()
        layer = model.decoder.layers[1].self_attention
        layer.linear_proj = counting = Counting(layer.linear_proj)
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
    layer = model.decoder.layers[1].self_attention
    layer.linear_proj = Logging(layer.linear_proj)
    with Tower.graphs(model, strict=False) as graphs:
        object.__setattr__(graphs._regions[0]._piece, "counts", lambda: [Logging.logged])
        Logging.logged.zero_(), layer.linear_proj.passes.zero_()
        if fault is not None:
            fault(Tower, graphs, monkeypatch, random.Random(0))
        for number in range(1, 5):
            step(Tower, model, graphs, (0, 1))
            assert Logging.logged == layer.linear_proj.passes == 2 * number
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
    layer = model.decoder.layers[1].self_attention
    layer.linear_proj = Dropping(layer.linear_proj)
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
        layer = model.decoder.layers[1].self_attention
        layer.linear_proj = Borrowing(layer.linear_proj)
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


def test_a_variable_that_has_gone_is_named_once(monkeypatch, caplog):
    monkeypatch.setenv("BRIDGE_CG_WATCHDOG_MINUTES", "10")
    check_process()
    check_process()
    assert caplog.text.count("BRIDGE_CG_WATCHDOG_MINUTES has gone") == 1


class Clock:
    """Time that only what the test says takes."""

    def __init__(self, monkeypatch, seconds=0.0):
        self.now = seconds
        monkeypatch.setattr(proof.time, "perf_counter", lambda: self.now)


@pytest.mark.parametrize("kind", [Tower, Attention])
def test_each_region_is_compared_again_in_its_turn(kind, monkeypatch):
    monkeypatch.setattr(proof, "LEAST_STEPS", 4)
    monkeypatch.setattr(proof, "SHARE", 1e9)
    found = []
    monkeypatch.setattr(proof.Proofs, "proven", lambda self, proof: found.append((self._step, proof.part.name)))
    with training(kind) as (model, graphs, _):
        for source in (source for region in graphs._regions for source in region.sources):
            source.unproven.clear()
        for _ in range(4 * len(graphs._regions) + 3):
            step(kind, model, graphs)
        regions = [region.name for region in graphs._regions]
        assert [number for number, _ in found] == [4 * (turn + 1) for turn in range(len(regions))]
        assert {name for _, name in found} == set(regions)


@pytest.mark.parametrize("cost", [0.0, 0.3, 7.0])
def test_proofs_take_no_more_than_their_shares_of_the_time(cost, monkeypatch):
    """Steps take a second each, and comparing takes as much more as is given."""
    monkeypatch.setattr(proof, "FIRST_SHARE", 0.01)
    clock = Clock(monkeypatch)
    with training(Tower) as (model, graphs, _):
        proofs, (region,) = graphs.proofs, graphs._regions
        taken, at = [0.0], []
        for number in range(1, 14001):
            clock.now += 1
            proofs.begin_step(number, [region])
            if not proofs.may_be_due(region):
                continue
            at.append(number)
            compared = SimpleNamespace(begun=clock.now, seconds=0.0, counted=False)
            clock.now += cost
            proofs.agreed(compared, failed=False, left_out=False)
            taken.append(taken[-1] + cost)
            if number > 2000:  # all are proven: those that follow come again
                for source in region.sources:
                    source.unproven.clear()
        firsts = sum(number <= 2000 for number in at)
        assert cost * (firsts - 1) <= 0.01 * 2000 and cost * (len(at) - firsts - 1) <= 0.0025 * 12000
        assert len(at) >= firsts + 1 > 2
        proofs.results.append((0.0, None))
        assert f"one of every {at[-1] - at[-2]} steps is compared" in graphs.report()


@pytest.mark.usefixtures("always")
def test_gradients_are_compared_only_where_they_are_alone_in_main_grad():
    with training(Tower) as (model, graphs, _):
        step(Tower, model, graphs)
        with graphs.step():
            Tower.run(model).backward()
        assert [gradient is not None for _, gradient in proven(graphs)] == [True, False]


class Split(Tower):
    """An encoder whose layers two ranks share, run by the reference executor: tapes exchange nothing."""

    sizes = {"tensor_model_parallel_size": 2}
    around = nullcontext
    graphs = staticmethod(partial(graphs_on, strict=False))


class Experts:
    """Layers whose experts two ranks share as one region; each rank has packs of its own."""

    sizes = {"expert_model_parallel_size": 2}
    around = staticmethod(dispatching_on_cpu)
    new = staticmethod(rank_model)
    metadata = ("angles", "cu_seqlens_q")
    graphs = staticmethod(partial(on_graphs, cuda_graph_packed_strict=False))

    @staticmethod
    def run(model, seed=0):
        return loss_of([model(**packs.pack((25, 30 + 9 * distributed.get_rank(), 12), seed))])


def on_one_rank(kind, fault):
    """Train over a fault on rank 1 alone; returns how many regions are disproved, fallbacks and messages."""
    patch, said = pytest.MonkeyPatch(), []
    patch.setattr(proof, "warn", said.append)
    patch.setattr(proof, "FIRST_SHARE", 1e9)
    with kind.around(), packs.small_packs(), training(kind) as (model, graphs, eager):
        if distributed.get_rank() == 1:
            fault(kind, graphs, patch, random.Random(0))
        for _ in range(4):
            assert_close(step(kind, model, graphs), step(kind, eager))
        return len(disproved(graphs)), graphs.statistics().fallbacks[WRONG], said


@pytest.mark.parametrize("kind", [Split, Experts])
@pytest.mark.parametrize("fault", [wrong_kernel, wrong_metadata, wrong_gradient])
def test_a_fault_on_one_rank_makes_both_eager(tmp_path, kind, fault):
    first, second = run_ranks(2, on_one_rank, tmp_path, kind, fault, **kind.sizes)
    assert first[:2] == second[:2] and first[0] == 1
    spreads = (kind, fault) == (Split, wrong_metadata)  # by what the layers exchange
    assert ("another rank" in first[2][0]) != spreads and "another rank" not in second[2][0]


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
    monkeypatch.setattr(proof, "ABSOLUTE", 0.0)
    model = new_tower()
    layer = model.decoder.layers[1].self_attention
    layer.linear_proj = Cancelling(layer.linear_proj)
    found, widen = [], proof.Proof._beside_noise

    def noted(self):
        before = {each.what for each in self._found.values() if not each.passes}
        found.append((before, {each.what for each in widen(self) if not each.passes}))
        return list(self._found.values())

    monkeypatch.setattr(proof.Proof, "_beside_noise", noted)
    with Tower.graphs(model) as graphs:
        for source, recording in recordings(graphs):
            place = next(i for i, p in enumerate(source.sinks.parameters) if p is layer.linear_proj.bias)
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


def test_what_memory_is_too_short_for_is_not_compared(monkeypatch, capsys):
    with training(Tower) as (model, graphs, eager):
        for share, results in ((proof.ROOM, [(0.0, None)]), (proof.FORWARD_ROOM, [])):
            for source in graphs._regions[0].sources:
                source.unproven.update(source.recordings)
                monkeypatch.setattr(proof.Proofs, "has_room", lambda self, nbytes, share=share: nbytes < share * NBYTES)
                for made in source.recordings.values():
                    made.nbytes = NBYTES
            graphs.proofs.results.clear()
            for _ in range(2):
                step(Tower, model, graphs)
            assert [gradient for _, gradient in proven(graphs)] == [None] * len(results)
        assert_close(step(Tower, model, graphs), step(Tower, eager))
        assert capsys.readouterr().out.count("not compared with eager: free memory") == 2
        assert "not compared with eager, gradients of vision_encoder: free memory" in graphs.report()


NBYTES = 1000


def test_an_eager_pass_that_fails_ends_no_training(monkeypatch, capsys):
    with training(Tower) as (model, graphs, eager):
        monkeypatch.setattr(proof.Pass, "again", no_memory)
        assert_close(step(Tower, model, graphs), step(Tower, eager))
        monkeypatch.setattr(proof.Pass, "run", no_memory)
        source = graphs._regions[0].sources.current
        source.unproven.update(source.recordings)
        assert_close(step(Tower, model, graphs), step(Tower, eager))
        assert [gradient for _, gradient in proven(graphs)] == [None] and not graphs.statistics().fallbacks
        assert capsys.readouterr().out.count("OutOfMemoryError") == 1


def no_memory(*unused):
    raise torch.OutOfMemoryError("none left")


def test_passes_of_an_evaluation_are_compared_as_well():
    with training(Tower) as (model, graphs, _):
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                forward(model, ROWS)  # the second one has a recording
        assert not proven(graphs)
        graphs.before_evaluation()
        with torch.no_grad():
            forward(model, ROWS)
        assert proven(graphs) == [(proven(graphs)[0][0], None)]
