"""Sizes share a bucket where eager adds up their matrix products in one order."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.planning.demand import Demand
from bridge_cg_plugin.upstream.encoders.packed_towers import row_products
from bridge_cg_plugin.upstream.encoders.qwen25_vl import QWEN25_VL
from bridge_cg_plugin.vision.alike_sizes import AlikeSizes, RoundedAsEager, RowProduct

from .hugging_face_towers import new_glm45v, new_qwen25, run_qwen25
from .test_demand import Rows, plain_menu
from .towers import assert_close, graphs_on

INNER = 48  # of the product whose order depends on the number of rows
LINEAR = functional.linear


def by_rows(begins):
    """Return a linear layer whose products of `INNER` values differ from one of these numbers of rows to the next."""

    def linear(x, weight, bias=None):
        rows = x.numel() // x.shape[-1]
        if weight.shape[1] != INNER:
            return LINEAR(x, weight, bias)
        factor = 1 + sum(rows >= begin for begin in begins) / 8
        exact = LINEAR(x.double(), factor * weight.double(), None if bias is None else bias.double())
        return exact.to(x.dtype)  # a CPU's own order is not seen

    return linear


@pytest.fixture
def begins(monkeypatch):
    found = [68, 100, 104, 300, 1100]
    monkeypatch.setattr(functional, "linear", by_rows(found))
    return found


def sizes_of(*tokens):
    return AlikeSizes([RowProduct.of(nn.Linear(INNER, 8), each) for each in tokens], unit=4)


def same(begins, one, other):
    return sum(one >= begin for begin in begins) == sum(other >= begin for begin in begins)


def test_the_last_alike_size_is_the_one_before_the_next_order(begins):
    sizes = sizes_of(1)
    for tokens in range(4, 2048, 60):
        for capacity in range(tokens, 2600, 100):
            alike = [size for size in range(tokens, capacity + 1, 4) if same(begins, tokens, size)]
            assert sizes.last(tokens, capacity) == (capacity if same(begins, tokens, capacity) else alike[-1])


@pytest.mark.parametrize("unit", [4, 16])
def test_sizes_are_alike_though_those_between_are_not(monkeypatch, unit):
    """A library may choose a kernel again that it has left: that of the most tiles in a wave."""

    def order(size):
        return size // 96 % 3

    monkeypatch.setattr(functional, "linear", lambda x, *others: LINEAR(x, *others) * (1 + order(len(x))))
    sizes, asked = AlikeSizes([RowProduct.of(nn.Linear(8, 8), 1)], unit), range(unit, 1200, 3 * unit)
    for capacity in [*asked[1::2], *asked[::2]]:
        for tokens in range(unit, capacity, 5 * unit):
            assert sizes.alike(tokens, capacity) == (order(tokens) == order(capacity))
            last = sizes.last(tokens, capacity)
            assert tokens <= last <= capacity and order(last) == order(tokens)
            assert last == capacity or order(last + unit) != order(tokens)


def test_a_row_of_several_tokens_changes_its_order_at_a_multiple(begins):
    assert sizes_of(4).last(4, 1024) == 4 * begins[0] - 4
    assert sizes_of(4, 1).last(4, 1024) == begins[0] - 4


@pytest.fixture
def tried(monkeypatch):
    """Numbers of rows that were multiplied."""
    found = []
    monkeypatch.setattr(functional, "linear", lambda x, *args: found.append(len(x)) or LINEAR(x, *args))
    return found


def planned(seen, sizes):
    """Choose buckets for sizes that were seen."""
    demand = Demand(plain_menu(last_alike=sizes.last, unit=4))
    for size in seen:
        demand.saw(Rows(size))
    demand.begin(len(seen))


def test_many_large_sizes_take_few_products(tried):
    """A look at every size between them took 14,000 here, a minute of an H100 for Qwen2.5-VL."""
    sizes = AlikeSizes([RowProduct.of(nn.Linear(8, 8), 1)], unit=4)
    seen = [40_000 + 404 * number for number in range(60)]
    planned(seen, sizes)
    assert len(tried) < 4 * len(seen)


def test_sizes_that_no_bucket_may_hold_are_not_tried(tried):
    sizes = AlikeSizes([RowProduct.of(nn.Linear(8, 8), 1)], unit=4)
    demand = Demand(plain_menu(last_alike=sizes.last, unit=4), limit=512)
    demand.saw(Rows(20_000))
    assert not demand.begin(3) and demand.missed(Rows(20_000)) is Fallback.TOO_MANY_TOKENS
    assert not tried


def test_nothing_is_tried_inside_a_capture(tried, monkeypatch):
    """Neither random numbers can be drawn there nor results be read on the host."""
    sizes = AlikeSizes([RowProduct.of(nn.Linear(8, 8), 1)], unit=4)
    sizes.last(64, 256)
    del tried[:]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert (sizes.last(64, 256), sizes.last(64, 512), sizes.last(600, 600)) == (256, 256, 600)
    assert not tried
    monkeypatch.undo()
    assert sizes.last(64, 512) == 512


@pytest.fixture
def memory(monkeypatch):
    """How many rows it is enough for, and those that it was not enough for."""
    found, product = SimpleNamespace(rows=1000, lacked=[]), RowProduct.__call__

    def multiplied(self, rows, *others):
        if len(rows) > found.rows:
            found.lacked.append(len(rows))
            raise torch.OutOfMemoryError
        return product(self, rows, *others)

    monkeypatch.setattr(RowProduct, "__call__", multiplied)
    return found


def test_sizes_that_memory_is_not_enough_for_are_not_alike(memory):
    """They are not tried again: who runs out of memory first frees what the allocator keeps."""
    sizes = AlikeSizes([RowProduct.of(nn.Linear(8, 8), 1)], unit=4)
    assert not sizes.alike(512, 2000) and sizes.alike(512, 512) and sizes.alike(600, 900)
    assert not any(sizes.alike(600, tokens) or sizes.alike(tokens, 4000) for tokens in range(2000, 4000, 4))
    assert memory.lacked == [2000]


@pytest.mark.parametrize("value", [0.0, float("nan"), None, "meta"])
def test_orders_do_not_depend_on_what_weights_hold(begins, value):
    """Adapters begin with zeros; a loop may have taken the memory of weights away, or a module that was replaced."""
    layer = nn.Linear(INNER, 8)
    sizes = AlikeSizes([RowProduct.of(layer, 1)], unit=4)
    if value == "meta":
        layer.to(value)
    else:
        for parameter in layer.parameters():
            parameter.untyped_storage().resize_(0) if value is None else parameter.data.fill_(value)
    assert sizes.last(4, 1024) == begins[0] - 4


def test_products_are_those_of_the_modules():
    """GLM-4.5V has convolutions of patches and of embeddings; images of the latter are in channels-last format."""
    model = new_glm45v()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        products = list(row_products(model))
    modules = [each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d | nn.Conv3d)]
    of_embeddings, layers = {model.downsample, *model.merger.modules()}, {*model.blocks.modules()}
    for product, module in zip(products, modules, strict=True):
        assert product == RowProduct.of(module, product.tokens)
        rows, weight, bias = product.operands(3)
        assert weight.stride() == module.weight.stride() and (bias is None) == (module.bias is None)
        assert_close(product(rows, module.weight, module.bias), module(rows).reshape(3, -1), 1e-6)
        assert module not in of_embeddings or product.tokens == 4
        assert module not in layers or product.tokens == 1
    assert list(row_products(model)) == []  # none on a GPU


class Packed(torch.Tensor):
    """A weight that looks as one of bf16, as TorchAO's do."""


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(32, 24, dtype=torch.uint8),  # two values a byte
        torch.zeros(32, 48, dtype=torch.float8_e4m3fn),
        torch.zeros(32, 48, dtype=torch.bfloat16).as_subclass(Packed),
    ],
)
def test_quantized_layers_are_not_tried(monkeypatch, weight):
    model = new_qwen25()
    layer = model.blocks[0].mlp.down_proj
    layer.weight = nn.Parameter(weight, requires_grad=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert not {RowProduct.of(layer, tokens) for tokens in (1, 4)} & {*row_products(model)}


observed = st.lists(st.integers(1, 800).map(lambda n: 4 * n), min_size=1, max_size=40)
orders = st.lists(st.integers(1, 800).map(lambda n: 4 * n), max_size=12, unique=True)


def last_alike_of(begins):
    def last(tokens, capacity):
        return next((begin - 4 for begin in sorted(begins) if tokens < begin <= capacity), capacity)

    return last


@given(observed, orders)
def test_what_is_recorded_on_demand_holds_the_sizes_that_ask_for_it(sizes, begins):
    last = last_alike_of(begins)

    def refuse(shape, bucket):
        return None if last(shape.tokens, bucket.tokens) == bucket.tokens else Fallback.OTHER_ROUNDING

    demand = Demand(plain_menu(refuse=refuse, last_alike=last, unit=4))
    for size in sizes:
        demand.saw(Rows(size))
    assert all(demand.missed(Rows(size)) is Fallback.NOT_CAPTURED_YET for size in sizes)
    for bucket in demand.begin(100):
        assert any(bucket.tokens == last(size, bucket.tokens) for size in sizes if size <= bucket.tokens)


def test_a_bucket_that_rounds_otherwise_is_refused(begins):
    class Program:
        name = "vision_encoder"

        def refuse(self, batch, bucket):
            return Fallback.TOO_MANY_FRAMES if bucket.limits else None

    program = RoundedAsEager(Program(), sizes_of(1).alike, lambda: None)
    assert program.name == "vision_encoder" and isinstance(program, Program)
    assert program.refuse(Rows(64), Bucket(64)) is program.refuse(Rows(104), Bucket(256)) is None
    assert program.refuse(Rows(64), Bucket(256)) is Fallback.OTHER_ROUNDING
    assert program.refuse(Rows(64), Bucket(256, (1,))) is Fallback.TOO_MANY_FRAMES


@contextmanager
def every_product(found=lambda model: [RowProduct.of(model.blocks[0].mlp.down_proj, 1)]):
    """Let Qwen2.5-VL's encoder be tried on a CPU, too."""
    products = QWEN25_VL.products
    object.__setattr__(QWEN25_VL, "products", found)
    try:
        yield
    finally:
        object.__setattr__(QWEN25_VL, "products", products)


ROWS = [[[1, 8, 8]], [[1, 10, 8]], [[1, 8, 12]], [[1, 10, 10]], [[1, 12, 10]], [[1, 16, 16]], [[1, 2, 30], [1, 8, 10]]]
WIDTHS = {"intermediate_size": INNER}


AUTOMATIC = {"buckets": "auto", "kernels": "exact", "strict": False, "max_frames": "auto"}


def warm_up_and_capture(graphs, run):
    """Let `run` ask for all sizes often, then capture."""
    for _ in range(8):
        for rows in ROWS:
            run(graphs.model, rows)
    assert graphs.capture()


def test_an_encoder_rounds_as_eager_at_every_size(begins):
    model = new_qwen25(**WIDTHS)
    expected = [run_qwen25(model, rows)[0] for rows in ROWS]
    with every_product(), graphs_on(model, capture=False, **AUTOMATIC) as graphs:
        warm_up_and_capture(graphs, run_qwen25)
        for _ in range(30):
            with graphs.step():
                for rows, outputs in zip(ROWS, expected, strict=True):
                    assert_close(run_qwen25(model, rows), [outputs], 1e-5)
                    sum(out.sum() for out in run_qwen25(model, rows)).backward()
        found = graphs.statistics()
        assert found.replays > 100
        assert set(found.fallbacks) <= {Fallback.NOT_CAPTURED_YET}


def test_a_new_capture_tries_the_layers_that_there_are_then(begins):
    model, options = new_qwen25(**WIDTHS), {"buckets": "auto", "kernels": "exact"}
    expected = [run_qwen25(model, rows)[0] for rows in ROWS]
    layer, model.blocks[0].mlp.down_proj = model.blocks[0].mlp.down_proj, nn.Linear(INNER, 32)
    tried = [RowProduct.of(nn.Linear(8, 8), 1)]
    with every_product(lambda model: tried), graphs_on(model, capture=False, **options) as graphs:
        for rows in ROWS:
            run_qwen25(model, rows)
        assert graphs.capture()
        model.blocks[0].mlp.down_proj = layer
        tried[:] = [RowProduct.of(layer, 1)]
        assert graphs.capture()
        for rows, outputs in zip(ROWS, expected, strict=True):
            assert_close(run_qwen25(model, rows), [outputs], 1e-5)


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(layer.in_features, INNER), nn.Linear(INNER, 24)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def test_products_of_adapters_that_come_later_are_tried(begins):
    model = new_qwen25(intermediate_size=24)

    def products(model):
        return [RowProduct.of(layer, 1) for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]

    with every_product(products), graphs_on(model, capture=False, **AUTOMATIC) as graphs:
        warm_up_and_capture(graphs, run_qwen25)
        model.blocks[0].mlp.gate_proj = Adapted(model.blocks[0].mlp.gate_proj)
        with graphs.paused():
            expected = [run_qwen25(model, rows)[0] for rows in ROWS]
        for _ in range(20):
            with graphs.step():
                for rows, outputs in zip(ROWS, expected, strict=True):
                    assert_close(run_qwen25(model, rows), [outputs], 1e-5)
        found = graphs.statistics()
        assert found.replays > 50 and set(found.fallbacks) == {Fallback.MODEL_CHANGED, Fallback.NOT_CAPTURED_YET}


@pytest.fixture
def begins_under_autocast(monkeypatch):
    def linear(x, weight, bias=None):
        other = weight.shape[1] == INNER and torch.is_autocast_enabled("cpu") and x.shape[0] >= 100
        return LINEAR(x, weight, bias) * (1 + 99 * other)

    monkeypatch.setattr(functional, "linear", linear)


def run_under_autocast(model, rows):
    with torch.autocast("cpu", torch.bfloat16):
        [outputs] = run_qwen25(model, rows)
    outputs.float().sum().backward()
    return outputs


def test_sizes_get_buckets_by_the_orders_of_the_autocast_of_microbatches(begins_under_autocast):
    """Buckets are chosen between two of them, where there is none."""
    model = new_qwen25(**WIDTHS)
    expected = [run_under_autocast(model, rows) for rows in ROWS]
    with every_product(), graphs_on(model, capture=False, **AUTOMATIC) as graphs:
        warm_up_and_capture(graphs, run_under_autocast)
        for _ in range(30):
            before = graphs.statistics()
            with graphs.step():
                for rows, outputs in zip(ROWS, expected, strict=True):
                    assert_close([run_under_autocast(model, rows)], [outputs], 2e-2)
        assert graphs.statistics().fallbacks == before.fallbacks


def test_an_encoder_runs_on_where_memory_is_not_enough_to_try_sizes(memory):
    model, memory.rows = new_qwen25(**WIDTHS), 0
    expected = [run_qwen25(model, rows)[0] for rows in ROWS]
    with every_product(), graphs_on(model, capture=False, **AUTOMATIC) as graphs:
        for rows in ROWS[::5] * 8:
            run_qwen25(model, rows)
        assert graphs.capture()
        for rows, outputs in zip(ROWS, expected, strict=True):
            assert_close(run_qwen25(model, rows), [outputs], 1e-5)
        found = graphs.statistics()
        assert memory.lacked and found.replays == 2 and set(found.fallbacks) == {Fallback.NOT_CAPTURED_YET}


@pytest.mark.parametrize(
    "options", [{"kernels": "fast", "buckets": "auto"}, {"kernels": "exact", "buckets": (64, 128, 256)}]
)
def test_named_buckets_and_fast_kernels_take_every_size(begins, options):
    model = new_qwen25(**WIDTHS)
    with every_product(), graphs_on(model, capture=False, **options) as graphs:
        for rows in ROWS:
            run_qwen25(model, rows)
        assert graphs.capture()
        run_qwen25(model, ROWS[1])
        assert not graphs.statistics().fallbacks
