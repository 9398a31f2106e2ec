"""A GPT model's decoder on graphs of packed documents, against eager, through the reference executor."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.segments import write_offsets
from bridge_cg_plugin.language.packed import program
from bridge_cg_plugin.language.packed.batch import OFFSETS, PackedBatchError, pack_batch
from bridge_cg_plugin.language.packed.fit import pack_buckets
from bridge_cg_plugin.options import OptionError
from bridge_cg_tools.planner.plan import place

from .packs import ON_CPU, ends, graphs_on, losses_and_gradients, new_model, new_qwen, pack, unpacked, with_images
from .towers import assert_close, poison

WARMUP = (100, 150, 50)
PACKS = {
    "one document": pack((300,)),
    "two": pack((7, 290)),
    "as many as captured": pack((1, 90, 30, 100, 60, 20)),
    "long tail": pack((260,)),
    "a document of no tokens": pack((40, 0, 250)),
    "repeated offsets": pack((120, 150), repeats=9),
    "exactly a bucket": pack((200, 120)),
    "the larger bucket": pack((321, 100)),
    "a bound above the longest": pack((120, 150), max_seqlen=400),
    "a bound of all tokens": pack((120, 150), max_seqlen=270),
}
OTHERS = {"attn": ["attn"], "mlp": ["mlp"], "whole": [], "both": ["attn", "mlp"]}


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.fixture(scope="module")
def bare():
    """A model that tests put graphs of their own on."""
    return new_model()


@pytest.fixture(scope="module")
def graphs(model, executor_kind):
    with graphs_on(model, pack(WARMUP)) as made:
        yield made


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 600), min_size=1, max_size=9))
def test_the_planner_places_a_pack_where_the_runtime_replays_it(graphs, lengths):
    (region,) = graphs._regions
    tokens, offsets = sum(lengths), ends(lengths)
    angles = torch.zeros(tokens, 1, 1, region.program.layout.rotated)
    batch = pack_batch(torch.zeros(tokens, 1, 1), angles, dict.fromkeys(OFFSETS, offsets), {}, Tensor.tolist)
    buckets = pack_buckets((320, 512), 6)
    assert place(tuple(lengths), buckets) == region.choose(batch)
    assert region.buckets == tuple(buckets)


def eager(model, graphs, arguments):
    with graphs.paused():
        return losses_and_gradients(model, arguments)


def replayed(graphs):
    return graphs.statistics().replays


@pytest.mark.parametrize("name", PACKS)
def test_losses_and_gradients_are_eagers(model, graphs, name):
    expected = eager(model, graphs, PACKS[name])
    before = replayed(graphs)
    found = losses_and_gradients(model, PACKS[name])
    assert replayed(graphs) == before + 1
    assert_close([found[0]], [expected[0]])
    assert_close(found[1], expected[1])


@pytest.mark.parametrize("modules", OTHERS.values(), ids=OTHERS)
def test_parts_of_layers(bare, modules):
    expected = losses_and_gradients(bare, pack((30, 180, 77)))
    with graphs_on(bare, pack(WARMUP), cuda_graph_modules=modules) as graphs:
        found = losses_and_gradients(bare, pack((30, 180, 77)))
        assert len(graphs._regions) == (2 if len(modules) == 1 else 1)
        assert replayed(graphs) == len(graphs._regions)
    assert_close([found[0]], [expected[0]])
    assert_close(found[1], expected[1])
    assert not any(
        "_forward_attention" in vars(layer) or "_forward_mlp" in vars(layer) for layer in bare.decoder.layers
    )


def test_both_parts_of_every_layer_apart(bare):
    expected = losses_and_gradients(bare, pack((30, 180, 77)))
    with graphs_on(bare, pack(WARMUP), capture=False, cuda_graph_modules=["attn", "mlp"]) as graphs:
        graphs.workload.family.parts = graphs.workload.family.layer_parts
        graphs.capture()
        found = losses_and_gradients(bare, pack((30, 180, 77)))
        assert replayed(graphs) == len(graphs._regions) == 4
    assert_close([found[0], *found[1]], [expected[0], *expected[1]])


def test_a_choice_holds_for_all_parts_of_layers(bare):
    with graphs_on(bare, pack(WARMUP), cuda_graph_modules=["attn"], cuda_graph_packed_tuning={"slots": 1}) as graphs:
        first = bare(**pack((300,)))
        second = bare(**pack((280,)))
        assert replayed(graphs) == 2 and graphs.statistics().fallbacks == {"no_free_slot": 1}
        del first, second
        gc.collect()


PARTS = pytest.mark.parametrize("modules", [["attn"], ["attn", "mlp"]], ids=",".join)


def on_parts(model, modules, **options):
    """Put graphs of parts of layers on a model, each a region of its own."""

    @contextmanager
    def made():
        values = {"capture": False, "cuda_graph_modules": modules, **options}
        with graphs_on(model, pack(WARMUP), **values) as graphs:
            graphs.workload.family.parts = graphs.workload.family.layer_parts
            graphs.capture()
            yield graphs

    return made()


@PARTS
def test_all_parts_read_one_set_of_offsets_and_angles(bare, modules, monkeypatch):
    written = []
    monkeypatch.setattr(program, "write_offsets", lambda buffer, *args: written.append(write_offsets(buffer, *args)))
    with on_parts(bare, modules) as graphs:
        del written[:]
        for lengths in ((30, 180, 77), (200, 120)):
            expected = eager(bare, graphs, pack(lengths))
            found = losses_and_gradients(bare, pack(lengths))
            assert_close([found[0], *found[1]], [expected[0], *expected[1]])
        assert len(written) == 2 * len(OFFSETS) and replayed(graphs) == 2 * len(graphs._regions)
        for name in (*OFFSETS, "angles"):
            addresses = {
                buffers[name].data_ptr() for region in graphs._regions for buffers in region._slots[0].buffers.values()
            }
            assert len(addresses) == 1, name


@PARTS
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
def test_microbatches_in_flight_keep_their_offsets_apart(bare, modules, order):
    batches = [pack((30, 180, 77)), pack((250, 40), seed=1)]
    wanted = [p for p in bare.parameters() if p.requires_grad]

    def run():
        losses = [bare(**batch).sum() for batch in batches]
        return [torch.autograd.grad(losses[i], wanted) for i in order]

    expected = run()
    with on_parts(bare, modules, cuda_graph_packed_tuning={"slots": 2}) as graphs:
        for _ in range(2):
            for found, right in zip(run(), expected, strict=True):
                assert_close(found, right)
        assert not graphs.statistics().fallbacks and replayed(graphs) == 4 * len(graphs._regions)


def test_parts_use_a_slot_that_is_free_in_all_of_them(bare):
    """Where another microbatch still holds a slot in one part, no part uses it."""
    with on_parts(bare, ["attn"], cuda_graph_packed_tuning={"slots": 2}) as graphs:
        held = graphs._regions[1]._slots[0].take()
        found = losses_and_gradients(bare, pack((30, 180, 77)))
        expected = eager(bare, graphs, pack((30, 180, 77)))
        assert_close(found[1], expected[1])
        other = graphs._regions[0]._slots[1].take()
        losses_and_gradients(bare, pack((30, 180, 77)))
        assert graphs.statistics().fallbacks == {"no_free_slot": 1} and replayed(graphs) == len(graphs._regions)
        held.release()
        other.release()


@settings(max_examples=30)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6).filter(lambda n: 257 <= sum(n) <= 512))
def test_any_pack_from_one_capture(model, graphs, lengths):
    expected = eager(model, graphs, pack(lengths))
    before = replayed(graphs)
    found = losses_and_gradients(model, pack(lengths))
    assert replayed(graphs) == before + 1
    assert_close([found[0], *found[1]], [expected[0], *expected[1]])


def test_documents_do_not_see_each_other(model, graphs):
    changed = pack((90, 130, 80))
    changed["input_ids"] = changed["input_ids"].clone()
    changed["input_ids"][0, 90:220] = changed["input_ids"][0, 90:220].flip(0)
    with torch.no_grad():
        model.eval()
        first, second = model(**pack((90, 130, 80)) | {"labels": None}), model(**changed | {"labels": None})
        model.train()
    assert torch.equal(first[:, :90], second[:, :90]) and torch.equal(first[:, 220:], second[:, 220:])
    assert not torch.equal(first[:, 90:220], second[:, 90:220])


def test_nothing_of_another_batch_is_left(model, graphs):
    expected = eager(model, graphs, pack((60, 200)))
    for value in (float("nan"), 1e4):
        poison(graphs, value)
        found = losses_and_gradients(model, pack((60, 200)))
        assert_close([found[0]], [expected[0]])
        assert_close(found[1], expected[1])


def test_equal_sizes_and_other_boundaries(model, graphs):
    for lengths in ((100, 200), (200, 100), (150, 150)):
        expected = eager(model, graphs, pack(lengths))
        assert_close(losses_and_gradients(model, pack(lengths))[1], expected[1])


FALLBACKS = {
    "too_many_documents": pack((50,) * 7),
    "too_many_tokens": pack((513,)),
    "too_few_tokens": pack((60, 40)),
    "other_layout": pack((100, 150), room=(110, 160)),
    "unpacked_batch": unpacked(),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_a_batch_that_no_graph_takes_runs_eager_and_is_counted(model, graphs, reason):
    expected = eager(model, graphs, FALLBACKS[reason])
    before = graphs.statistics().fallbacks[reason]
    losses, gradients = losses_and_gradients(model, FALLBACKS[reason])
    assert graphs.statistics().fallbacks[reason] == before + 1
    assert torch.equal(losses, expected[0])
    assert all(map(torch.equal, gradients, expected[1]))


def test_a_document_above_the_bound_runs_eager(bare):
    with graphs_on(bare, pack(WARMUP), cuda_graph_packed_tuning={"max_seqlen": 160}) as graphs:
        losses_and_gradients(bare, pack((160, 140)))
        assert replayed(graphs) == 1
        losses_and_gradients(bare, pack((161, 139)))
        assert graphs.statistics().fallbacks == {"document_too_long": 1}


def test_arguments_that_no_graph_was_captured_with(model, graphs):
    before = graphs.statistics().fallbacks["call_arguments"]
    arguments = pack((100, 200))
    arguments["packed_seq_params"].pad_between_seqs = True
    model(**arguments)
    assert graphs.statistics().fallbacks["call_arguments"] == before + 1


def test_documents_with_padding_between_them(bare):
    batches = [pack((90, 191), room=(96, 194)), pack((290,), room=(300,)), pack((1, 100, 64), room=(8, 104, 200))]
    expected = [losses_and_gradients(bare, batch) for batch in batches]
    with graphs_on(bare, batches[0]) as graphs:
        for batch, (losses, gradients) in zip(batches, expected, strict=True):
            found = losses_and_gradients(bare, batch)
            assert_close([found[0]], [losses])
            assert_close(found[1], gradients)
        assert replayed(graphs) == len(batches)
        losses_and_gradients(bare, pack((100, 160)))
        assert graphs.statistics().fallbacks == {"other_layout": 1}


def test_padded_offsets_that_are_the_others_are_no_padding(model, graphs):
    arguments = pack((100, 160))
    params = arguments["packed_seq_params"]
    params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded = params.cu_seqlens_q, params.cu_seqlens_kv
    before = replayed(graphs)
    model(**arguments)
    assert replayed(graphs) == before + 1


def test_bad_offsets_are_refused_before_the_layers_run(model, graphs):
    arguments = pack((100, 160))
    arguments["packed_seq_params"].cu_seqlens_q = ends((100, 170))
    with pytest.raises(PackedBatchError, match="ends at 270, the pack has 260 tokens"):
        model(**arguments)


def test_evaluation_replays_without_gradients(model, graphs):
    model.eval()
    try:
        with torch.no_grad():
            with graphs.paused():
                expected = model(**pack((130, 170)))
            found = model(**pack((130, 170)))
    finally:
        model.train()
    assert_close([found], [expected])
    assert any(b.evaluations for b in graphs.statistics().buckets.values())


def test_several_microbatches_in_flight(bare):
    batches = [pack((100, 180)), pack((300,)), pack((20, 90, 190))]
    expected = [losses_and_gradients(bare, batch)[1] for batch in batches]
    wanted = list(bare.parameters())
    with graphs_on(bare, pack(WARMUP), cuda_graph_packed_tuning={"slots": 2}) as graphs:
        losses = [bare(**batch) for batch in batches]
        assert graphs.statistics().fallbacks == {"no_free_slot": 1}
        for loss, gradients in zip(losses, expected, strict=True):
            weights = torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape)
            assert_close(torch.autograd.grad((loss * weights).sum(), wanted), gradients)


def test_gradients_are_added_to_main_grad():
    model = new_model()
    batches = [pack((100, 180)), pack((300,))]
    with graphs_on(model, pack(WARMUP)) as graphs:
        expected = [eager(model, graphs, batch)[1] for batch in batches]
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    with graphs_on(model, pack(WARMUP)):
        for batch in batches:
            losses = model(**batch)
            (losses * torch.linspace(0.5, 1.5, losses.numel()).view(losses.shape)).sum().backward()
    sums = [a + b for a, b in zip(*expected, strict=True)]
    parameters = dict(zip(model.parameters(), sums, strict=True))
    inside = set(model.decoder.parameters())
    for parameter, total in parameters.items():
        assert_close([parameter.main_grad if parameter in inside else parameter.grad], [total])


def test_a_later_pipeline_stage():
    """Its input is set on the decoder before the model is called."""
    model = new_model(pre_process=False)
    arguments = pack((90, 200))
    hidden = torch.randn(290, 1, 32, generator=torch.Generator().manual_seed(0))

    def run():
        leaf = hidden.clone().requires_grad_()
        model.set_input_tensor(leaf)
        losses = model(**arguments)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), [leaf, *model.parameters()])]

    expected = run()
    model.set_input_tensor(hidden.clone().requires_grad_())
    with graphs_on(model, arguments) as graphs:
        found = run()
        assert replayed(graphs) == 1
    assert_close(found, expected)


def test_fused_rotary_positions_are_the_documents(model, monkeypatch):
    """With upstream's fused kernel a table of as many rows as tokens goes by the documents, too."""
    from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily

    assert TransformerBlockFamily(model.decoder).absolute
    monkeypatch.setattr(model.config, "apply_rope_fusion", True)
    assert not TransformerBlockFamily(model.decoder).absolute


