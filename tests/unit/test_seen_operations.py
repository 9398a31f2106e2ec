"""What sees, changes or writes down the operations of a call gets eager's, in the whole encoder and in its parts."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ..tape import TapeExecutor
from . import packs
from .hugging_face_towers import draw_images, new_siglip, run_siglip
from .towers import assert_close, draw, graphs_on, loss_of, new_tower

IMAGES = 3


def new_encoder():
    """Return a tower whose attention knows forward-mode AD."""
    model = new_siglip()
    model.set_attn_implementation("eager")
    return model


def hidden(model, images):
    return model(pixel_values=images, return_dict=True).last_hidden_state


def traced_by_jit(model):
    trace = torch.jit.trace(model, draw_images(IMAGES), check_trace=False, strict=False)
    return [trace(draw_images(IMAGES, seed=1))["last_hidden_state"]]


def traced_by_fx(model):
    """By a mode of dispatch."""
    trace = torch.fx.experimental.proxy_tensor.make_fx(lambda images: hidden(model, images))(draw_images(IMAGES))
    return [trace(draw_images(IMAGES, seed=1))]


def differentiated(model):
    return [torch.func.grad(lambda scale: loss_of([hidden(model, draw_images(IMAGES)) * scale]))(torch.tensor(2.0))]


def with_tangents(model):
    images = draw_images(IMAGES)
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(hidden(model, forward_ad.make_dual(images, images))))


class Larger(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.01 if func is nn.functional.layer_norm else result


def in_mode(mode):
    def run(model):
        with mode():
            return run_siglip(model, IMAGES)

    return run


@pytest.mark.parametrize(
    "run",
    [
        traced_by_jit,
        traced_by_fx,
        differentiated,
        with_tangents,
        in_mode(Larger),
    ],
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_what_sees_operations_gets_those_of_eager(run):
    model, reference = new_encoder(), new_encoder()
    with graphs_on(model, buckets=(16,), executor=TapeExecutor()) as graphs:
        assert_close(run(model), run(reference))
        assert graphs.statistics().fallbacks.keys() == {"operations_seen"}
        for _ in range(2):
            assert_close(run_siglip(model, IMAGES), run_siglip(reference, IMAGES))
        assert graphs.statistics().replays == 1


def test_the_mode_of_a_default_device_leaves_replays():
    model, (pixels, grid) = new_tower(), draw([[1, 4, 4]])
    with graphs_on(model, executor=TapeExecutor()) as graphs, torch.device("cpu"):
        model(pixels, grid)
        assert graphs.statistics().replays == 1


def compiled(model):
    return lambda images: hidden(torch.compile(model, backend="eager", fullgraph=True), images)


def exported_strictly(model):
    return lambda images: torch.export.export(model, (images,), strict=True).module()(images).last_hidden_state


@pytest.mark.parametrize("traced", [compiled, exported_strictly])
def test_what_is_compiled_as_one_graph_runs_eager(traced, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch.compiler.reset()
    model, reference = new_encoder(), new_encoder()
    with graphs_on(model, buckets=(16,), executor=TapeExecutor()) as graphs:
        assert_close([traced(model)(draw_images(IMAGES))], [hidden(reference, draw_images(IMAGES))])
        assert graphs.statistics().fallbacks.keys() == {"one_graph"}
        run_siglip(model, IMAGES)
        assert graphs.statistics().replays == 1


def test_a_part_of_a_layer_compiled_as_one_graph_runs_eager(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setattr("warnings.warn", lambda *args, **kwargs: None)  # which torch.compile cannot trace
    torch.compiler.reset()
    model, reference = packs.new_model(), packs.new_model()
    hidden_states = torch.randn(16, 1, 32)
    with packs.graphs_on(model, packs.pack(packs.WARMUP), cuda_graph_modules=["mlp"]) as graphs:
        run = torch.compile(model.decoder.layers[0]._forward_mlp, backend="eager", fullgraph=True)
        assert_close([run(hidden_states)], [reference.decoder.layers[0]._forward_mlp(hidden_states)])
        assert graphs.statistics().fallbacks.keys() == {"one_graph"}
