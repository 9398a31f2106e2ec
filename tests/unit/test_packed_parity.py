"""What GPU tests and the benchmark compare graphs with, on a CPU."""

import math

import pytest
import torch

from scripts.performance.language_model import Pack
from scripts.performance.packed_parity import (
    Fp32Reference,
    distances,
    eager_at,
    noise_of,
    padded_params,
    same,
    worst_gradient,
)
from scripts.performance.tower import largest_relative

from .packs import graphs_on, losses_and_gradients, new_model, pack
from .towers import assert_close


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.mark.parametrize("modules", [[], ["attn"], ["mlp"]], ids=["whole", "attn", "mlp"])
def test_eager_on_a_buckets_rows_gives_eagers_results(model, modules):
    arguments = pack((30, 180, 77))
    rows = []
    hook = model.decoder.layers[0].mlp.register_forward_hook(lambda module, given, out: rows.append(len(given[0])))
    with graphs_on(model, arguments, cuda_graph_modules=modules) as graphs:
        with graphs.paused():
            expected = losses_and_gradients(model, arguments)
        del rows[:]
        with eager_at(graphs, 320):
            found = losses_and_gradients(model, arguments)
        assert rows == [287 if modules == ["attn"] else 320]
        assert graphs.statistics().replays == 0 and graphs.host.device_reads <= 1
        losses_and_gradients(model, arguments)
        assert graphs.statistics().replays == len(graphs._regions)
    hook.remove()
    assert_close([found[0], *found[1]], [expected[0], *expected[1]])


def test_padding_is_documents_that_rotary_tables_reach():
    params = pack((30, 100), room=(32, 104))["packed_seq_params"]
    padded = padded_params(params, 136, 400)
    assert padded.cu_seqlens_q_padded.tolist() == [0, 32, 136, 240, 344, 400]
    assert padded.cu_seqlens_kv.tolist() == [0, 30, 130, 234, 338, 394]
    assert padded.max_seqlen_q == 104 and padded.cu_seqlens_q.dtype == torch.int32
    assert padded_params(params, 136, 136).cu_seqlens_q_padded.tolist() == [0, 32, 136]


def test_documents_alone_are_the_pack(model):
    arguments = pack((30, 100))
    weights = torch.linspace(0.5, 1.5, 130).view(1, 130)
    losses, gradients = Fp32Reference(new_model, model).results(Pack(arguments, (30, 100), weights))
    expected = losses_and_gradients(model, arguments)
    assert_close([losses, *gradients], [expected[0], *expected[1]])


def test_distances_from_an_exact_result():
    exact = torch.ones(4), [torch.ones(2), torch.ones(2)]
    found = torch.full((4,), 1.1), [torch.full((2,), 1.1), torch.full((2,), 1.2)]
    wanted = {"losses": 0.1, "mean of gradients": 0.15, "worst gradient": 0.2}
    assert distances(found, exact) == pytest.approx(wanted)


def test_noise_is_the_largest_difference_of_any_two_runs():
    runs = [(torch.full((4,), 1 + loss), [torch.ones(2), torch.full((2,), 1 + g)]) for loss, g in ((0, 0), (0.1, 0.3))]
    losses, gradients = noise_of([runs[0], runs[0], runs[1]])
    assert losses == pytest.approx(0.1 / 1.1) and gradients == pytest.approx(0.3 / 1.3)
    assert noise_of([runs[0], runs[0]]) == (0, 0)
    assert same(runs[0], runs[0]) and not same(runs[0], runs[1])
    assert worst_gradient(runs[1], runs[0], ["a", "b"]) == "3.00e-01 in b"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_the_largest_difference(place):
    """`max` forgets a NaN that is not the first number."""
    exact = torch.ones(1), [torch.ones(2), torch.ones(2), torch.ones(2)]
    found = torch.ones(1), [torch.full((2,), torch.nan if i == place else 2.0) for i in range(3)]
    assert math.isnan(largest_relative(found[1], exact[1]))
    assert worst_gradient(found, exact, ["a", "b", "c"]) == f"nan in {'abc'[place]}"
