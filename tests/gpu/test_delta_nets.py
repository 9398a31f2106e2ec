"""Gated delta nets, Qwen3.5's, on real graphs of packed documents and padded rows: losses and gradients against eager.

Packs of one capture have one number of chunks, so a convolution's weight gradient is a sum of more terms than eager's,
some of them zero: in another order. All else is eager's to the bit.
"""

import warnings
from pathlib import Path

import pytest
import torch

import bridge_cg_plugin
from bridge_cg_plugin.upstream.kernels.transformer_engine import CUDNN_WITH_RIGHT_GRADIENTS, engine_cudnn
from tests.models import language_model as lm
from tests.models import packed_parity as parity
from tests.models.tilings import delta_net_kernels, few_tilings
from tests.models.tower import relative

from .common import host_may_not_wait, poison, spoil
from .packs import EAGER_RUNS, Trained, assert_same, graphs_on, rows_of, thirty_packs

pytestmark = pytest.mark.usefixtures("deterministic_algorithms")
SHAPE = lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072, attending=4)
CONVOLUTION = "conv1d.weight"
# A sum in another order is at most the neighbouring value of bf16 in a few elements.
ROUNDED = 2**-8
ROWS, LENGTH = 1, 2048  # a GPT model has the same angles for all rows, which graphs do not take


@pytest.fixture(scope="module", autouse=True)
def tilings():
    with few_tilings(delta_net_kernels):
        yield


@pytest.fixture(scope="module")
def gpt(tower_module, tilings):
    bridge_cg_plugin.activate()
    with parity.deterministic():
        return Trained(lm.build_model(SHAPE))


def rows(seed=1):
    """Return a microbatch of padded rows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(lm.VOCABULARY, (ROWS, LENGTH), device="cuda", generator=generator)
    places = torch.arange(LENGTH, device="cuda").expand(ROWS, -1)
    arguments = {"input_ids": tokens, "position_ids": places, "attention_mask": None, "labels": tokens.roll(-1, 1)}
    weights = torch.rand(ROWS, LENGTH, device="cuda", generator=generator) / tokens.numel()
    return lm.Pack(arguments, (LENGTH,) * ROWS, weights)


@pytest.mark.first
def test_padded_rows(gpt):
    batches = [rows(seed) for seed in range(3)]
    options = {"cuda_graph_max_packed_seqs": None, "cuda_graph_packed_buckets": "auto"}
    with graphs_on(gpt.model, batches[0], **options) as graphs:
        for number, batch in enumerate(batches):
            with graphs.paused():
                runs = [gpt.results(batch) for _ in range(EAGER_RUNS)]
            poison(graphs)
            spoil(graphs)
            assert_same(gpt.results(batch), runs, gpt.names, f"batch {number}")
        assert graphs.statistics().replays == len(batches), graphs.statistics().fallbacks


def assert_eagers(trained, graphs, pack, name):
    """Losses are eager's on the bucket's rows to the bit, and gradients, but for the order of one sum."""
    with parity.eager_at(graphs, rows_of(pack)):
        runs = [trained.results(pack) for _ in range(EAGER_RUNS)]
    poison(graphs)
    spoil(graphs)
    before = graphs.statistics().replays
    losses, gradients = trained.results(pack)
    assert graphs.statistics().replays == before + 1, f"{name}: {graphs.statistics().fallbacks}"
    assert torch.equal(runs[0][0], runs[1][0]), f"{name}: eager's losses differ from themselves"
    assert torch.equal(losses, runs[0][0]), f"{name}: losses differ by {relative(losses, runs[0][0]):.2e}"
    far = {}
    for parameter, found, *eager in zip(trained.names, gradients, *(run[1] for run in runs), strict=True):
        noise = relative(eager[1], eager[0])
        allowed = max(parity.NOISE * noise, ROUNDED if parameter.endswith(CONVOLUTION) else 0.0)
        apart = min(relative(found, each) for each in eager)
        if not apart <= allowed:
            far[parameter] = f"{apart:.2e} (eager {noise:.2e})"
    assert not far, f"{name}: {far}"


@pytest.mark.first
def test_thirty_packs_replayed_from_one_capture(gpt):
    with graphs_on(gpt.model, lm.make_pack((500, 200))) as graphs:
        reads = graphs.workload.host.device_reads
        packs = [*thirty_packs(), ("documents of one token", lm.make_pack((1, 1, 700, 1, 300, 1)))]
        for name, pack in packs:
            assert_eagers(gpt, graphs, pack, name)
        assert not graphs.statistics().fallbacks, graphs.statistics().fallbacks
        assert graphs.workload.host.device_reads == reads


def test_a_document_of_no_tokens_is_left_out(gpt):
    """Upstream's eager layers lose what follows one."""
    lengths = (300, 0, 724)
    without = lm.make_pack([length for length in lengths if length])
    with graphs_on(gpt.model, lm.make_pack((500, 200))) as graphs:
        with graphs.paused():
            expected = gpt.results(without)
        losses, _ = gpt.results(lm.make_pack(lengths))
        assert graphs.statistics().replays == 1, graphs.statistics().fallbacks
    assert torch.equal(losses, expected[0])