def test_buckets_are_planned_from_what_warm_up_showed(bare):
    seen = [pack((400, 100)), pack((300,)), pack((310,)), unpacked()]
    options = {"cuda_graph_packed_buckets": "auto", "cuda_graph_packed_tuning": {"capture_mode": "at_once"}}
    with graphs_on(bare, *seen, **options) as graphs:
        assert graphs.workload.buckets.capacities[-1] == 512 and graphs.statistics().warmup_microbatches == 3
        losses_and_gradients(bare, pack((411,)))
        assert replayed(graphs) == 1


def test_packs_that_cannot_be_padded_have_buckets_of_the_usual_sizes(bare):
    sizes = (300, 310, 300, 320, 310, 300)
    with graphs_on(bare, *(pack((n,)) for n in sizes), capture=False, cuda_graph_packed_buckets="auto") as graphs:
        graphs.workload.family.shards = 2
        assert graphs.workload.plan.capacities().capacities == (300, 310, 320)
        assert graphs.workload.plan.capacities().padding_share == 0


@pytest.mark.parametrize("change", [lambda a: a.double(), lambda a: a[:, 0], lambda a: (a, a)])
def test_angles_of_another_kind_run_eager(model, graphs, change):
    params, hidden = pack((300,))["packed_seq_params"], torch.zeros(300, 1, 32)
    kwargs = {"hidden_states": hidden, "rotary_pos_emb": torch.zeros(300, 1, 1, 8), "packed_seq_params": params}
    assert not isinstance(graphs.workload.family.read((), kwargs), str)
    kwargs["rotary_pos_emb"] = change(kwargs["rotary_pos_emb"])
    assert graphs.workload.family.read((), kwargs) == "call_arguments"


