"""Models on graphs whose replays are compared with eager, and faults that are planted in them."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest

from bridge_cg_plugin.graphs.changes.dict_watch import WATCHER
from bridge_cg_plugin.graphs.fallback import Fallback

from ..main_grads import reduced
from ..tape import TapeExecutor
from . import packed_parts, packs
from .recomputing import recomputing_one_by_one
from .test_gradients import DataParallel
from .towers import forward, graphs_on, loss_of, new_tower

ROWS = [[1, 6, 4], [3, 4, 2], [1, 2, 8]]
WRONG = Fallback.DIFFERS_FROM_EAGER


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


class Again(Attention):
    """The same, of layers that run again in the backward."""

    @staticmethod
    def new():
        return recomputing_one_by_one(packed_parts.new_model())


class Decoder(Attention):
    """All layers over packs as one region."""

    @staticmethod
    @contextmanager
    def graphs(model, strict=False, warmup=packs.WARMUP, **options):
        seen = warmup if isinstance(warmup, dict) else packs.pack(warmup)
        options |= {"executor": TapeExecutor(), "cuda_graph_packed_strict": strict}
        with packs.ON_CPU(), packs.graphs_on(model, seen, **options) as graphs:
            yield graphs


class Rows(Attention):
    """All layers over padded rows as one region."""

    metadata = ("angles",)

    @staticmethod
    def graphs(model, strict=False):
        return Decoder.graphs(model, strict, packs.unpacked(96), cuda_graph_max_packed_seqs=None)

    @staticmethod
    def run(model, seed=0):
        arguments = packs.unpacked(96)
        tokens = arguments["input_ids"].roll(seed)
        return loss_of([model(**{**arguments, "input_ids": tokens, "labels": tokens})])


KINDS = pytest.mark.parametrize("kind", [Tower, Attention, Again, Decoder, Rows])
PARALLEL = pytest.mark.parametrize("parallel", [False, True])


def close(graphs):
    """Compare with the bounds of a CPU, where replays are nearer to eager than on a GPU."""
    for region in graphs._regions:
        object.__setattr__(region._piece, "tolerance", 1e-4)
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
