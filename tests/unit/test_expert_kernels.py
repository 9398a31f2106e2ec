"""Kernels of experts in Triton's interpreter, against the products that the reference executor takes."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from bridge_cg_plugin.language.experts.device import Tables
from bridge_cg_plugin.language.experts.linear import add_weight_gradients, combine, multiply, new_weight_gradients
from bridge_cg_plugin.language.experts.rows import find_rows
from tests.scripts import compiled, computed

# Tokens, of them real, experts, experts of a token, width of the input and of the output.
CASES = ((24, 24, 4, 2, 32, 64), (40, 29, 5, 3, 48, 40))
IDS = [f"{tokens}_tokens_{experts}_experts" for tokens, _, experts, *_ in CASES]
# The interpreter takes seconds for a case.
COMPUTED = tuple(zip(CASES, (torch.float32, torch.bfloat16), strict=True))

SCRIPT = """
from bridge_cg_plugin.language.experts import kernels
from bridge_cg_plugin.language.experts.linear import Tables, table_of_slices

kernels.tiling_of = kernels.tiling_of_gradients = lambda *unused: kernels.tiling(16, 32, 16, 4, 2)
found = []
for case in cases:
    tokens, bounds, x, gradient = case["tokens"], case["bounds"], case["x"], case["gradient"]
    tables = Tables()
    weights, sums = [w.clone() for w in case["weights"]], [s.clone() for s in case["sums"]]
    shape, table = weights[0].shape, tables.of(weights)
    made = torch.full((len(weights), *shape), torch.nan, dtype=x.dtype)
    rows_in = kernels.multiply(x, tokens, table, shape, bounds, False)
    rows_out = kernels.multiply(gradient, None, table, shape, bounds, True)
    kernels.weight_gradients(gradient, None, x, tokens, bounds, tables.of(sums), True)
    kernels.weight_gradients(gradient, None, x, tokens, bounds, table_of_slices(made), False)
    swapped = torch.full((len(weights), shape[1], shape[0]), torch.nan, dtype=x.dtype)
    kernels.weight_gradients(x, tokens, gradient, None, bounds, table_of_slices(swapped), False)
    combined = kernels.combine(rows_out, case["places"], x.dtype)
    wide = kernels.combine(rows_out, case["places"], torch.float32)
    kernels.MOST_COLUMNS = 16  # several blocks a row
    inner, weights = case["inner"], case["probabilities"]
    out = kernels.swiglu(inner, weights, bounds)
    of_inner, of_weights = kernels.swiglu_backward(out, inner, weights, bounds)
    top_k = case["places"].shape[1]
    routing = case["routing_map"], case["used"], top_k
    rows = kernels.find_rows(*routing, case["routing_map"].shape[0] * top_k)
    kernels.HELD, held = 64, kernels.HELD  # several blocks
    again = kernels.find_rows(*routing, case["routing_map"].shape[0] * top_k)
    kernels.HELD = held
    found.append({"rows": rows, "again": again, "few": kernels.find_rows(*routing, 11)})
    products = {"in": rows_in, "out": rows_out, "sums": sums, "made": made, "swapped": swapped, "combined": combined}
    products["wide"] = wide
    found[-1].update(products | {"swiglu": out, "of_inner": of_inner, "of_weights": of_weights})
"""


def make_case(sizes, dtype):
    tokens, used, experts, top_k, width, out = sizes
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, 1] = -1.0  # an expert that no token goes to, unless it must
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, scores.topk(top_k).indices, True)
    rows = find_rows(routing_map, torch.tensor([used], dtype=torch.int32), top_k)
    # Weights lie apart, as parameters do, the later ones not behind the earlier.
    weights = [torch.randn(out, width, generator=generator).to(dtype) for _ in range(experts)][::-1]
    gradient = torch.randn(tokens * top_k, out, generator=generator).to(dtype)
    gradient[rows.bounds[-1] :] = torch.nan
    inner = torch.randn(tokens * top_k, 2 * out, generator=generator).to(dtype)
    inner[rows.bounds[-1] :] = torch.nan
    return {
        **dataclasses.asdict(rows),
        "routing_map": routing_map,
        "used": torch.tensor([used], dtype=torch.int32),
        "inner": inner,
        "probabilities": torch.rand(tokens * top_k, generator=generator),
        "x": torch.randn(tokens, width, generator=generator).to(dtype),
        "weights": weights,
        "gradient": gradient,
        "sums": [torch.randn(out, width, generator=generator) for _ in range(experts)],
    }


@pytest.fixture(scope="module")
def results():
    cases = [make_case(sizes, dtype) for sizes, dtype in COMPUTED]
    return list(zip(cases, computed(SCRIPT, cases), strict=True))


@pytest.fixture(params=range(len(CASES)), ids=IDS)
def case(request, results):
    return results[request.param]


def assert_near(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    distance = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-3)
    # The interpreter cuts off where a GPU rounds to bfloat16.
    assert distance <= (2e-6 if found.dtype is torch.float32 else 8e-3), distance


def plain(given):
    """Return the case's inputs of the products, with what is summed in fp32."""
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in given.items()
        if torch.is_tensor(value)
    }


