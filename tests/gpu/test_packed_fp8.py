"""Packed documents in fp8 on real graphs: steps of several microbatches against eager, to the bit.

Weights are quantized once a step, and delayed scales follow every microbatch: what a microbatch gives depends on those
before it. So two models with equal weights train side by side, one eager on the buckets' rows, one on graphs.
"""

from contextlib import nullcontext

import pytest
import torch
from megatron.core import fp8_utils

from tests.models import language_model as lm
from tests.models import packed_parity as parity
from tests.models.tower import MainGrads

from .packs import BUCKETS, MAX_SEQS, assert_same, graphs_on, rows_of

pytestmark = pytest.mark.usefixtures("tower_module", "deterministic_algorithms")
SIZES = lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072)
STEPS, MICROBATCHES = 4, 3
LENGTHS = ((500, 300, 208), (1024,), (20, 900, 400, 120), (64, 64, 128, 704), (1500, 548))
RATE = 1e-2
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
HISTORY = {**DELAYED, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
IN_FP8 = {"fp8_param": True}
OFFLOADING, RECOMPUTING = {"cuda_graph_packed_offload": "all"}, {"cuda_graph_packed_recompute": "all"}
# Model, and how it is on graphs. Blocks have 128 tokens, products take a multiple of 16.
CASES = {
    "tensorwise-hybrid": (TENSORWISE, {}),
    "tensorwise-first-last-bf16": ({**TENSORWISE, "first_last_layers_bf16": True}, {}),
    "tensorwise-parameters": (TENSORWISE | IN_FP8, {}),
    "tensorwise-attn": (TENSORWISE, {"modules": ("attn",)}),
    "tensorwise-offloaded": (TENSORWISE, OFFLOADING),
    "tensorwise-recomputed": (TENSORWISE, RECOMPUTING),
    "delayed-history": (HISTORY, {}),
    "delayed-parameters-transposed-by-the-next-forward": ({**DELAYED, **IN_FP8, "transposed": False}, {}),
    "blockwise-rows-inside-a-block": (BLOCKWISE, {"buckets": [1040, 2064]}),
    "blockwise-parameters": (BLOCKWISE | IN_FP8, {}),
    "blockwise-offloaded": (BLOCKWISE, OFFLOADING),
}


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


def side_by_side(config, around_replays, modules=(), buckets=BUCKETS, evaluated=None, **options):
    """Train eager, and from equal weights on graphs; returns steps of both, names of parameters, and what was replayed.

    Args:
        config: Fields of the model's configuration.
        around_replays: Returns for the captured graphs what a microbatch runs in.
        modules: Parts of layers to capture.
        buckets: Their tokens.
        evaluated: Whether a validation step comes before each step, "eager" or on "graphs".
        options: Graph options.
    """
    expected = eager_steps(config, modules, buckets, evaluated)
    training = Training(**config)
    options["cuda_graph_packed_buckets"] = buckets
    with graphs_on(training.model, lm.make_pack((500, 300, 224)), modules=modules, **options) as graphs:
        around = around_replays(graphs)
        evaluation = {"eager": at_rows(graphs, buckets), "graphs": around}.get(evaluated)
        steps = trained_steps(training, around, evaluation)
        statistics = graphs.statistics()
    return expected, steps, training.names, statistics


def eager_steps(config, modules, buckets, evaluated):
    """Train eager on the rows of buckets; only where parts of layers have these are there graphs, which say so."""
    training = Training(**config)
    options = {"cuda_graph_max_packed_seqs": MAX_SEQS, "cuda_graph_packed_buckets": buckets, "modules": modules}
    helper = lm.new_helper(training.model, lm.make_pack((500, 300, 224)), capture=bool(modules), **options)
    try:
        around = at_rows(helper.graphs, buckets)
        return trained_steps(training, around, around if evaluated else None)
    finally:
        helper.delete_cuda_graphs()
        reset()


def trained_steps(training, around, evaluation):
    """Return the results and the scales of each step, which an evaluation may come before."""
    steps = []
    for _ in range(STEPS):
        if evaluation is not None:
            training.evaluate(evaluation)
        steps.append((training.step(around), training.scales()))
    return steps


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


@pytest.mark.parametrize(
    "config, options",
    [pytest.param(*case, id=name, marks=[pytest.mark.first] * (not case[1])) for name, case in CASES.items()],
)
def test_steps_equal_eager(config, options):
    eager, graphs, names, statistics = side_by_side(config, replayed, **options)
    regions = SIZES.layers if "modules" in options else 1
    assert statistics.replays == STEPS * MICROBATCHES * regions and not statistics.fallbacks, statistics
    assert (statistics.pinned_bytes > 0) == (options is OFFLOADING)
    assert_steps_same(eager, graphs, names)


@pytest.mark.parametrize(
    "config, first_is_eager", [(TENSORWISE, True), (DELAYED, False)], ids=["tensorwise", "delayed"]
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


@pytest.mark.parametrize("config, evaluated", [(TENSORWISE, "graphs"), (DELAYED, "eager")])
def test_steps_after_evaluation_equal_eager(config, evaluated):
    """A pass without gradients writes the copies that a step's backward reads, which must stay where they are."""
    eager, found, names, statistics = side_by_side(config, replayed, evaluated=evaluated)
    assert statistics.replays == STEPS * (MICROBATCHES + (evaluated == "graphs")), statistics
    assert_steps_same(eager, found, names)


def test_accumulation_inside_products_is_as_near():
    """Sums keep what a product gives in fp32, where eager rounds it to bf16 first."""
    tuning = {"cuda_graph_packed_gradient_accumulation_fusion": True}
    eager, graphs, _, statistics = side_by_side(TENSORWISE, replayed, **tuning)
    assert statistics.replays == STEPS * MICROBATCHES, statistics
    (losses, gradients), (other_losses, others) = eager[0][0], graphs[0][0]
    assert torch.equal(losses, other_losses)
    far = [((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in zip(others, gradients, strict=True)]
    assert max(far) < torch.finfo(torch.bfloat16).eps, max(far)
