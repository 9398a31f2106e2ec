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
from tests.models.tilings import few_tilings

from .common import host_may_not_wait
from .packs import Trained, assert_eagers, assert_packs_with_padding, assert_parts, graphs_on, thirty_packs

MISSING = [name for name in ("mamba_ssm", "causal_conv1d") if find_spec(name) is None]
needs_mamba = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed: docs/packed.md says how to build them"
)
pytestmark = [needs_mamba, pytest.mark.usefixtures("deterministic_algorithms")]
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


@pytest.mark.first
def test_thirty_packs_replayed_from_one_capture(hybrid):
    with graphs_on(hybrid.model, lm.make_pack((500, 200))) as graphs:
        reads = graphs.workload.host.device_reads
        for name, pack in thirty_packs():
            assert_eagers(hybrid, graphs, pack, name)
        assert not graphs.statistics().fallbacks, graphs.statistics().fallbacks
        assert graphs.workload.host.device_reads == reads, (
            f"{graphs.workload.host.device_reads - reads} offsets read from the device"
        )


def test_parts_of_layers(hybrid):
    assert_parts(hybrid, ("mamba",))


def test_documents_with_padding_between_them(hybrid):
    assert_packs_with_padding(hybrid)


def test_neither_a_replay_nor_a_packs_metadata_reads_the_device(hybrid):
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
        with host_may_not_wait():
            made = run()
        assert graphs.statistics().replays == 2, graphs.statistics().fallbacks
    assert hidden.grad.isfinite().all()
    assert torch.equal(made.seq_idx, params.seq_idx) and made.seq_idx.dtype == torch.int32