def test_without_a_pack_in_warm_up_nothing_is_captured(bare):
    with graphs_on(bare, unpacked(), cuda_graph_packed_strict=False) as graphs:
        assert not graphs.captured and "no packed microbatch was seen" in graphs.report()
        bare(**pack((300,)))
        assert graphs.statistics().fallbacks == {"capture_failed": 1}
    with pytest.raises(CaptureError, match="no packed microbatch"), graphs_on(bare):
        pass


def test_regions_of_parts_are_given_back_without_a_collection(model):
    with graphs_on(model, pack(WARMUP), cuda_graph_modules=["attn"]) as graphs:
        regions = [weakref.ref(region) for region in graphs._regions]
        gc.disable()
        try:
            graphs.reset()
            assert [region for region in regions if region() is not None] == []
        finally:
            gc.enable()


def test_detaching_leaves_the_decoder_as_it_was(model):
    fresh = new_model()
    before = dict(vars(fresh.decoder))
    with graphs_on(fresh, pack(WARMUP), cuda_graph_modules=["attn"]):
        assert "forward" in vars(fresh.decoder)
    after = vars(fresh.decoder)
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def noting(forward, seen):
    """Return a linear module's forward that first notes how it would add its weight's gradient."""

    def noted(self, *args, **kwargs):
        if hasattr(self, "is_first_microbatch"):
            seen.append((self.fuse_wgrad_accumulation, self.is_first_microbatch))
        return forward(self, *args, **kwargs)

    return noted


