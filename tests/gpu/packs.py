"""What GPU tests of packed documents share: graphs on a model, and graphs against eager on the same rows."""

from contextlib import contextmanager

import torch

from scripts.performance import language_model as lm
from scripts.performance import packed_parity as parity
from scripts.performance.tower import MainGrads, largest_relative, relative

MAX_SEQS = 24
BUCKETS = [1024, 2048]
# Eager runs say what eager differs from itself by, nothing in most packs; graphs may be this much farther from one.
EAGER_RUNS = 3
NOISE = 1.5


class Trained:
    """A model with gradient accumulation, and what one step of it gives."""

    def __init__(self, model):
        self.model, self.grads = model, MainGrads(model)
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def results(self, pack):
        """Return per-token losses and all gradients."""
        self.grads.zero()
        losses = lm.step(self.model, pack)
        return losses, self.grads.copy()


@contextmanager
def graphs_on(model, *warmup, modules=(), **options):
    """Capture; yields the decoder's graphs and drops them."""
    values = {"cuda_graph_max_packed_seqs": MAX_SEQS, "cuda_graph_packed_buckets": BUCKETS, **options}
    helper = lm.new_helper(model, *warmup, modules=modules, **values)
    assert helper.graphs_created(), helper.graphs.failure
    try:
        yield helper.graphs
    finally:
        helper.delete_cuda_graphs()
        torch.cuda.empty_cache()


def poison(graphs):
    """Fill every static floating-point buffer with NaN, as memory nobody wrote may be."""
    for region in graphs._regions:
        for slot in region._slots:
            for flat in slot.arena._flat.values():
                if flat.is_floating_point():
                    flat.fill_(torch.nan)


def rows_of(pack):
    """Return the tokens of the bucket that a pack takes."""
    return next(bucket for bucket in BUCKETS if bucket >= pack.tokens)


def assert_eagers(trained, graphs, pack, name):
    """Graphs give what eager gives on the bucket's rows; returns what they gave."""
    with parity.eager_at(graphs, rows_of(pack)):
        runs = [trained.results(pack) for _ in range(EAGER_RUNS)]
    poison(graphs)
    before = graphs.statistics().replays
    found = trained.results(pack)
    replays, regions = graphs.statistics().replays - before, len(graphs._regions)
    assert replays == regions, f"{name}: {replays} replays of {regions} regions, {graphs.statistics().fallbacks}"
    assert_inside(found, runs, trained.names, name)
    return found


def assert_inside(found, runs, names, name):
    """A result differs from eager runs by no more than these do from each other."""
    losses, gradients = parity.noise_of(runs)
    far = relative(found[0], runs[0][0]), largest_relative(found[1], runs[0][1])
    assert far[0] <= NOISE * losses and far[1] <= NOISE * gradients, (
        f"{name}: losses differ by {far[0]:.2e} (eager runs by {losses:.2e}), gradients by "
        f"{parity.worst_gradient(found, runs[0], names)} (eager runs by {gradients:.2e})"
    )
