"""Packed documents in fp8 on real graphs: steps of several microbatches against eager, to the bit.

Weights are quantized once a step, and delayed scales follow every microbatch: what a microbatch gives depends on those
before it. So two models with equal weights train side by side, one eager on the buckets' rows, one on graphs.
"""

from contextlib import nullcontext

import pytest
import torch
from megatron.core import fp8_utils

from bridge_cg_plugin.graphs.errors import CaptureError
from tests.models import language_model as lm
from tests.models import packed_parity as parity
from tests.models.tower import MainGrads

from .packs import BUCKETS, MAX_SEQS, assert_same, graphs_on, rows_of

LEAST_BYTES = 65536

SIZES = lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072)
STEPS, MICROBATCHES = 4, 3
LENGTHS = ((500, 300, 208), (1024,), (20, 900, 400, 120), (64, 64, 128, 704), (1500, 548))
RATE = 1e-2
RECIPES = [
    pytest.param({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, id="tensorwise-hybrid", marks=pytest.mark.first),
    pytest.param({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, id="tensorwise-e4m3"),
    pytest.param(
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}, id="tensorwise-first-last-bf16"
    ),
    pytest.param({"fp8": "hybrid", "fp8_recipe": "delayed"}, id="delayed"),
    pytest.param(
        {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
        id="delayed-history",
    ),
    pytest.param({"fp8": "e4m3", "fp8_recipe": "blockwise"}, id="blockwise"),
    pytest.param({"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True}, id="tensorwise-parameters"),
    pytest.param({"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param": True}, id="delayed-parameters"),
    pytest.param({"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}, id="blockwise-parameters"),
]
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
IN_FP8 = {**TENSORWISE, "fp8_param": True}
OFFLOADING = {"cuda_graph_packed_offload": "all"}


@pytest.fixture(autouse=True)
def deterministic_algorithms(tower_module):
    with parity.deterministic():
        yield


@pytest.fixture(autouse=True)
def scales_of_one_test():
    """Transformer Engine keeps the scales of all models of a process in one list, and updates them together."""
    reset()
    yield
    reset()


class Training:
    """A model that trains by plain gradient descent, microbatches marked as Bridge's schedule does.

    Parameters in fp8 get values of fp32 ones by megatron-core's functions for its optimizer and its data parallelism.

    Args:
        transposed: Whether data parallelism transposes parameters in fp8, or leaves it to the next forward.
        config: Fields of the model's configuration.
    """

    def __init__(self, transposed=True, **config):
        self.model = lm.build_model(SIZES, **config)
        self._transposed = transposed
        with torch.no_grad():
            in_fp8 = filter(fp8_utils.is_float8tensor, self.model.parameters())
            self._masters = {weight: weight.dequantize().float().flatten() for weight in in_fp8}
        self.grads = MainGrads(self.model)
        self.names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self._packs = [lm.make_pack(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
        self._next = 0

    def step(self, around=lambda number, pack: nullcontext()):
        """Train a step; returns losses of its microbatches and its gradients.

        Args:
            around: Returns what a microbatch runs in, by its number in the step and its pack.
        """
        self.grads.zero()
        self.model.set_is_first_microbatch()
        losses = []
        for number in range(MICROBATCHES):
            pack = self._packs[self._next % len(self._packs)]
            self._next += 1
            with around(number, pack):
                losses.append(lm.step(self.model, pack))
        gradients = self.grads.copy()
        self._descend(gradients)
        return torch.cat(losses, 1), gradients

    @torch.no_grad()
    def evaluate(self, around):
        """Evaluate a pack as a validation step does, in what a microbatch runs in."""
        self.model.eval()
        self.model.set_is_first_microbatch()
        with around(0, self._packs[0]):
            self.model(**self._packs[0].arguments)
        self.model.train()

    @torch.no_grad()
    def _descend(self, gradients):
        for parameter, gradient in zip(self._trained(), gradients, strict=True):
            if parameter in self._masters:
                self._masters[parameter] -= RATE * gradient.flatten()
            else:
                parameter -= RATE * gradient.to(parameter.dtype)
        weights, masters = list(self._masters), list(self._masters.values())
        fp8_utils.quantize_param_shard(weights, masters, [0] * len(weights), torch.distributed.group.WORLD)
        if self._transposed:
            fp8_utils.post_all_gather_processing(weights)
        else:
            for weight in weights:
                weight._reset_caches()

    def _trained(self):
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def scales(self):
        """Return the scales and histories that delayed scaling keeps."""
        states = [
            meta[key]
            for module in self.model.modules()
            if (meta := vars(module).get("fp8_meta"))
            for key in ("scaling_fwd", "scaling_bwd")
            if key in meta
        ]
        held = (getattr(state, name, None) for state in states for name in ("scale", "amax_history"))
        return [tensor.clone() for tensor in held if isinstance(tensor, torch.Tensor)]


def at_rows(graphs, buckets=BUCKETS):
    """Return what lets a microbatch run eager on its bucket's rows."""
    return lambda number, pack: parity.eager_at(graphs, rows_of(pack, buckets))


def side_by_side(config, around_replays, modules=(), buckets=BUCKETS, **options):
    """Train eager, and from equal weights on graphs; returns steps of both, names of parameters, and what was replayed.

    Args:
        config: Fields of the model's configuration.
        around_replays: Returns for the captured graphs what a microbatch runs in.
        modules: Parts of layers to capture.
        buckets: Their tokens.
        options: Graph options.
    """
    expected = eager_steps(config, modules, buckets)
    training = Training(**config)
    options["cuda_graph_packed_buckets"] = buckets
    with graphs_on(training.model, lm.make_pack((500, 300, 224)), modules=modules, **options) as graphs:
        around = around_replays(graphs)
        steps = [(training.step(around), training.scales()) for _ in range(STEPS)]
        statistics = graphs.statistics()
    return expected, steps, training.names, statistics


def eager_steps(config, modules, buckets):
    """Train eager on the rows of buckets; only where parts of layers have these are there graphs, which say so."""
    training = Training(**config)
    options = {"cuda_graph_max_packed_seqs": MAX_SEQS, "cuda_graph_packed_buckets": buckets, "modules": modules}
    helper = lm.new_helper(training.model, lm.make_pack((500, 300, 224)), capture=bool(modules), **options)
    try:
        around = at_rows(helper.graphs, buckets)
        return [(training.step(around), training.scales()) for _ in range(STEPS)]
    finally:
        helper.delete_cuda_graphs()
        reset()


def reset():
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    torch.cuda.empty_cache()


def assert_steps_same(expected, found, names):
    for number, ((eager, scales), (replayed, others)) in enumerate(zip(expected, found, strict=True)):
        assert_same(replayed, [eager], names, f"step {number}")
        assert len(scales) == len(others)
        assert all(map(torch.equal, scales, others)), f"step {number}: scales differ"


def replayed(graphs):
    return lambda number, pack: nullcontext()


@pytest.mark.parametrize("config", RECIPES)
def test_steps_equal_eager(config):
    eager, graphs, names, statistics = side_by_side(config, replayed)
    assert statistics.replays == STEPS * MICROBATCHES and not statistics.fallbacks, statistics
    assert_steps_same(eager, graphs, names)


def test_rows_that_end_inside_a_block():
    """Blocks have 128 tokens, products take a multiple of 16."""
    eager, graphs, names, statistics = side_by_side(BLOCKWISE, replayed, buckets=[1040, 2064])
    assert statistics.replays == STEPS * MICROBATCHES and not statistics.fallbacks, statistics
    assert_steps_same(eager, graphs, names)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_parameters_that_the_next_forward_transposes(recipe):
    config = {**IN_FP8, "fp8_recipe": recipe, "transposed": False}
    eager, graphs, names, statistics = side_by_side(config, replayed)
    assert statistics.replays == STEPS * MICROBATCHES and not statistics.fallbacks, statistics
    assert_steps_same(eager, graphs, names)


@pytest.mark.parametrize(
    "config", [TENSORWISE, DELAYED, BLOCKWISE, IN_FP8], ids=["tensorwise", "delayed", "blockwise", "parameters"]
)
def test_quantized_activations_leave_the_device(config):
    eager, graphs, names, statistics = side_by_side(config, replayed, **OFFLOADING)
    assert statistics.replays == STEPS * MICROBATCHES and not statistics.fallbacks, statistics
    assert statistics.pinned_bytes > 0
    assert_steps_same(eager, graphs, names)


def test_what_can_be_recomputed_is():
    eager, graphs, names, statistics = side_by_side(TENSORWISE, replayed, cuda_graph_packed_recompute="all")
    assert statistics.replays == STEPS * MICROBATCHES and not statistics.fallbacks, statistics
    assert_steps_same(eager, graphs, names)


@pytest.mark.parametrize(
    "config, first_is_eager",
    [(TENSORWISE, True), (DELAYED, False), (BLOCKWISE, True), (IN_FP8, False)],
    ids=["tensorwise", "delayed", "blockwise", "parameters"],
)
def test_eager_and_replays_alternate_in_a_step(config, first_is_eager):
    """Both read the copies of weights that a step's first microbatch quantized, whichever that was."""

    def mixed(graphs):
        return lambda number, pack: (
            parity.eager_at(graphs, rows_of(pack)) if (number % 2 == 0) == first_is_eager else nullcontext()
        )

    eager, found, names, statistics = side_by_side(config, mixed)
    assert 0 < statistics.replays < STEPS * MICROBATCHES, statistics
    assert_steps_same(eager, found, names)


@pytest.mark.parametrize("config, modules", [(TENSORWISE, ("attn",)), (IN_FP8, ("mlp",))], ids=["attn", "mlp"])
def test_parts_of_layers(config, modules):
    eager, graphs, names, statistics = side_by_side(config, replayed, modules)
    assert statistics.replays == STEPS * MICROBATCHES * SIZES.layers, statistics
    assert_steps_same(eager, graphs, names)


def test_only_a_first_microbatch_quantizes_weights():
    """A later one reads what is there, even where weights have changed since."""
    training = Training(**TENSORWISE)
    pack = lm.make_pack((500, 300, 224))
    with graphs_on(training.model, pack) as graphs, torch.no_grad():
        training.model.eval()
        training.model.set_is_first_microbatch()
        first = training.model(**pack.arguments).clone()
        layer = training.model.get_submodule("decoder.layers.0.mlp.linear_fc1")
        layer.weight.data.mul_(1.5)
        again = training.model(**pack.arguments).clone()
        training.model.set_is_first_microbatch()
        quantized = training.model(**pack.arguments).clone()
        assert graphs.statistics().replays == 3, graphs.statistics().fallbacks
    assert torch.equal(first, again) and not torch.equal(first, quantized)


def with_evaluation(config, on_graphs, evaluates_eager):
    """Train with a validation step before each step; returns steps, names of parameters, and what was replayed."""
    training = Training(**config)
    options = {"cuda_graph_max_packed_seqs": MAX_SEQS, "cuda_graph_packed_buckets": BUCKETS}
    helper = lm.new_helper(training.model, lm.make_pack((500, 300, 224)), capture=on_graphs, **options)
    around = replayed(helper.graphs) if on_graphs else at_rows(helper.graphs)
    steps = []
    try:
        for _ in range(STEPS):
            training.evaluate(at_rows(helper.graphs) if evaluates_eager else around)
            steps.append((training.step(around), training.scales()))
        return steps, training.names, helper.graphs.statistics()
    finally:
        helper.delete_cuda_graphs()
        reset()


@pytest.mark.parametrize(
    "config, evaluates_eager",
    [(TENSORWISE, False), (DELAYED, True), (BLOCKWISE, False)],
    ids=["tensorwise", "delayed", "blockwise"],
)
def test_steps_after_evaluation_equal_eager(config, evaluates_eager):
    """A pass without gradients writes the copies that a step's backward reads, which must stay where they are."""
    expected, _, _ = with_evaluation(config, False, True)
    found, names, statistics = with_evaluation(config, True, evaluates_eager)
    assert statistics.replays == STEPS * (MICROBATCHES + (not evaluates_eager)), statistics
    assert_steps_same(expected, found, names)


def test_fp8_around_the_model_runs_eager():
    from transformer_engine.pytorch import fp8_autocast

    training = Training()
    pack = lm.make_pack((500, 300, 224))
    with graphs_on(training.model, pack) as graphs:
        with fp8_autocast(enabled=True):
            lm.step(training.model, pack)
        assert graphs.statistics().fallbacks == {"autocast_changed": 1}, graphs.statistics()


def test_fp8_that_is_switched_on_after_capture_is_refused():
    training = Training()
    pack = lm.make_pack((500, 300, 224))
    with graphs_on(training.model, pack):
        training.model.config.fp8, training.model.config.fp8_recipe = "hybrid", "tensorwise"
        lm.step(training.model, pack)
        with pytest.raises(CaptureError, match="fp8 was switched on after capture"):
            lm.step(training.model, pack)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_accumulation_inside_products_is_as_near(recipe):
    """Sums keep what a product gives in fp32, where eager rounds it to bf16 first."""
    tuning = {"cuda_graph_packed_tuning": {"gradient_accumulation_fusion": True}}
    eager, graphs, _, statistics = side_by_side({"fp8": "hybrid", "fp8_recipe": recipe}, replayed, **tuning)
    assert statistics.replays == STEPS * MICROBATCHES, statistics
    (losses, gradients), (other_losses, others) = eager[0][0], graphs[0][0]
    assert torch.equal(losses, other_losses)
    far = [((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in zip(others, gradients, strict=True)]
    assert max(far) < torch.finfo(torch.bfloat16).eps, max(far)
