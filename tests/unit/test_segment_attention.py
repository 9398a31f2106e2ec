"""Attention over packed segments: what is bound to cuDNN's plans, and padding. Kernels by Triton's interpreter."""

import pytest
import torch

from tests.scripts import computed

SCRIPT = """
from tests.segment_plans import use_reference_plans

use_reference_plans()
from bridge_cg_plugin.vision.kernels.padding import clear_padding
from bridge_cg_plugin.vision.kernels.cudnn_attention import (
    lie_interleaved, locate_segments, plans_for, segment_attention
)

empty, found = torch.empty, []
# What nothing wrote is seen.
torch.empty = lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan)
for case in cases:
    parts = [part.detach().requires_grad_() for part in case["mixed"].unbind(2)]
    located = locate_segments(case["offsets"], *parts[0].shape[1:])
    plans = plans_for(parts[0], case["offsets"].shape[0] - 1, case["largest"], case["scale"])
    out = segment_attention(*parts, located, plans)
    gradients = torch.autograd.grad(out, parts, case["gradient"])
    cleared = torch.full_like(case["gradient"], 7.0)
    clear_padding(cleared, case["offsets"])
    found.append({
        "out": out.detach(), "gradients": [g.clone() for g in gradients], "interleaved": lie_interleaved(*gradients),
        "cleared": cleared,
    })
torch.empty = empty
"""
# Segments, how many places for segments, rows: no padding, padding inside and over whole tiles, no segment at all.
LAYOUTS = {
    "full": ([5, 11], 2, 16),
    "padded": ([5, 11, 3], 4, 40),
    "padding from a tile's edge": ([16, 16], 2, 80),
    "one": ([7], 1, 8),
    "none": ([], 3, 20),
}


def make_case(lengths, segments, rows, heads=3, width=8):
    generator = torch.Generator().manual_seed(rows)
    mixed = torch.randn(rows, heads, 3, width, generator=generator).bfloat16()
    gradient = torch.randn(rows, heads, width, generator=generator).bfloat16()
    ends = torch.tensor([0, *lengths, *[0] * (segments - len(lengths))]).cumsum(0)
    return {
        "mixed": mixed,
        "gradient": gradient,
        "offsets": ends.to(torch.int32),
        "largest": max(lengths, default=1),
        "scale": width**-0.5,
    }


def expected(case, lengths):
    """Differentiate dense attention of every segment in fp32."""
    parts = [part.float().requires_grad_() for part in case["mixed"].unbind(2)]
    pieces, start = [], 0
    for length in lengths:
        query, key, value = (part[start : start + length].transpose(0, 1) for part in parts)
        weights = (query @ key.mT * case["scale"]).softmax(-1)
        pieces.append((weights @ value).transpose(0, 1))
        start += length
    pieces.append(torch.zeros_like(case["gradient"][start:], dtype=torch.float32))
    out = torch.cat(pieces)
    if not lengths:
        return out, [torch.zeros_like(part) for part in parts]
    return out.detach(), torch.autograd.grad(out, parts, case["gradient"].float())


def test_segments_attend_to_themselves_and_rows_behind_them_are_zero():
    cases = {name: make_case(*layout) for name, layout in LAYOUTS.items()}
    for (name, case), found in zip(cases.items(), computed(SCRIPT, list(cases.values())), strict=True):
        out, gradients = expected(case, LAYOUTS[name][0])
        for a, b in zip([found["out"], *found["gradients"]], [out, *gradients], strict=True):
            torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=2e-2)
        used = int(case["offsets"][-1])
        for x in (found["out"], *found["gradients"], found["cleared"]):
            assert not x[used:].count_nonzero()
        assert (found["cleared"][:used] == 7).all()
        assert found["interleaved"], "gradients lie as the projection's output"


def test_only_one_tensor_taken_apart_is_interleaved():
    pytest.importorskip("triton")
    from bridge_cg_plugin.vision.kernels.cudnn_attention import lie_interleaved

    query, key, value = torch.zeros(6, 2, 3, 8).unbind(2)
    assert lie_interleaved(query, key, value)
    assert not lie_interleaved(key, query, value)
    assert not lie_interleaved(query, key, value.clone())
    assert not lie_interleaved(*torch.zeros(6, 3, 2, 8).unbind(1))
    assert not lie_interleaved(query[:, :, :4], key[:, :, :4], value[:, :, :4])