def test_documents_with_padding_between_them(gpt):
    packed = [
        lm.make_pack(lengths, room=room) for lengths, room in (((500, 190), (512, 192)), ((3, 700, 64), (8, 704, 300)))
    ]
    with graphs_on(gpt.model, packed[0]) as graphs:
        for pack in packed:
            assert_eagers(gpt, graphs, pack, f"room {pack.lengths}")


def test_qwens_language_model(tower_module):
    trained = Trained(lm.build_model(lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072, attending=4, images=True)))
    packs = [lm.with_images(lm.make_pack(lengths), 1024) for lengths in ((500, 200), (1024,), (1, 900, 20, 800))]
    with graphs_on(trained.model, packs[0]) as graphs:
        for pack in packs:
            assert_eagers(trained, graphs, pack, str(pack.lengths))


RIGHT = engine_cudnn() >= CUDNN_WITH_RIGHT_GRADIENTS


@pytest.mark.skipif(not RIGHT, reason="this cuDNN's gradients of such heads are wrong")
def test_heads_as_wide_as_qwens(tower_module):
    trained = Trained(lm.build_model(lm.Shape(layers=4, hidden=1024, heads=8, head_width=256, ffn=3072, attending=4)))
    with graphs_on(trained.model, lm.make_pack((500, 200))) as graphs:
        for lengths in ((500, 190, 300), (1024,), (1, 900, 20, 800)):
            assert_eagers(trained, graphs, lm.make_pack(lengths), str(lengths))


def run_layers(model, pack):
    """Return what runs forward and backward of a model's layers over a pack."""
    hidden = torch.randn(pack.tokens, 1, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    hidden.requires_grad_()
    params = pack.arguments["packed_seq_params"]
    angles = model.rotary_pos_emb(params.max_seqlen_q, packed_seq=True)
    gradient = torch.ones_like(hidden)

    def run():
        out = model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=params)
        out.backward(gradient)

    return run


def test_eager_layers_read_the_device_and_replays_do_not(gpt):
    pack = lm.make_pack((300, 450, 274))
    run = run_layers(gpt.model, pack)
    run()
    assert {"common.py", "gdn.py", "index.py"} <= host_reads(run_layers(gpt.model, lm.make_pack((300, 450, 274))))
    with graphs_on(gpt.model, pack) as graphs:
        run()
        with host_may_not_wait():
            run()
        assert graphs.statistics().replays == 2, graphs.statistics().fallbacks


def host_reads(run):
    """Return the files of upstream whose lines wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {Path(each.filename).name for each in found if "synchronizing" in str(each.message)}
