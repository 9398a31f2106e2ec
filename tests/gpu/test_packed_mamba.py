"""Packed documents on real graphs of a Mamba-Transformer hybrid: losses and gradients against eager.

Mamba's backward adds up in any order, as attention's does; under deterministic algorithms it does not, and graphs equal
eager to the bit. Upstream's scan takes decays as differences of one sum over a chunk of tokens, which goes on over
documents: inside a chunk another document changes the last bits of those behind it, in eager too.
"""

from importlib.util import find_spec

import pytest
import torch

import bridge_cg_plugin
from tests.models import language_model as lm
from tests.models import packed_parity as parity
from tests.models.tilings import few_tilings, mamba_kernels

from .packs import (
    BUCKETS,
    MAX_SEQS,
    Trained,
    assert_differs_as_eager_does,
    assert_eagers,
    graphs_on,
)

MISSING = [name for name in ("mamba_ssm", "causal_conv1d") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed: docs/packed.md says how to build them"
)
SHAPE = lm.Shape(pattern="M-M*M-M", hidden=1024, heads=8, ffn=3072)


@pytest.fixture(scope="module", autouse=True)
def tilings():
    with few_tilings():
        yield


@pytest.fixture(scope="module")
def hybrid(tower_module, tilings):
    bridge_cg_plugin.activate()
    with parity.deterministic():
        return Trained(lm.build_model(SHAPE))


@pytest.fixture
def deterministic_algorithms():
    with parity.deterministic():
        yield


@pytest.mark.first
def test_thirty_packs_replayed_from_one_capture(hybrid, deterministic_algorithms):
    with graphs_on(hybrid.model, lm.make_pack((500, 200))) as graphs:
        reads = graphs.workload.host.device_reads
        for seed, (name, lengths) in enumerate(parity.thirty_packs(MAX_SEQS, BUCKETS).items()):
            assert_eagers(hybrid, graphs, lm.make_pack(lengths, seed), name)
        assert not graphs.statistics().fallbacks, graphs.statistics().fallbacks
        assert graphs.workload.host.device_reads == reads, (
            f"{graphs.workload.host.device_reads - reads} offsets read from the device"
        )


@pytest.mark.alone
def test_graphs_differ_from_eager_as_eager_does_from_itself(tower_module):
    """A sum on the edge between two values of bf16 becomes, added up in another order, the neighbour of what it was.

    In gradients of few elements, as a mixer has them for its heads, one such element counts.
    """
    assert_differs_as_eager_does(Trained(lm.build_model(SHAPE)))


def chosen_tilings():
    """Return what Triton chose for every autotuned kernel that ran, by kernel and key."""
    return {
        (tuner.base_fn.__name__, key): str(config) for tuner in mamba_kernels() for key, config in tuner.cache.items()
    }


def test_graphs_run_the_tilings_that_eager_runs(tower_module):
    """Triton times and chooses once in a process, for keys without the number of tokens: graphs choose nothing anew."""
    trained = Trained(lm.build_model(SHAPE))
    trained.results(lm.make_pack((500, 200)))
    eager = chosen_tilings()
    assert {name for name, _ in eager} >= {"_chunk_scan_fwd_kernel", "_chunk_scan_chunk_state_bwd_dx_kernel"}
    with graphs_on(trained.model, lm.make_pack((500, 200))) as graphs:
        for lengths in ((358,), (300, 450, 200), (1, 900, 20, 800)):
            trained.results(lm.make_pack(lengths))
        assert graphs.statistics().replays == 3, graphs.statistics()
    assert chosen_tilings() == eager


@pytest.mark.parametrize("modules", [("mamba",), ("attn", "mlp")], ids=",".join)
def test_parts_of_layers(hybrid, deterministic_algorithms, modules):
    with graphs_on(hybrid.model, lm.make_pack((500, 200)), modules=modules) as graphs:
        for lengths in ((1024,), (300, 400), (1, 900, 20, 800)):
            assert_eagers(hybrid, graphs, lm.make_pack(lengths), f"{','.join(modules)}, {lengths}")


def test_documents_with_padding_between_them(hybrid, deterministic_algorithms):
    packed = [
        lm.make_pack(lengths, room=room)
        for lengths, room in (((500, 190), (512, 192)), ((1001,), (1008,)), ((3, 700, 64), (8, 704, 300)))
    ]
    with graphs_on(hybrid.model, packed[0]) as graphs:
        for pack in packed:
            assert_eagers(hybrid, graphs, pack, f"room {pack.lengths}")


def test_neither_a_replay_nor_a_packs_metadata_reads_the_device(hybrid, deterministic_algorithms):
    from megatron.core.packed_seq_params import PackedSeqParams

    pack = lm.make_pack((300, 450, 200))
    params = pack.arguments["packed_seq_params"]
    given = {name: getattr(params, name) for name in ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")}
    with graphs_on(hybrid.model, pack) as graphs:
        shape = (pack.tokens, 1, hybrid.model.config.hidden_size)
        hidden = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.ones_like(hidden)

        def run():
            made = PackedSeqParams(qkv_format="thd", **given, total_tokens=pack.tokens)
            out = hybrid.model.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=made)
            out.backward(gradient)
            return made

        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert graphs.statistics().replays == 2, graphs.statistics().fallbacks
    assert hidden.grad.isfinite().all()
    assert torch.equal(made.seq_idx, params.seq_idx) and made.seq_idx.dtype == torch.int32
