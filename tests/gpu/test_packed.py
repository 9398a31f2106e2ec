"""Packed documents on real graphs of a GPT model's layers: losses and gradients against eager.

Where a pack is padded, eager runs on the bucket's rows too: another number of rows lets a matrix library choose another
kernel, whose rounding is neither better nor worse. What that means is measured against fp32.
"""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch

MAX_SEQS = 24
BUCKETS = [1024, 2048]
SIZES = {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 3072}
# Two eager runs say what eager differs from itself by, nothing in most packs; a third may be this much farther.
NOISE = 1.5


@pytest.fixture(scope="module")
def lm(tower_module):
    from scripts.performance import language_model

    return language_model


@pytest.fixture(scope="module")
def parity(tower_module):
    from scripts.performance import packed_parity

    return packed_parity


@pytest.fixture(scope="module", params=[False, True], ids=["rope", "fused-rope"])
def fused_rope(request):
    return request.param


@pytest.fixture(scope="module")
def gpt(lm, tower_module, fused_rope):
    model = lm.build_model(lm.Shape(**SIZES, fused_rope=fused_rope))
    return model, tower_module.MainGrads(model)


@pytest.fixture(scope="module")
def fp32(lm, parity, gpt):
    return parity.Fp32Reference(lambda: lm.build_model(lm.Shape(**SIZES), dtype=torch.float32), gpt[0])


@contextmanager
def graphs_on(lm, model, *warmup, modules=(), **options):
    values = {"cuda_graph_max_packed_seqs": MAX_SEQS, "cuda_graph_packed_buckets": BUCKETS, **options}
    helper = lm.new_helper(model, *warmup, modules=modules, **values)
    assert helper.graphs_created()
    try:
        yield helper.graphs
    finally:
        helper.delete_cuda_graphs()
        torch.cuda.empty_cache()


def results(lm, gpt, pack):
    model, grads = gpt
    grads.zero()
    losses = lm.step(model, pack)
    return losses, grads.copy()


def poison(graphs):
    """Fill every static floating-point buffer with NaN, as memory nobody wrote may be."""
    for region in graphs._regions:
        for slot in region._slots:
            for flat in slot.arena._flat.values():
                if flat.is_floating_point():
                    flat.fill_(torch.nan)


def rows_of(pack):
    return next(bucket for bucket in BUCKETS if bucket >= pack.tokens)


def assert_eagers(tower_module, lm, parity, gpt, graphs, pack, name):
    """Graphs give what eager gives on the bucket's rows; returns what they gave."""
    with parity.eager_at(graphs, rows_of(pack)):
        expected, first = results(lm, gpt, pack)
        again, second = results(lm, gpt, pack)
    poison(graphs)
    before = graphs.statistics().replays
    losses, gradients = results(lm, gpt, pack)
    assert graphs.statistics().replays == before + len(graphs._regions), graphs.statistics().fallbacks
    noise = NOISE * tower_module.relative(again, expected), NOISE * tower_module.largest_relative(second, first)
    assert tower_module.relative(losses, expected) <= noise[0], name
    assert tower_module.largest_relative(gradients, first) <= noise[1], name
    return losses, gradients


def assert_as_near_to_fp32(lm, parity, gpt, graphs, fp32, pack, found, name):
    """Where graphs differ from eager on the pack's own rows, neither is the nearer one to fp32."""
    with graphs.paused():
        own = results(lm, gpt, pack)
    if all(map(torch.equal, (found[0], *found[1]), (own[0], *own[1]))):
        return False
    far = parity.farther(found, own, fp32.results(pack))
    assert max(far.values()) <= parity.FARTHER, (name, far)
    return True


def packs(lm):
    """30 packs of 1 to the most documents, with long tails, of all sizes that the buckets take."""
    made = {}
    for index in range(30):
        documents = 1 + index * (MAX_SEQS - 1) // 29
        tokens = 300 + 59 * index if index % 3 else BUCKETS[index % 2]
        made[f"{index}: {documents} documents, {tokens} tokens"] = lm.draw(tokens, documents, index)
    return made


def test_thirty_packs_replayed_from_one_capture(tower_module, lm, parity, gpt, fp32):
    differ = []
    with graphs_on(lm, gpt[0], lm.make_pack((500, 200))) as graphs:
        for seed, (name, lengths) in enumerate(packs(lm).items()):
            pack = lm.make_pack(lengths, seed)
            found = assert_eagers(tower_module, lm, parity, gpt, graphs, pack, name)
            if assert_as_near_to_fp32(lm, parity, gpt, graphs, fp32, pack, found, name):
                differ.append(name)
        assert not graphs.statistics().fallbacks and not graphs.host.device_reads
    print(f"{len(differ)} of 30 packs differ from eager on their own rows: {', '.join(differ)}")


@pytest.mark.parametrize("modules", [("attn",), ("mlp",), ("attn", "mlp")], ids=",".join)
def test_parts_of_layers(tower_module, lm, parity, gpt, modules):
    with graphs_on(lm, gpt[0], lm.make_pack((500, 200)), modules=modules) as graphs:
        for lengths in ((1024,), (300, 400), (1, 900, 20, 800)):
            assert_eagers(tower_module, lm, parity, gpt, graphs, lm.make_pack(lengths), lengths)