@pytest.mark.parametrize("modules", [[], ["attn"], ["mlp"]], ids=["layers", "attn", "mlp"])
@pytest.mark.parametrize("fused", [None, True, False], ids=["by default", "fused", "not fused"])
def test_weight_gradients_are_added_inside_products_of_recorded_work_only(monkeypatch, modules, fused):
    """Products are Transformer Engine's on a GPU; these have its attributes alone."""
    fresh = new_model()
    products = [module for module in fresh.decoder.modules() if "Parallel" in type(module).__name__]
    seen = []
    for product in products:
        product.fuse_wgrad_accumulation, product.is_first_microbatch = False, True
        product.weight.main_grad = torch.zeros_like(product.weight)
    for kind in {type(product) for product in products}:
        monkeypatch.setattr(kind, "forward", noting(kind.forward, seen))
    tuning = {} if fused is None else {"gradient_accumulation_fusion": fused}
    with graphs_on(fresh, pack(WARMUP), cuda_graph_modules=modules, cuda_graph_packed_tuning=tuning) as graphs:
        assert (False, True) in seen and ((True, False) in seen) == (fused is not False)
        assert (True, True) not in seen and (False, False) not in seen
        seen.clear()
        with graphs.paused():
            fresh(**pack(WARMUP))
        assert {*seen} == {(False, True)}
    assert products and not any(product.fuse_wgrad_accumulation for product in products)


