"""Packed-sequence graphs in fp8, where Transformer Engine's products are stood in for: they need a GPU."""

from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from megatron.core import fp8_utils
from megatron.core.transformer import transformer_block
from torch import nn
from torch.nn import functional
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.decoder import fp8

from .packs import eager, graphs_on, losses_and_gradients, new_model, pack, replayed

FULL, OTHER = pack((200, 120)), pack((150, 170), seed=1)


class Contexts:
    """Stands in for megatron-core's fp8 contexts.

    Attributes:
        layers: Of the contexts that were entered, -1 for one around all.
        depth: How many contexts are entered now.
    """

    def __init__(self):
        self.layers, self.depth = [], 0

    @contextmanager
    def __call__(self, config, layer_no=-1, is_init=False):
        self.layers.append(layer_no)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth and torch.is_grad_enabled():
                FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


class Copy:
    """A quantized weight."""

    def __init__(self, weight):
        self.values, self._quantizer = torch.empty_like(weight), SimpleNamespace(set_usage=self._use)
        self.usages = []

    def _use(self, **usage):
        self.usages.append(usage)

    def update_usage(self, **usage):
        self.usages.append(usage)

    def quantize(self, weight, unchanged):
        rounded = (weight.detach() * 32).round() / 32
        self.values.copy_(rounded if unchanged is None else torch.where(unchanged == 1, self.values, rounded))


class QuantizingLinear(nn.Module):
    """A linear layer that keeps a quantized copy of its weight as Transformer Engine's do.

    Attributes:
        ends_backward: Whether its backward updates delayed scales, as that of the first such module does.
    """

    __module__ = "transformer_engine.pytorch.module.linear"
    ends_backward = False

    def __init__(self, weight, contexts):
        super().__init__()
        self.weight, self._contexts = weight, contexts
        self.is_first_microbatch = True
        self._fp8_workspaces = {}
        state = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(1, 3), make_quantizers=lambda: [object()])
        self.fp8_meta, self.quantizers = {"scaling_fwd": state}, {"scaling_fwd": state.make_quantizers()}

    def forward(self, hidden):
        weight = self.weight
        if self._contexts.depth:
            self.fp8_meta["scaling_fwd"].amax_history[0] += 1
            weight = weight + (self._copy().values - weight).detach()
        self.is_first_microbatch = False
        product = functional.linear(hidden, weight)
        if self.ends_backward and product.requires_grad:
            product.register_hook(lambda unused: FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False))
        return product, None

    def _update_weight_quantizers(self):
        """See `TransformerEngineBaseModule`: only parameters in fp8 have any."""

    def _copy(self):
        unchanged = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor
        copy = self._fp8_workspaces.get("weight")
        if copy is None:
            copy = self._fp8_workspaces["weight"] = Copy(self.weight)
            copy.quantize(self.weight, None)
        elif unchanged is not None or self.is_first_microbatch:
            copy.quantize(self.weight, unchanged)
        return copy


@pytest.fixture
def contexts(monkeypatch):
    made = Contexts()
    monkeypatch.setattr(fp8_utils, "get_fp8_context", made)
    monkeypatch.setattr(transformer_block, "get_fp8_context", made)
    return made


@pytest.fixture
def updates(monkeypatch):
    """The updates of delayed scales, in their order."""
    made = []
    monkeypatch.setattr(
        FP8GlobalStateManager,
        "reduce_and_update_fp8_tensors",
        lambda forward=True: made.append("forward" if forward else "backward"),
    )
    return made


def quantizing_model(contexts, recipe="tensorwise", **config):
    model = new_model(**config)
    model.config.fp8, model.config.fp8_recipe = "hybrid", recipe
    for layer in model.decoder.layers:
        for name in ("linear_fc1", "linear_fc2"):
            setattr(layer.mlp, name, QuantizingLinear(getattr(layer.mlp, name).weight, contexts))
    return model


def products(model):
    return [module for module in model.modules() if isinstance(module, QuantizingLinear)]


def update(parameter, gradient):
    parameter -= 0.01 * gradient


