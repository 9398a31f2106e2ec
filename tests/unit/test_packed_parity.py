"""What GPU tests and the benchmark compare graphs with, on a CPU."""

import pytest
import torch

from scripts.performance.language_model import Pack
from scripts.performance.packed_parity import Fp32Reference, eager_at, farther, padded_params

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
    eager = torch.full((4,), 1.1), [torch.full((2,), 1.1), torch.full((2,), 1.2)]
    graphs = torch.full((4,), 1.1), [torch.full((2,), 1.2), torch.full((2,), 1.2)]
    found = farther(graphs, eager, exact)
    assert found == pytest.approx({"losses": 1.0, "mean of gradients": 4 / 3, "worst gradient": 1.0})