def test_documents_with_padding_between_them(tower_module, lm, parity, gpt):
    packed = [
        lm.make_pack(lengths, room=room)
        for lengths, room in (((500, 190), (512, 192)), ((1001,), (1008,)), ((3, 700, 64), (8, 704, 300)))
    ]
    with graphs_on(lm, gpt[0], packed[0]) as graphs:
        for pack in packed:
            assert_eagers(tower_module, lm, parity, gpt, graphs, pack, pack.lengths)


def test_documents_do_not_see_each_other(lm, gpt):
    model, _ = gpt
    pack, changed = lm.make_pack((300, 450, 200)), lm.make_pack((300, 450, 200))
    changed.arguments["input_ids"][0, 300:750] = changed.arguments["input_ids"][0, 300:750].flip(0)
    with graphs_on(lm, model, pack) as graphs:
        logits = [model(**{**p.arguments, "labels": None}).detach() for p in (pack, changed)]
        assert graphs.statistics().replays == 2
    first, second = logits
    assert torch.equal(first[:, :300], second[:, :300]) and torch.equal(first[:, 750:], second[:, 750:])
    assert not torch.equal(first[:, 300:750], second[:, 300:750])
    gc.collect()


def test_fallbacks_are_eager_to_the_bit(lm, gpt):
    cases = {
        "too_many_documents": lm.make_pack(lm.split(1024, MAX_SEQS + 1)),
        "too_many_tokens": lm.make_pack((BUCKETS[-1] + 8,)),
        "other_layout": lm.make_pack((500,), room=(512,)),
        "too_few_tokens": lm.make_pack((100, 60)),
    }
    expected = {name: results(lm, gpt, pack)[0] for name, pack in cases.items()}
    with graphs_on(lm, gpt[0], lm.make_pack((500, 200))) as graphs:
        for name, pack in cases.items():
            assert torch.equal(results(lm, gpt, pack)[0], expected[name]), name
        assert graphs.statistics().fallbacks == dict.fromkeys(cases, 1)


def test_a_replayed_decoder_reads_nothing_on_the_host(lm, gpt):
    model, _ = gpt
    pack = lm.make_pack((300, 450, 200))
    params = pack.arguments["packed_seq_params"]
    with graphs_on(lm, model, pack) as graphs:
        hidden = torch.randn(pack.tokens, 1, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
        hidden.requires_grad_()
        angles = model.rotary_pos_emb(params.max_seqlen_q, packed_seq=True)
        gradient = torch.ones_like(hidden)

        def run():
            model.decoder(
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=params
            ).backward(gradient)

        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert graphs.statistics().replays == 2 and hidden.grad.isfinite().all()


def test_gradients_add_up_over_microbatches_in_flight(tower_module, lm, parity, gpt):
    model, grads = gpt
    made = [lm.make_pack(lengths, seed) for seed, lengths in enumerate(((900,), (200, 500), (10, 20, 1500)))]

    def run(around):
        grads.zero()
        losses = []
        for pack, context in zip(made, around, strict=True):
            with context:
                losses.append(model(**pack.arguments))
        for loss, pack in zip(losses, made, strict=True):
            loss.backward(pack.weights.to(loss.dtype))
        return grads.copy()

    with graphs_on(lm, model, made[1], cuda_graph_packed_slots=2) as graphs:

        def eager():
            return run([*(parity.eager_at(graphs, rows_of(pack)) for pack in made[:2]), graphs.paused()])

        first, second = eager(), eager()
        found = run([nullcontext()] * 3)
        assert graphs.statistics().replays == 2 and graphs.statistics().fallbacks == {"no_free_slot": 1}
    noise = tower_module.largest_relative(second, first)
    assert tower_module.largest_relative(found, first) <= NOISE * noise


def test_evaluation(lm, parity, gpt):
    model, _ = gpt
    pack = lm.make_pack((300, 450, 200))

    def evaluate():
        model.eval()
        try:
            return model(**pack.arguments)
        finally:
            model.train()

    with graphs_on(lm, model, pack) as graphs, torch.no_grad():
        with parity.eager_at(graphs, rows_of(pack)):
            expected = evaluate()
        found = evaluate()
        assert sum(b.evaluations for b in graphs.statistics().buckets.values()) == 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("modules", [("attn",), ("moe_router",), ("attn", "moe_router")], ids=",".join)
@pytest.mark.parametrize("balancing", ["none", "aux_loss"])
def test_a_mixture_of_experts(tower_module, lm, parity, modules, balancing):
    shape = lm.Shape(layers=2, hidden=1024, heads=8, ffn=768, experts=8)
    router = {"moe_router_load_balancing_type": balancing, "moe_aux_loss_coeff": 1e-2 if balancing != "none" else 0.0}
    model = lm.build_model(shape, **router)
    gpt = model, tower_module.MainGrads(model)
    with graphs_on(lm, model, lm.make_pack((500, 200)), modules=modules) as graphs:
        for lengths in ((1024,), (300, 400), (1, 900, 20, 800)):
            with parity.eager_at(graphs, rows_of(lm.make_pack(lengths))):
                expected, first = results(lm, gpt, lm.make_pack(lengths))
            poison(graphs)
            losses, gradients = results(lm, gpt, lm.make_pack(lengths))
            # Experts' results are added up in any order; a token whose experts are all but tied may go to another.
            assert tower_module.relative(losses, expected) <= 1e-2
            assert sorted(map(tower_module.relative, gradients, first))[len(first) // 2] <= 5e-2
        assert graphs.statistics().replays == 2 * 3 and not graphs.statistics().fallbacks