def trained(model, run, update=update):
    """Train three steps of two microbatches; returns losses and gradients of each, as plain tensors."""
    found = []
    for _ in range(3):
        model.set_is_first_microbatch()
        for microbatch in (FULL, OTHER):
            losses, gradients = run(microbatch)
            assert {type(gradient) for gradient in gradients} == {torch.Tensor}
            found.append([losses, *gradients])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                update(parameter, gradient)
    return found


def trained_on_graphs(model, modules, turn, update=update):
    """Return the same of a model on graphs: all microbatches replay ("replays"), or every other one is eager."""
    numbers = count(int(turn == "replay-first"))
    with graphs_on(model, FULL, cuda_graph_modules=modules) as graphs:

        def run(microbatch):
            stays_eager = turn != "replays" and next(numbers) % 2 == 0
            return eager(model, graphs, microbatch) if stays_eager else losses_and_gradients(model, microbatch)

        found = trained(model, run, update)
        assert replayed(graphs) == len(graphs._regions) * (6 if turn == "replays" else 3), graphs.statistics().fallbacks
    return found


def copies(model):
    return [module._fp8_workspaces["weight"].values.clone() for module in products(model)]


@pytest.mark.parametrize(
    "modules, turn", [([], "replays"), ([], "eager-first"), (["mlp"], "replay-first"), (["attn", "mlp"], "replays")]
)
def test_steps_equal_eager(contexts, modules, turn):
    """Weights change between steps; within one, eager and replays read what the first microbatch quantized."""
    plain, model = quantizing_model(contexts), quantizing_model(contexts)
    expected = trained(plain, lambda microbatch: losses_and_gradients(plain, microbatch))
    torch.testing.assert_close(trained_on_graphs(model, modules, turn), expected)
    torch.testing.assert_close(copies(model), copies(plain))


def test_a_capture_quantizes_nothing(contexts):
    model = quantizing_model(contexts)
    with graphs_on(model, FULL, capture=False) as graphs:
        model(**FULL)
        model.set_is_first_microbatch()
        before = copies(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        assert graphs.capture()
        assert all(module.is_first_microbatch for module in products(model))
        assert all(map(torch.equal, copies(model), before))


def test_without_transposes_that_are_kept_every_microbatch_quantizes(contexts):
    """Where upstream passes no word of the microbatch, no flag is read."""
    model = quantizing_model(contexts)
    model.config.disable_parameter_transpose_cache = True
    seen = []
    for module in products(model):
        module.register_forward_hook(
            lambda *unused: seen.append(FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor)
        )
    weights = fp8.QuantizedWeights(lambda: [model.decoder], model.config)
    with weights.recorded(torch.ones(1)):
        model(**FULL)
    assert seen and set(map(type, seen)) == {type(None)}


def test_scales_that_lie_elsewhere_run_eager(contexts, updates, caplog):
    """A checkpoint with another length of histories gives modules others, which eager and the updates use from then."""
    model = quantizing_model(contexts, "delayed")
    with graphs_on(model, FULL) as graphs:
        losses_and_gradients(model, FULL)
        kept = products(model)[1].quantizers["scaling_fwd"]
        longer_histories(products(model)[1])
        for _ in range(2):
            losses_and_gradients(model, FULL)
        assert replayed(graphs) == 1 and graphs.statistics().fallbacks == {"model_changed": 2}
        assert caplog.text.count("microbatches run eager until they are back") == 1
        products(model)[1].quantizers["scaling_fwd"] = kept
        losses_and_gradients(model, FULL)
        assert replayed(graphs) == 2


def longer_histories(module):
    TransformerEngineBaseModule.adjust_amax_history_length(module, 4, fwd=True)


@pytest.mark.parametrize(
    "recipe, change, said",
    [
        ("delayed", longer_histories, "scales lie elsewhere"),
        ("tensorwise", lambda module: module._fp8_workspaces.clear(), "other quantized copies"),
    ],
)
def test_what_earlier_recordings_read_must_be_there(contexts, recipe, change, said):
    model = quantizing_model(contexts, recipe)
    weights = fp8.QuantizedWeights(lambda: [model.decoder], model.config)
    with weights.recorded(torch.zeros(1)):
        model(**FULL)
    assert not weights.replaced
    change(products(model)[0])
    assert weights.replaced
    with pytest.raises(CaptureError, match=said), weights.recorded(torch.zeros(1)):
        model(**FULL)


def test_first_microbatches_of_all_recorded_states_count(contexts):
    """A module may give way to another and come back."""
    model = quantizing_model(contexts)
    weights, layer = fp8.QuantizedWeights(lambda: [model.decoder], model.config), model.decoder.layers[0].mlp
    first = layer.linear_fc1
    for module in (first, QuantizingLinear(first.weight, contexts)):
        layer.linear_fc1 = module
        with weights.recorded(torch.zeros(1)):
            model(**FULL)
    assert not weights.changed()
    layer.linear_fc1, first.is_first_microbatch = first, True
    assert weights.changed() and not first.is_first_microbatch


def test_copies_that_come_during_a_capture_are_refused(contexts, monkeypatch):
    model = quantizing_model(contexts)
    weights = fp8.QuantizedWeights(lambda: [model.decoder], model.config)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="not quantized for this mode"), weights.recorded(torch.zeros(1)):
        model(**FULL)
    with weights.recorded(torch.zeros(1)):
        model(**FULL)
    assert not weights.replaced