def test_rows_times_their_experts_weight(case):
    given, found = case
    whole = plain(given)
    weights = [weight.float() for weight in given["weights"]]
    used = given["bounds"][-1]
    rows_in = multiply(whole["x"], given["tokens"], weights, given["bounds"], Tables(), transposed=False)
    rows_out = multiply(whole["gradient"], None, weights, given["bounds"], Tables(), transposed=True)
    assert_near(found["in"][:used], rows_in[:used].to(given["x"].dtype))
    assert_near(found["out"][:used], rows_out[:used].to(given["x"].dtype))


def test_weight_gradients(case):
    given, found = case
    whole = plain(given)
    sides = (whole["gradient"], None, whole["x"], given["tokens"], given["bounds"])
    expected = torch.stack(new_weight_gradients(*sides))
    assert_near(found["made"], expected.to(given["x"].dtype))
    assert_near(found["swapped"], expected.transpose(1, 2).to(given["x"].dtype))
    sums = [each.clone() for each in given["sums"]]
    add_weight_gradients(*sides, Tables(), sums)
    for expert, (right, before) in enumerate(zip(sums, given["sums"], strict=True)):
        assert_near(found["sums"][expert], right)
        if given["bounds"][expert] == given["bounds"][expert + 1]:
            assert torch.equal(found["sums"][expert], before)


def test_sums_by_token(case):
    given, found = case
    kind = found["out"].dtype
    expected = combine(found["out"], given["places"], kind)
    assert_near(found["combined"], expected)
    assert torch.equal(found["combined"], expected) or kind is torch.bfloat16
    assert torch.equal(found["wide"], combine(found["out"], given["places"], torch.float32))


def test_swiglu_and_its_gradients(case):
    given, found = case
    used = given["bounds"][-1]
    inner = given["inner"][:used].float().requires_grad_()
    probabilities = given["probabilities"][:used].clone().requires_grad_()
    gate, linear = inner.chunk(2, dim=-1)
    out = functional.silu(gate) * linear * probabilities[:, None]
    of_inner, of_weights = torch.autograd.grad(out, [inner, probabilities], found["swiglu"][:used].float())
    assert_near(found["swiglu"][:used], out.detach().to(given["inner"].dtype))
    assert_near(found["of_inner"][:used], of_inner.to(given["inner"].dtype))
    assert_near(found["of_weights"][:used], of_weights)


@pytest.mark.parametrize("name", ["rows", "again"])
def test_rows(case, name):
    given, found = case
    used = given["bounds"][-1]
    bounds, tokens, entries, places, rows_of = found[name]
    assert torch.equal(bounds, given["bounds"]) and torch.equal(rows_of, given["rows_of"])
    assert torch.equal(places, given["places"])
    assert torch.equal(tokens[:used], given["tokens"][:used]) and torch.equal(entries, given["entries"])


def test_rows_that_have_no_room(case):
    given, found = case
    bounds, *rows = found["few"]
    overflow = torch.zeros(1, dtype=torch.int32)
    expected = find_rows(given["routing_map"], given["used"], given["places"].shape[1], 11, overflow)
    assert torch.equal(bounds, given["bounds"]) and overflow.item()
    assert all(map(torch.equal, rows, (expected.tokens, expected.entries, expected.places, expected.rows_of)))


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bridge_cg_plugin.language.experts import kernels

pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16") | {"tokens_ptr": "*i32", "bounds_ptr": "*i32"}
given = {**pointers, "distances_ptr": "*i64", "experts": "i32", "columns": "i32", "depth": "i32"}
order = kernels._multiply.arg_names
for transposed in (False, True):
    constants = {"GATHERED": True, "TRANSPOSED": transposed, "VECTOR": 8, "WHOLE": True, "PRECISION": "tf32"}
    constants |= {"EXPERTS": 32, "ROWS": 128, "COLUMNS": 128, "DEPTH": 64}
    signature = {name: given.get(name, "constexpr") for name in order}
    multiples = {(order.index(name),): [["tt.divisibility", 16]] for name in given}
    source = ASTSource(fn=kernels._multiply, signature=signature, constexprs=constants, attrs=multiples)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 4})
    print(made.metadata.shared, "wgmma" in made.asm["ptx"])
"""


def test_both_sides_of_a_product_are_loaded_ahead(tmp_path):
    """The compiler must see that weights, found by a distance in a table, may be loaded in whole vectors."""
    written = compiled(COMPILED, tmp_path)
    bytes_ahead = 4 * (128 + 128) * 64 * 2
    assert written.splitlines()[-2:] == [f"{bytes_ahead} True"] * 2
