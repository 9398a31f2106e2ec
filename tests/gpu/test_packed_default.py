"""Packed documents on graphs with default algorithms: attention's backward adds up in an order that timing decides.

So eager differs from itself, in few packs and by little; what it differs by is measured over all packs together.
"""

from scripts.performance import language_model as lm
from scripts.performance import packed_parity as parity

from .packs import BUCKETS, MAX_SEQS, Trained, graphs_on, rows_of
from .test_packed import SIZES

NOISE = 1.5
EAGER_RUNS, GRAPH_RUNS = 4, 2


def test_graphs_differ_from_eager_as_eager_does_from_itself(tower_module):
    trained = Trained(lm.build_model(lm.Shape(**SIZES)))
    noises, found = [], {}
    with graphs_on(trained.model, lm.make_pack((500, 200))) as graphs:
        for seed, (name, lengths) in enumerate(parity.thirty_packs(MAX_SEQS, BUCKETS).items()):
            pack = lm.make_pack(lengths, seed)
            with parity.eager_at(graphs, rows_of(pack)):
                runs = [trained.results(pack) for _ in range(EAGER_RUNS)]
            noises.append(parity.noise_of(runs))
            found[name] = [parity.nearest(trained.results(pack), runs) for _ in range(GRAPH_RUNS)]
        statistics = graphs.statistics()
        assert statistics.replays == parity.PACKS * GRAPH_RUNS and not statistics.fallbacks, statistics
    losses, gradients = map(max, zip(*noises, strict=True))
    print(f"eager differs from itself by up to {losses:.2e} in losses, {gradients:.2e} in a gradient")
    for name, results in found.items():
        for far in results:
            assert far[0] <= NOISE * losses and far[1] <= NOISE * gradients, (
                f"{name}: losses {far[0]:.2e} (eager {losses:.2e}), a gradient {far[1]:.2e} (eager {gradients:.2e})"
            )
