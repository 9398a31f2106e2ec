"""Packed-sequence graphs of parameters in fp8: Transformer Engine's tensors on a CPU, its products stood in for."""

from contextlib import nullcontext

import pytest
import torch
from megatron.core import fp8_utils
from megatron.core.transformer import transformer_block
from torch import nn
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Tensor
from transformer_engine.pytorch.tensor.storage import float8_tensor_storage as storage

from bridge_cg_plugin.upstream.decoder import fp8

from .packs import graphs_on, losses_and_gradients, new_model, replayed
from .test_packed_fp8 import FULL, trained, trained_on_graphs

LARGEST = torch.finfo(torch.float8_e4m3fn).max


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A GPU whose products read a transpose, made without it."""

    def create_transpose(tensor):
        made = tensor._data.t().contiguous()
        tensor._transpose = made if tensor._transpose is None else tensor._transpose.copy_(made)
        tensor._transpose_invalid = False

    monkeypatch.setattr(storage, "is_non_tn_fp8_gemm_supported", lambda: False)
    monkeypatch.setattr(storage.Float8TensorStorage, "_create_transpose", create_transpose)


def quantized(values):
    """Return the bytes and the scale of a tensor in fp8."""
    scale = values.abs().max() / LARGEST
    return (values / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale.reshape(1)


def parameter_in_fp8(values):
    data, scale = quantized(values.detach())
    held = {"data": data, "fp8_scale_inv": scale, "fp8_dtype": DType.kFloat8E4M3}
    return nn.Parameter(Float8Tensor(shape=values.shape, dtype=values.dtype, device="cpu", **held))


def write(weight, values, stale):
    """Write other values as optimizers do; data parallelism makes the transpose, or it is left to the next forward."""
    for kept, made in zip((weight._data, weight._scale_inv), quantized(values), strict=True):
        kept.copy_(made)
    weight._reset_caches() if stale else weight._create_transpose()


class Product(torch.autograd.Function):
    """A product that reads a weight by row in its forward and by column in its backward."""

    @staticmethod
    def forward(ctx, hidden, weight):
        weight.update_usage(rowwise_usage=True, columnwise_usage=True)
        ctx.weight = weight
        ctx.save_for_backward(hidden)
        return hidden @ (weight._data.view(torch.float8_e4m3fn).float() * weight._scale_inv).t()

    @staticmethod
    def backward(ctx, gradient):
        (hidden,), weight = ctx.saved_tensors, ctx.weight
        weight.update_usage(columnwise_usage=True)
        by_column = weight._transpose.view(torch.float8_e4m3fn).float() * weight._scale_inv
        return gradient @ by_column.t(), gradient.flatten(0, -2).t() @ hidden.flatten(0, -2)


class LinearInFp8(nn.Module):
    """A linear layer whose parameter is in fp8."""

    def __init__(self, weight):
        super().__init__()
        self.weight = parameter_in_fp8(weight)
        self.is_first_microbatch, self._fp8_workspaces = True, {}

    def forward(self, hidden):
        self.is_first_microbatch = False
        return Product.apply(hidden, self.weight), None


def model_in_fp8(**config):
    model = new_model(**config)
    model.config.fp8, model.config.fp8_recipe = "hybrid", "tensorwise"
    for layer in model.decoder.layers:
        for name in ("linear_fc1", "linear_fc2"):
            setattr(layer.mlp, name, LinearInFp8(getattr(layer.mlp, name).weight))
    return model


@pytest.fixture(autouse=True)
def contexts(monkeypatch):
    """Modules here are in fp8 wherever they are called."""
    for module in (fp8_utils, transformer_block):
        monkeypatch.setattr(module, "get_fp8_context", lambda *args, **kwargs: nullcontext())


def weights(model):
    return [p for p in model.parameters() if fp8.is_quantized(p)]


def updating(stale):
    def update(parameter, gradient):
        if fp8.is_quantized(parameter):
            write(parameter, parameter.dequantize() - 0.1 * gradient, stale)
        else:
            parameter -= 0.01 * gradient

    return update


@pytest.mark.parametrize(
    "stale, modules, turn",
    [(False, [], "replays"), (True, [], "eager-first"), (True, ["mlp"], "replays"), (False, ["mlp"], "replay-first")],
)
def test_steps_equal_eager(modules, turn, stale):
    eager, model = model_in_fp8(), model_in_fp8()
    expected = trained(eager, lambda microbatch: losses_and_gradients(eager, microbatch), updating(stale))
    torch.testing.assert_close(trained_on_graphs(model, modules, turn, updating(stale)), expected)
    assert all(torch.equal(one._data, other._data) for one, other in zip(weights(model), weights(eager), strict=True))


@pytest.mark.parametrize("names", [("_data",), ("_transpose",), ("_scale_inv",), ("_data", "_transpose")])
def test_values_that_moved_run_eager(names):
    model = model_in_fp8()
    with graphs_on(model, FULL) as graphs:
        expected = losses_and_gradients(model, FULL)
        weight = weights(model)[1]
        before = {name: getattr(weight, name) for name in names}
        for name, value in before.items():
            setattr(weight, name, value.clone())
        found = losses_and_gradients(model, FULL)
        assert graphs.statistics().fallbacks == {"model_changed": 1}
        torch.testing.assert_close(found, expected)
        for name, value in before.items():
            setattr(weight, name, value)
        losses_and_gradients(model, FULL)
        assert replayed(graphs) == 2


def test_transposes_are_made_before_a_capture():
    """A graph would have one of its own, which it makes in every replay."""
    model = model_in_fp8()
    with graphs_on(model, FULL, capture=False) as graphs:
        with torch.no_grad():
            model(**FULL)
        for weight in weights(model):
            weight.remove_caches()
        assert graphs.capture()
        made = [weight._transpose for weight in weights(model)]
        assert None not in made and not any(weight._transpose_invalid for weight in weights(model))
        losses_and_gradients(model, FULL)
        assert replayed(graphs) == 1 and all(w._transpose is t for w, t in zip(weights(model), made, strict=True))


def test_transposes_stay_where_an_optimizer_quantizes():
    """A parameter that was made without gradients would drop its transpose whenever values are written."""
    model = model_in_fp8()
    for weight in weights(model):
        weight._quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"), columnwise=False)
    with graphs_on(model, FULL):
        assert all(weight._quantizer.columnwise_usage for weight in weights(model))
