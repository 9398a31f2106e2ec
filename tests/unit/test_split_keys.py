"""Attention in short segments as PyTorch computes it in each alone: how often it splits keys, what the kernel computes.

That the bits are PyTorch's is for a GPU: `gpu/test_tower_attention.py`.
"""

import json

import pytest

from bridge_cg_plugin.vision.kernels.key_parts import block_of, parts_by_length, parts_of
from tests.scripts import interpreted

H200 = 132
# Heads and the size of one: Qwen3-Omni, GLM-4.5V.
NARROW, WIDE = (16, 72), (12, 128)


@pytest.mark.parametrize(
    ("length", "parts"),
    [(64, 1), (128, 1), (130, 2), (256, 2), (260, 3), (390, 2), (512, 2), (600, 3), (700, 3), (769, 1), (1024, 1)],
)
def test_parts_that_a_gpu_showed(length, parts):
    assert parts_of(length, *NARROW, H200) == parts


@pytest.mark.parametrize("heads", [NARROW, WIDE, (16, 64), (4, 256)], ids=str)
@pytest.mark.parametrize("processors", [78, 108, 132, 148])
def test_no_part_is_empty_and_none_is_missing(heads, processors):
    found = parts_by_length(*heads, processors)
    assert found == [1] or found[-1] > found[0] == 1
    for length, parts in enumerate(found):
        blocks = -(-length // block_of(heads[1]))
        assert parts == 1 or (parts - 1) * -(-blocks // parts) < blocks, length
    assert {parts_of(length, *heads, processors) for length in range(len(found), 4 * len(found))} == {1}


SCRIPT = """
import json
import torch
from tests.interpreted import prepare

prepare()
from bridge_cg_plugin.vision.kernels import split_keys
from bridge_cg_plugin.vision.kernels.packed_attention import _masked

heads, width, rows = 2, 16, 700
lengths = [300, 20, 257, 0, 90]
found = [1] * 301
for length, parts in ((300, 2), (257, 2), (90, 1)):
    found[length] = parts
split_keys._parts = lambda *kind: (torch.tensor(found, dtype=torch.int32), 3)
generator = torch.Generator().manual_seed(5)
query, key = (torch.randn(rows, heads, width, generator=generator).to(DTYPE) for _ in range(2))
value = torch.randn(rows, 3, heads, width, generator=generator).to(DTYPE)[:, 2]
offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
out, logsumexp = torch.full((rows, heads, width), 7.0, dtype=DTYPE), torch.full((heads, rows), 7.0)
split_keys.split_keys(query, key, value, out, logsumexp, offsets, 400, 0.25)
exact = _masked(query.float(), key.float(), value.float(), offsets, 0.25)
scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * 0.25
split = torch.zeros(rows, dtype=torch.bool)
worst = {"out": 0.0, "logsumexp": 0.0}
for start, length in ((0, 300), (320, 257)):
    at = slice(start, start + length)
    split[at] = True
    worst["out"] = max(worst["out"], float((out[at].float() - exact[at]).abs().max()))
    expected = scores[:, at, at].logsumexp(2)
    worst["logsumexp"] = max(worst["logsumexp"], float((logsumexp[:, at] - expected).abs().max()))
kept = bool((out[~split] == 7).all() and (logsumexp[:, ~split] == 7).all())
print(json.dumps({**worst, "kept": kept}))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_split_segments_are_attention_and_others_stay(dtype):
    pytest.importorskip("triton")
    found = json.loads(interpreted(SCRIPT.replace("DTYPE", f"torch.{dtype}")).splitlines()[-1])
    assert found["kept"]
    assert found["out"] < 1e-2 and found["logsumexp"] < 1e-5