def test_delayed_scales_are_updated_after_replays_alone(contexts, updates):
    model = quantizing_model(contexts, "delayed")
    products(model)[0].ends_backward = True
    with graphs_on(model, FULL, capture=False) as graphs:
        model(**FULL)
        updates.clear()
        histories = [module.fp8_meta["scaling_fwd"].amax_history.clone() for module in products(model)]
        assert graphs.capture() and not updates
        for module, history in zip(products(model), histories, strict=True):
            assert torch.equal(module.fp8_meta["scaling_fwd"].amax_history, history)
        losses_and_gradients(model, FULL)
        assert updates == ["forward", "backward"]
        updates.clear()
        with torch.no_grad():
            model(**FULL)
        assert not updates and replayed(graphs) == 1, graphs.statistics()


def test_scales_are_reduced_in_one_order_whoever_replays(contexts, updates):
    """Ranks reduce together what scales come from, each of them eager or on graphs: microbatches are in flight."""
    model = quantizing_model(contexts, "delayed")
    products(model)[0].ends_backward = True

    def in_flight(microbatches, around):
        updates.clear()
        losses = []
        for number, microbatch in enumerate(microbatches):
            with around(number):
                losses.append(model(**microbatch).sum())
        for loss in losses:
            loss.backward()
        return list(updates)

    eager_order = in_flight((FULL, OTHER, FULL), lambda number: nullcontext())
    assert eager_order == ["forward"] * 3 + ["backward"] * 3
    with graphs_on(model, FULL, num_microbatches=3, cuda_graph_packed_slots=3) as graphs:
        for replayed_ones in ((0, 1, 2), (0, 2), (1,)):
            before = replayed(graphs)
            assert eager_order == in_flight(
                (FULL, OTHER, FULL),
                lambda number, ones=replayed_ones: nullcontext() if number in ones else graphs.paused(),
            )
            assert replayed(graphs) - before == len(replayed_ones), graphs.statistics()


def test_fp8_around_the_layers_runs_eager(contexts, monkeypatch):
    model = new_model()
    with graphs_on(model, FULL) as graphs:
        monkeypatch.setattr(FP8GlobalStateManager.quantization_state, "fp8_enabled", True)
        losses_and_gradients(model, FULL)
        assert graphs.statistics().fallbacks == {"autocast_changed": 1}


def test_fp8_that_is_switched_on_after_capture_is_refused(contexts):
    model = quantizing_model(contexts)
    model.config.fp8 = None
    with graphs_on(model, FULL):
        model.config.fp8 = "hybrid"
        losses_and_gradients(model, FULL)
        with pytest.raises(CaptureError, match="fp8 was switched on after capture"):
            losses_and_gradients(model, FULL)


def test_buckets_have_rows_that_products_take(contexts):
    model = quantizing_model(contexts)
    with (
        pytest.raises(OptionError, match="a multiple of 16, as fp8 needs on every rank"),
        graphs_on(model, cuda_graph_packed_buckets=[328]),
    ):
        pass