def test_mlp_is_a_part_of_dense_layers_alone():
    from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily

    model = new_model()
    model.decoder.layers[0].is_moe_layer = True
    family = TransformerBlockFamily(model.decoder)
    assert [part.name for part in family.parts(("attn", "mlp"))] == [
        "packed_attention_1",
        "packed_attention_2",
        "packed_mlp_2",
    ]


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_dtype": "fp64",  # other products of a router are Transformer Engine's, on a GPU
    "moe_router_load_balancing_type": "none",
}
ROUTERS = {
    "no losses": {},
    "an auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "a loss of logits": {"moe_z_loss_coeff": 0.1},
    "a bias of experts": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "dropped tokens": {"moe_expert_capacity_factor": 1.0},
}


@pytest.mark.parametrize("modules", [["moe_router"], ["attn", "moe_router"], ["attn"]], ids=",".join)
@pytest.mark.parametrize("changes", ROUTERS.values(), ids=ROUTERS)
def test_routers_of_experts(modules, changes):
    model = new_model(**{**EXPERTS, **changes})
    routers = [layer.mlp.router for layer in model.decoder.layers]
    counted = [router.local_tokens_per_expert for router in routers]
    expected, statistics = [], []
    for arguments in (pack((30, 180, 77)), pack((300,), seed=1)):
        expected.append(losses_and_gradients(model, arguments))
        statistics.append([None if c is None else c.clone() for c in counted])
        for count in counted:
            _ = count is None or count.zero_()
    with ON_CPU(), graphs_on(model, pack(WARMUP), cuda_graph_modules=modules) as graphs:
        assert len(graphs._regions) == 2
        for count in counted:
            _ = count is None or count.zero_()
        for arguments, wanted, tokens in zip(
            (pack((30, 180, 77)), pack((300,), seed=1)), expected, statistics, strict=True
        ):
            poison(graphs, float("nan"))
            found = losses_and_gradients(model, arguments)
            assert_close([found[0], *found[1]], [wanted[0], *wanted[1]])
            for count, number in zip(counted, tokens, strict=True):
                assert count is None or torch.equal(count, number)
                _ = count is None or count.zero_()
        assert replayed(graphs) == 4 and not graphs.statistics().fallbacks
    assert not any({"forward", "gating"} & set(vars(router)) for router in routers)


