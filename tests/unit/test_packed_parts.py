"""Parts of a decoder's layers on graphs of packed documents, against eager."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bridge_cg_plugin.graphs.rows import write_offsets
from bridge_cg_plugin.language.packed import program
from bridge_cg_plugin.language.packed.batch import OFFSETS
from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily

from .packed_parts import APART, on_parts
from .packs import ON_CPU, eager, graphs_on, losses_and_gradients, new_model, new_qwen, pack, replayed, with_images
from .towers import assert_close

LEAST_BYTES = 1024


@pytest.fixture(scope="module")
def bare():
    """A model that tests put graphs of their own on."""
    return new_model()


PARTS = pytest.mark.parametrize("modules", [["attn"], ["attn", "mlp"]], ids=",".join)


@PARTS
def test_all_parts_read_one_set_of_offsets_and_angles(bare, modules, monkeypatch):
    written = []
    monkeypatch.setattr(program, "write_offsets", lambda buffer, *args: written.append(write_offsets(buffer, *args)))
    with on_parts(bare, modules, APART) as graphs:
        del written[:]
        for lengths in ((30, 180, 77), (200, 120)):
            expected = eager(bare, graphs, pack(lengths))
            found = losses_and_gradients(bare, pack(lengths))
            assert_close([found[0], *found[1]], [expected[0], *expected[1]])
        assert len(written) == 2 * len(OFFSETS) and replayed(graphs) == 2 * len(graphs._regions)
        for name in (*OFFSETS, "angles"):
            addresses = {
                buffers[name].data_ptr() for region in graphs._regions for buffers in region.slots[0].buffers.values()
            }
            assert len(addresses) == 1, name


@pytest.mark.parametrize("modules, order", [(["attn"], (0, 1)), (["attn", "mlp"], (1, 0))], ids=["first", "last"])
def test_microbatches_in_flight_keep_their_offsets_apart(bare, modules, order):
    batches = [pack((30, 180, 77)), pack((250, 40), seed=1)]
    wanted = [p for p in bare.parameters() if p.requires_grad]

    def run():
        losses = [bare(**batch).sum() for batch in batches]
        return [torch.autograd.grad(losses[i], wanted) for i in order]

    expected = run()
    with on_parts(bare, modules, APART, slots=2) as graphs:
        for _ in range(2):
            for found, right in zip(run(), expected, strict=True):
                assert_close(found, right)
        assert not graphs.statistics().fallbacks and replayed(graphs) == 4 * len(graphs._regions)


def test_buckets_are_planned_from_packs_with_images():
    """Their features are added between the parts, by eager."""
    model, batch = new_qwen(), with_images(pack((30, 180, 77)))
    options = {"cuda_graph_modules": ["attn"], "cuda_graph_packed_buckets": "auto"}
    with ON_CPU(), graphs_on(model, batch, batch, **options) as graphs:
        expected = eager(model, graphs, batch)
        found = losses_and_gradients(model, batch)
        assert_close([found[0], *found[1]], [expected[0], *expected[1]])
        assert replayed(graphs) == 3 and not graphs.statistics().fallbacks


def under_autocast(forward):
    with torch.autocast("cpu", torch.bfloat16):
        return forward()


def in_checkpoint(forward):
    return checkpoint(forward, use_reentrant=False)


@pytest.mark.parametrize("around, reason", [(under_autocast, "autocast_changed"), (in_checkpoint, "in_checkpoint")])
def test_a_part_that_is_called_in_another_way_than_the_decoder_runs_eager(around, reason):
    model = new_model()
    layer = model.decoder.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: around(lambda: forward(*args, **kwargs))
    expected = model(**pack((30, 180, 77)))
    with on_parts(model, ["attn"], APART) as graphs:
        assert_close([model(**pack((30, 180, 77)))], [expected])
        assert graphs.statistics().fallbacks == {reason: 1} and replayed(graphs) == len(graphs._regions) - 1


def test_mlp_is_a_part_of_dense_layers_alone():
    model = new_model()
    model.decoder.layers[0].is_moe_layer = True
    family = TransformerBlockFamily(model.decoder)
    assert [part.name for part in family.parts(("attn", "mlp"))] == [
        "packed_attention_1",
        "packed_attention_2",
        "packed_mlp_2",
    ]
