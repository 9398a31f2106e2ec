"""Rows of experts from a routing map, and linear layers of experts, against loops over tokens and experts."""

import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.language.experts.device import Tables
from bridge_cg_plugin.language.experts.linear import combine_linear, dispatch_linear
from bridge_cg_plugin.language.experts.rows import find_rows, row_weights


@st.composite
def routings(draw):
    """Return a routing map `[tokens, experts]`, how many tokens are real, and experts of a token."""
    experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(experts, 4)))
    tokens = draw(st.integers(1, 12))
    taken = st.sets(st.integers(0, experts - 1), min_size=top_k, max_size=top_k)
    # Few experts for all tokens leave others empty.
    chosen = draw(st.lists(taken, min_size=tokens, max_size=tokens)) if draw(st.booleans()) else [draw(taken)] * tokens
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
    for token, numbers in enumerate(chosen):
        routing_map[token, list(numbers)] = True
    return routing_map, draw(st.integers(0, tokens)), top_k


def found_rows(routing):
    routing_map, used, top_k = routing
    return find_rows(routing_map, torch.tensor([used], dtype=torch.int32), top_k)


@given(routings())
def test_rows_are_sorted_by_expert_then_token(routing):
    routing_map, used, top_k = routing
    rows = found_rows(routing)
    pairs = [(e, t) for e in range(routing_map.shape[1]) for t in range(used) if routing_map[t, e]]
    count = len(pairs)
    assert rows.tokens.shape == (routing_map.shape[0] * top_k,) == rows.entries.shape
    assert rows.tokens[:count].tolist() == [t for _, t in pairs]
    assert rows.entries[:count].tolist() == [t * routing_map.shape[1] + e for e, t in pairs]
    assert rows.bounds.tolist() == [sum(e < expert for e, _ in pairs) for expert in range(routing_map.shape[1] + 1)]
    numbers = {pair: row for row, pair in enumerate(pairs)}
    for token in range(routing_map.shape[0]):
        of_token = [numbers.get((e, token), -1) for e in range(routing_map.shape[1])]
        assert rows.rows_of[token].tolist() == of_token
        its = [row for row in of_token if row >= 0]
        assert rows.places[token].tolist() == [*its, *[-1] * (top_k - len(its))]


@given(routings(), st.integers(1, 50))
def test_rows_without_room_are_left_out_and_counted(routing, room):
    routing_map, used, top_k = routing
    whole, overflow = found_rows(routing), torch.zeros(1, dtype=torch.int32)
    rows = find_rows(routing_map, torch.tensor([used], dtype=torch.int32), top_k, room, overflow)
    needed, there = int(whole.bounds[-1]), min(room, routing_map.shape[0] * top_k)
    assert overflow.tolist() == [needed > room]
    assert rows.tokens.shape == rows.entries.shape == (there,)
    assert torch.equal(rows.bounds, whole.bounds.clamp(max=there))
    assert torch.equal(rows.tokens[:needed], whole.tokens[:there][:needed])
    assert torch.equal(rows.entries[:needed], whole.entries[:there][:needed])
    assert torch.equal(rows.rows_of, torch.where(whole.rows_of < there, whole.rows_of, -1))
    assert torch.equal(rows.places, torch.where(whole.places < there, whole.places, -1))


@settings(max_examples=40)
@given(routings(), st.booleans())
def test_experts_and_their_gradients_are_those_of_a_loop(routing, accumulated):
    routing_map, used, top_k = routing
    tokens, experts = routing_map.shape
    rows = found_rows(routing)
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, probabilities = leaf(tokens, 6), leaf(tokens, experts)
    first = [torch.nn.Parameter(leaf(8, 6).detach()) for _ in range(experts)]
    second = [torch.nn.Parameter(leaf(5, 8).detach()) for _ in range(experts)]
    tables = Tables()
    inner = dispatch_linear(x, rows, first, tables)
    inner = inner.tanh() * row_weights(probabilities, rows)[:, None]
    out = combine_linear(inner, rows, second, tables)
    expected = torch.zeros(tokens, 5, dtype=torch.float64)
    for token in range(used):
        for expert in routing_map[token].nonzero().flatten().tolist():
            scaled = (first[expert] @ x[token]).tanh() * probabilities[token, expert]
            expected[token] = expected[token] + second[expert] @ scaled
    torch.testing.assert_close(out, expected)
    if not used:
        return
    leaves = [x, probabilities, *first, *second]
    weights = torch.randn(tokens, 5, generator=generator, dtype=torch.float64)
    right = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    right = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(right, leaves, strict=True)]
    for weight in (*first, *second) if accumulated else ():
        weight.main_grad = torch.ones_like(weight)
    found = list(torch.autograd.grad((out * weights).sum(), leaves))
    if accumulated:
        assert all(weight.grad_added_to_main_grad for weight in (*first, *second))
        found[2:] = [weight.main_grad - 1 for weight in (*first, *second)]
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_tables_keep_no_tensor_and_one_set_of_distances_wherever_the_tensors_lie():
    tables, whole = Tables(), torch.zeros(4, 3)
    first = tables.of(whole.unbind())
    moved = whole.clone()
    second = tables.of(moved.unbind())
    assert first[1] is second[1] and second[0].data_ptr() == moved.data_ptr()
    kept = weakref.ref(moved.untyped_storage())
    del moved, second
    assert kept() is None