def test_a_router_that_cannot_be_recorded_is_refused():
    from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily

    model = new_model(**EXPERTS, moe_input_jitter_eps=0.1)
    with pytest.raises(OptionError, match="moe_input_jitter_eps=0.1"):
        TransformerBlockFamily(model.decoder).parts(("attn", "moe_router"))
    model = new_model(**EXPERTS)
    model.decoder.layers[0].mlp.router = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match="one is Linear"):
        TransformerBlockFamily(model.decoder).parts(("moe_router",))


def test_parts_that_no_layer_has_are_refused():
    from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily

    family = TransformerBlockFamily(new_model(**EXPERTS).decoder)
    with pytest.raises(OptionError, match="'mlp': it must be parts that this model's layers have"):
        family.parts(("mlp",))


def test_an_eager_microbatch_between_replays_routes_for_itself():
    """What a replay left for the calls behind it never answers another microbatch."""
    model = new_model(**EXPERTS)
    packs = [pack((100, 180)), pack((60, 40)), pack((290,))]
    expected = [losses_and_gradients(model, arguments) for arguments in packs]
    with ON_CPU(), graphs_on(model, pack(WARMUP), cuda_graph_modules=["attn", "moe_router"]) as graphs:
        for arguments, wanted in zip(packs, expected, strict=True):
            found = losses_and_gradients(model, arguments)
            assert_close([found[0], *found[1]], [wanted[0], *wanted[1]])
        assert graphs.statistics().fallbacks == {"too_few_tokens": 1}
        assert all(follower.outputs is None for follower in graphs._parts.followers)


def test_attention_of_another_kind_is_refused(model):
    from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily

    other = new_model()
    other.decoder.layers[1].self_attention = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match="must have megatron-core's SelfAttention.*one has Linear"):
        TransformerBlockFamily(other.decoder)


def test_the_executor_sees_every_bound(bare):
    class Counting(ReferenceExecutor):
        recorded = 0

        def record(self, body, pool):
            self.recorded += 1
            return super().record(body, pool)

    executor = Counting()
    with graphs_on(bare, pack(WARMUP), executor=executor, cuda_graph_packed_tuning={"evaluation": False}) as graphs:
        assert executor.recorded == len(graphs._regions[0].buckets) > 0


@pytest.fixture(scope="module")
def qwen():
    return new_qwen()


def features_and_gradients(model, arguments):
    """Return losses, and gradients of parameters and image features."""
    features = arguments.get("deepstack_visual_embeds", [])
    losses = model(**arguments)
    weights = torch.linspace(0.5, 1.5, losses.numel()).view(losses.shape)
    return [losses.detach(), *torch.autograd.grad((losses * weights).sum(), [*model.parameters(), *features])]


@pytest.mark.parametrize("modules", [[], ["attn"]], ids=["whole", "attn"])
def test_qwen3_vl_with_image_features(qwen, modules):
    batches = [
        with_images(pack((100, 160))),
        with_images(pack((300,)), every=3, seed=1),
        with_images(pack((20, 90, 180)), features=0),
    ]
    expected = [features_and_gradients(qwen, batch) for batch in batches]
    with graphs_on(qwen, batches[0], cuda_graph_modules=modules) as graphs:
        for batch, wanted in zip(batches, expected, strict=True):
            assert_close(features_and_gradients(qwen, batch), wanted)
        assert replayed(graphs) == len(batches) * len(graphs._regions)


def test_more_image_features_than_were_captured(qwen):
    with graphs_on(qwen, with_images(pack((100, 160)), features=0)) as graphs:
        features_and_gradients(qwen, with_images(pack((100, 160))))
        assert graphs.statistics().fallbacks == {"other_layout": 1}


def test_qwen3_vl_is_as_it_was_after_recording(qwen):
    before = dict(vars(qwen.decoder))
    with graphs_on(qwen, with_images(pack((100, 160)))):
        pass
    assert vars(qwen.decoder).keys() == before.keys()
