"""Times of experts' products: Transformer Engine's grouped linear layers and the plugin's kernels."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.language.experts import kernels
from bridge_cg_plugin.language.experts.kernels import Tiling
from bridge_cg_plugin.language.experts.rows import Rows, find_rows
from bridge_cg_plugin.language.experts.tables import Tables
from scripts.performance.measuring import measure

TOKENS = (2048, 4096, 8192)
EXPERTS, TOP_K, HIDDEN, INNER = 32, 4, 2048, 768
REPEATS = 20
# A product's floating-point operations: two for each row, column and element summed.
LAYERS = {"fc1": (2 * INNER, HIDDEN), "fc2": (HIDDEN, INNER)}
MULTIPLY = (
    Tiling(128, 128, 64, 4, 3),
    Tiling(128, 128, 64, 4, 4),
    Tiling(128, 128, 64, 8, 4),
    Tiling(128, 256, 64, 8, 3),
    Tiling(128, 256, 64, 8, 4),
    Tiling(64, 256, 64, 4, 4),
    Tiling(64, 128, 64, 4, 4),
)
GRADIENTS = (
    Tiling(128, 256, 64, 8, 3),
    Tiling(128, 256, 64, 8, 4),
    Tiling(128, 128, 64, 4, 4),
    Tiling(128, 128, 64, 8, 4),
    Tiling(128, 128, 64, 8, 6),
)


class Layer:
    """One linear layer of all experts, and a batch for it.

    Args:
        name: Of `LAYERS`.
        tokens: Of the batch; their experts are drawn.
    """

    def __init__(self, name: str, tokens: int) -> None:
        generator = torch.Generator("cuda").manual_seed(tokens)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

        self.name, self.shape = name, LAYERS[name]
        self.dispatches = name == "fc1"
        self.rows = _rows(tokens, generator)
        self.weights = [drawn(*self.shape) for _ in range(EXPERTS)]
        self.sums = [torch.zeros(self.shape, device="cuda") for _ in range(EXPERTS)]
        tables = Tables()
        self.table, self.sum_table = tables.of(self.weights), tables.of(self.sums)
        rows = tokens * TOP_K
        self.x = drawn(tokens if self.dispatches else rows, self.shape[1])
        self.gradient = drawn(rows if self.dispatches else tokens, self.shape[0])
        self.operations = 2 * rows * self.shape[0] * self.shape[1]

    @property
    def _tokens(self) -> tuple[Tensor | None, Tensor | None]:
        """Which row of the input, and of the output's gradient, a row is."""
        return (self.rows.tokens, None) if self.dispatches else (None, self.rows.tokens)

    def multiply(self, transposed: bool, tiling: Tiling | None = None) -> Tensor:
        """Run the forward product, or the one that gives the input's gradient."""
        x, tokens = (self.gradient if transposed else self.x), self._tokens[transposed]
        return kernels.multiply(x, tokens, self.table, self.shape, self.rows.bounds, transposed, tiling)

    def weight_gradients(self, tiling: Tiling | None = None) -> None:
        """Add weight gradients to the sums."""
        x_tokens, gradient_tokens = self._tokens
        sides = (self.gradient, gradient_tokens, self.x, x_tokens, self.rows.bounds)
        kernels.weight_gradients(*sides, self.sum_table, True, tiling)

    def products(self) -> dict[str, Callable[[], object]]:
        """Return the three products by name."""
        return {
            "forward": lambda: self.multiply(False),
            "input gradient": lambda: self.multiply(True),
            "weight gradients": self.weight_gradients,
        }


def _rows(tokens: int, generator: torch.Generator) -> Rows:
    scores = torch.rand(tokens, EXPERTS, device="cuda", generator=generator)
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOP_K).indices, True)
    return find_rows(routing_map, torch.tensor([tokens], dtype=torch.int32, device="cuda"), TOP_K)


def busy_ms(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return for how many ms a function keeps the GPU busy, a mean; what the host takes to launch it does not count."""
    run()
    return measure.profile(lambda: [run() for _ in range(repeats)]).busy_ms / repeats


def engines_products(layer: Layer) -> dict[str, Callable[[], object]]:
    """Return Transformer Engine's products by name, given rows that are sorted and a host that knows their counts."""
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    bounds = layer.rows.bounds.tolist()
    splits = [end - first for first, end in pairwise(bounds)]
    rows, (out, width) = bounds[-1], layer.shape
    x = torch.randn(rows, width, device="cuda").bfloat16()
    gradient = torch.randn(rows, out, device="cuda").bfloat16()
    made, made_x = torch.empty_like(gradient), torch.empty_like(x)
    none = [None] * EXPERTS
    dtype = torch.bfloat16

    def forward() -> None:
        general_grouped_gemm(
            layer.weights, list(x.split(splits)), [made], none, dtype, single_output=True, m_splits=splits
        )

    def input_gradient() -> None:
        sides = (layer.weights, list(gradient.split(splits)), [made_x], none, dtype)
        general_grouped_gemm(*sides, single_output=True, layout="NN", m_splits=splits, grad=True)

    def weight_gradients() -> None:
        sides = (list(x.split(splits)), list(gradient.split(splits)), layer.sums, none, dtype)
        general_grouped_gemm(*sides, layout="NT", m_splits=splits, grad=True, accumulate=True)

    return {"forward": forward, "input gradient": input_gradient, "weight gradients": weight_gradients}


def records() -> Iterator[dict[str, Any]]:
    """Measure every product of both layers at every size."""
    for tokens in TOKENS:
        for name in LAYERS:
            layer = Layer(name, tokens)
            engine = engines_products(layer)
            for product, run in layer.products().items():
                eager, ours = busy_ms(engine[product]), busy_ms(run)
                case = f"{name}_{product.replace(' ', '_')}_{tokens}"
                speed = f"{layer.operations / ours / 1e9:.0f} TFLOP/s"
                print(f"{case:30} Transformer Engine {eager:.3f} ms, kernels {ours:.3f} ms, {speed}", flush=True)
                origin = {"tokens": tokens, **provenance(REPEATS, tokens)}
                yield {"case": case, "mode": "eager", "ms": eager, "ratio": 1.0, **origin}
                yield {"case": case, "mode": "plugin", "ms": ours, "ratio": ours / eager, **origin}


def show_tilings(sizes: Sequence[int] = (2048, 8192)) -> None:
    """Print the ms of every tiling for every product of the first layer; one that cannot run is named."""
    for tokens in sizes:
        layer = Layer("fc1", tokens)
        for tiling in MULTIPLY:
            _show(layer, tokens, "forward", tiling, partial(layer.multiply, False, tiling))
            _show(layer, tokens, "input gradient", tiling, partial(layer.multiply, True, tiling))
        for tiling in GRADIENTS:
            _show(layer, tokens, "weight gradients", tiling, partial(layer.weight_gradients, tiling))


def _show(layer: Layer, tokens: int, product: str, tiling: Tiling, run: Callable[[], object]) -> None:
    try:
        ms = busy_ms(run, 5)
    except Exception as error:
        print(f"{layer.name} {tokens} {product}: {tiling}: {str(error).splitlines()[0]}", flush=True)
        return
    print(
        f"{layer.name} {tokens} {product:16} {ms:.3f} ms {layer.operations / ms / 1e9:4.0f} TFLOP/s {tiling}",
        flush=True,
    )
