"""What GPU tests of packed documents share: graphs on a model, and graphs against eager on the same rows."""

from contextlib import contextmanager

import torch

from tests.models import language_model as lm
from tests.models import packed_parity as parity
from tests.models.tower import MainGrads, relative

from .common import poison

MAX_SEQS = 24
BUCKETS = [1024, 2048]
# Two runs show whether algorithms that should be deterministic are.
EAGER_RUNS = 2
# With other algorithms eager runs say what eager differs from itself by. An odd count of replays has a middle one.
NOISY_RUNS, GRAPH_RUNS = 8, 5
# What the host needs to submit a step, at 2 GHz.
AHEAD_CYCLES = 100_000_000


def let_the_host_run_ahead():
    """Hold the device back until the host has submitted a step, whose kernels then follow one another as in a graph.

    Where one kernel ends as the next begins, sums that are added up in any order have another order than after a gap.
    """
    torch.cuda._sleep(AHEAD_CYCLES)


class Trained:
    """A model with gradient accumulation, and what one step of it gives."""

    def __init__(self, model):
        self.model = model
        self.grads = MainGrads(self.model)
        self.names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

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
    assert helper.graphs.captured, helper.graphs.failure
    try:
        yield helper.graphs
    finally:
        helper.delete_cuda_graphs()
        torch.cuda.empty_cache()


def double_rows(recording):
    """Let a recording's forward end with some rows twice as large, as a wrong kernel would."""
    forward, rows = recording.forward, recording.outputs[0][:8]
    recording.forward = lambda: (forward(), rows.mul_(2))


def rows_of(pack, buckets=BUCKETS):
    """Return the tokens of the bucket that a pack takes."""
    return next(bucket for bucket in buckets if bucket >= pack.tokens)


def assert_eagers(trained, graphs, pack, name, buckets=BUCKETS, times=1):
    """Graphs give what eager gives on the bucket's rows, to the bit, each replayed so often; returns what they gave."""
    with parity.eager_at(graphs, rows_of(pack, buckets)):
        runs = [trained.results(pack) for _ in range(EAGER_RUNS)]
    poison(graphs)
    before = graphs.statistics().replays
    found = trained.results(pack)
    replays, regions = graphs.statistics().replays - before, times * len(graphs._regions)
    assert replays == regions, f"{name}: {replays} replays of {regions} regions, {graphs.statistics().fallbacks}"
    assert_same(found, runs, trained.names, name)
    return found


def thirty_packs():
    """Yield thirty packs and their names."""
    for seed, (name, lengths) in enumerate(parity.thirty_packs(MAX_SEQS, BUCKETS).items()):
        yield name, lm.make_pack(lengths, seed)


def assert_packs_with_padding(trained):
    """Documents with padding between them replay as eager runs them."""
    packed = [
        lm.make_pack(lengths, room=room)
        for lengths, room in (((500, 190), (512, 192)), ((1001,), (1008,)), ((3, 700, 64), (8, 704, 300)))
    ]
    with graphs_on(trained.model, packed[0]) as graphs:
        for pack in packed:
            assert_eagers(trained, graphs, pack, f"room {pack.lengths}")


def assert_parts(trained, modules):
    """Parts of layers replay as eager runs them; returns how many regions there are."""
    with graphs_on(trained.model, lm.make_pack((500, 200)), modules=modules) as graphs:
        for lengths in ((1024,), (300, 400), (1, 900, 20, 800)):
            assert_eagers(trained, graphs, lm.make_pack(lengths), f"{','.join(modules)}, {lengths}")
        assert not graphs.statistics().fallbacks, graphs.statistics().fallbacks
        return len(graphs._regions)


def assert_within_noise(trained, graphs, packs, buckets=BUCKETS):
    """Replays of named packs differ from eager on the buckets' rows as eager does from itself, over all packs.

    In every other eager run kernels are as close as on a graph. Replays come between eager runs: what disturbs the GPU
    for a while disturbs both.
    """
    spreads = {}
    before = graphs.statistics().replays
    for name, pack in packs:
        runs, replays = [], []
        for number in range(NOISY_RUNS):
            if number % 2:
                let_the_host_run_ahead()
            with parity.eager_at(graphs, rows_of(pack, buckets)):
                runs.append(trained.results(pack))
            replays += [trained.results(pack)] if number < GRAPH_RUNS else []
        print(f"{name}, farthest from the first eager run:")
        for kind, found in (("eager", runs[1:]), ("graphs", replays)):
            print(f"  {kind}: {parity.worst_gradient(parity.farthest(found, runs[0]), runs[0], trained.names)}")
        spreads[name] = parity.spread_of(runs, replays)
    statistics = graphs.statistics()
    assert statistics.replays - before == len(spreads) * GRAPH_RUNS and not statistics.fallbacks, statistics
    for kind in ("eager", "graphs"):
        values = torch.cat([getattr(spread, kind).amax(1) for spread in spreads.values()])
        most = ", ".join(f"{share:.0%} {values.quantile(share).item():.1e}" for share in (0.5, 0.9, 0.99, 1.0))
        print(f"{kind}: the worst gradient of a run from the nearest eager run, quantiles of {len(values)}: {most}")
    missed = parity.beyond_noise(spreads, trained.names)
    assert not missed, "\n".join(missed)


def assert_same(found, runs, names, name):
    """A result equals every eager run to the bit."""
    for run in runs[1:]:
        assert parity.same(run, runs[0]), f"{name}: eager differs from itself, {difference(run, runs[0], names)}"
    assert parity.same(found, runs[0]), f"{name}: {difference(found, runs[0], names)}"


def difference(one, other, names):
    """Return how far two results are apart, in words."""
    losses = relative(one[0], other[0])
    return f"losses differ by {losses:.2e}, gradients by {parity.worst_gradient(one, other, names)}"
