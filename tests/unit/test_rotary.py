"""The Triton kernel by Triton's interpreter, in a process of its own: the variable counts before Triton's import."""

import pytest
import torch

from tests.scripts import computed

from .towers import new_tower

TOKENS, HEADS, WIDTH = 12, 3, 20
SCRIPT = """
from types import SimpleNamespace
from bridge_cg_plugin.upstream.kernels.rotary import _Rotation, fused_rotary
from bridge_cg_plugin.vision.kernels.rotary import apply_rotary, cos_and_sin, rotate_interleaved, rotate_qkv
from bridge_cg_plugin.vision.kernels.cudnn_attention import lie_interleaved
from tests.unit.towers import draw, new_tower

for case in cases:
    source = case["source"]
    x = source[..., : source.shape[-1] // 3] if case["strided"] else source
    x = x.detach().requires_grad_()
    out = apply_rotary(x, *cos_and_sin(case["angles"]))
    (gradient,) = torch.autograd.grad(out, x, case["gradient"])
    case.update(out=out.detach(), input_gradient=gradient, contiguous=out.is_contiguous())
    rounded = apply_rotary(x, *cos_and_sin(case["angles"]), rounds=True)
    case["rounded"] = rounded.detach(), *torch.autograd.grad(rounded, x, case["gradient"])
    config = SimpleNamespace(apply_rotary_pos_emb_in_fp32=False, rotary_interleaved=False)
    by_batch = lambda tensor: tensor.detach().reshape(-1, 2, *tensor.shape[-2:])
    unpacked = _Rotation(None).rotated(by_batch(x), by_batch(case["angles"]), config)
    packed = _Rotation(None).rotated(x.detach(), case["angles"], config, torch.tensor([0, len(x)]))
    case["shimmed"] = packed, unpacked

calls = []
shim = _Rotation(lambda t, *unused: calls.append(1) or t).rotated
t, angles = torch.randn(4, 2, 8), torch.randn(4, 1, 1, 8)
good = SimpleNamespace(apply_rotary_pos_emb_in_fp32=True, rotary_interleaved=False)
shim(t, angles, good, torch.tensor([0, 4]))
fused = not calls
shim(t, angles, good)
shim(t[:, None], angles, good, torch.tensor([0, 4]))
shim(t, angles[..., :4], good, torch.tensor([0, 4]))
shim(t, angles[:3], good, torch.tensor([0, 4]))
shim(t, angles, SimpleNamespace(apply_rotary_pos_emb_in_fp32=True, rotary_interleaved=True), torch.tensor([0, 4]))

def projected(case, apart):
    source = case["source"]
    tokens, heads, _ = source.shape
    mixed = source.detach().requires_grad_()
    # A copy stands for the projection, whose output is overwritten.
    parts = rotate_qkv(mixed.clone().view(tokens, -1), *cos_and_sin(case["angles"]), heads)
    values = [part.detach().clone() for part in parts]
    gradients = case["gradients"].clone().unbind(2)
    gradients = [g.contiguous() for g in gradients] if apart else gradients
    before = gradients[0].data_ptr()
    (gradient,) = torch.autograd.grad(parts, mixed, gradients)
    return values, gradient, gradient.data_ptr() == before

for case in cases:
    if case["strided"]:
        case["projected"] = [projected(case, apart) for apart in (False, True)]

def interleaved(case, joint, rounds):
    # By part and not by head, as Hugging Face's projections lie; the three apart are strided.
    sources = [part.detach() for part in case["source"].chunk(3, dim=-1)]
    sources = [torch.stack(sources, dim=1)] if joint else sources
    sources = [source.requires_grad_() for source in sources]
    parts = rotate_interleaved(tuple(sources), *cos_and_sin(case["angles"]), rounds)
    gradients = torch.autograd.grad(parts, sources, case["gradients"].clone().unbind(2))
    lie = lie_interleaved(*parts), all(gradient.is_contiguous() for gradient in gradients)
    gradients = gradients[0].unbind(1) if joint else gradients
    return [part.detach().clone() for part in parts], [gradient.clone() for gradient in gradients], lie

for case in cases:
    if case["strided"]:
        case["interleaved"] = {
            f"{joint} {rounds}": interleaved(case, joint, rounds) for joint in (False, True) for rounds in (False, True)
        }

def train(model, kernels):
    model.zero_grad()
    pixels, grid = draw([[1, 4, 4], [1, 4, 6]])
    with kernels:
        hidden, features = model(pixels, grid)
        (hidden.square().mean() + sum(f.square().mean() for f in features)).backward()
    return hidden.detach(), [p.grad for p in model.parameters()]

from contextlib import nullcontext
model = new_tower()
towers = [train(model, nullcontext()), train(model, fused_rotary([model]))]
counted = {"kernel": 0}
from bridge_cg_plugin.vision.kernels import rotary
launch = rotary._launch
def count(*args):
    counted["kernel"] += 1
    launch(*args)
rotary._launch = count
train(model, fused_rotary([model]))
found = {"cases": cases, "fused": fused, "originals": len(calls), "towers": towers, "launches": counted["kernel"]}
"""


def make_case(dtype, strided, large, seed):
    generator = torch.Generator().manual_seed(seed)
    half = torch.rand(TOKENS, WIDTH // 2, generator=generator) * (1000 if large else 6)
    source = torch.randn(TOKENS, HEADS, 3 * WIDTH if strided else WIDTH, generator=generator).to(dtype)
    gradient = torch.randn(TOKENS, HEADS, WIDTH, generator=generator).to(dtype)
    angles = torch.cat((half, half), dim=1)[:, None, None]
    gradients = torch.randn(TOKENS, HEADS, 3, WIDTH, generator=generator).to(dtype)
    return {"source": source, "strided": strided, "gradient": gradient, "gradients": gradients, "angles": angles}


# Type, whether strided, whether positions are far.
CASES = [(torch.float32, True, True), (torch.float32, False, False), (torch.bfloat16, True, False)]


@pytest.fixture(scope="module")
def found():
    return computed(SCRIPT, [make_case(*case, seed) for seed, case in enumerate(CASES)])


@pytest.fixture(params=range(len(CASES)), ids=lambda i: str(CASES[i]))
def case(request, found):
    return found["cases"][request.param]


def as_stored(value, dtype):
    """Convert as Triton's interpreter stores: it cuts bfloat16's lower bits off, where a GPU rounds."""
    if dtype == torch.float32:
        return value
    return (value.detach().view(torch.int32) & -65536).view(torch.float32).to(dtype)


def by_batch(tensor):
    return tensor.reshape(-1, 2, *tensor.shape[-2:])


def taken_part(case):
    source = case["source"]
    return source[..., : source.shape[-1] // 3] if case["strided"] else source


def rotated(x, case, back=False):
    """Rotate in fp32; `back` is the gradient's way."""
    angles = case["angles"][:, 0] * (-1 if back else 1)
    first, second = x.float().chunk(2, dim=-1)
    turned = x.float() * torch.cos(angles) + torch.cat((-second, first), dim=-1) * torch.sin(angles)
    return as_stored(turned, x.dtype)


def rounded(x, case, back=False, tables=lambda table: table):
    """Rotate in fp32, with everything rounded that a kernel would store in the input's type."""
    half = case["angles"][:, 0, :, : WIDTH // 2] * (-1 if back else 1)
    cosines, sines = tables(torch.cos(half)), tables(torch.sin(half))
    first, second = (part * cosines for part in x.float().chunk(2, dim=-1))
    other, another = (part * sines for part in x.float().chunk(2, dim=-1))
    first, second, other, another = (as_stored(t, x.dtype).float() for t in (first, second, other, another))
    return as_stored(torch.cat((first - another, second + other), dim=-1), x.dtype)


def test_forward_and_backward_equal_the_eager_formula_bit_for_bit(case):
    x, gradient = taken_part(case), case["gradient"]
    assert case["out"].dtype == x.dtype and case["contiguous"]
    assert torch.equal(case["out"], rotated(x, case))
    assert torch.equal(case["input_gradient"], rotated(gradient, case, back=True))
    assert torch.equal(case["rounded"][0], rounded(x, case))
    assert torch.equal(case["rounded"][1], rounded(gradient, case, back=True))
    packed, unpacked = case["shimmed"]
    assert torch.equal(packed, rounded(x, case, tables=lambda table: table.to(x.dtype).float()))
    assert torch.equal(unpacked, by_batch(packed))


@pytest.mark.parametrize("index", [i for i, case in enumerate(CASES) if case[0] == torch.float32])
def test_forward_equals_bridges_own_function_bit_for_bit(found, index):
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import apply_rotary_pos_emb_absolute

    case, config = found["cases"][index], new_tower().config
    config.apply_rotary_pos_emb_in_fp32 = True
    offsets = torch.tensor([0, 4, TOKENS], dtype=torch.int32)
    expected = apply_rotary_pos_emb_absolute(taken_part(case), case["angles"], config, offsets)
    assert torch.equal(case["out"], expected)
    unpacked, angles = (by_batch(tensor) for tensor in (taken_part(case), case["angles"]))
    assert torch.equal(case["shimmed"][1], apply_rotary_pos_emb_absolute(unpacked, angles, config))


def test_the_kernel_is_used_where_it_fits_only(found):
    assert found["fused"] and found["originals"] == 5


def test_queries_keys_and_values_of_projections_equal_the_eager_formula_bit_for_bit(case):
    """Of one projection or three, interleaved by part or by head, with gradients interleaved or apart."""
    if not case["strided"]:
        return
    for way, (values, gradients, lie) in case["interleaved"].items():
        turn = rounded if way.endswith("True") else rotated
        assert lie == (True, True)
        for ours, given, back in (
            (values, case["source"].chunk(3, -1), False),
            (gradients, case["gradients"].unbind(2), True),
        ):
            expected = [*(turn(each, case, back) for each in given[:2]), given[2]]
            assert all(map(torch.equal, ours, expected)), way
    for apart, (values, gradient, in_place) in enumerate(case["projected"]):
        query, key, value = case["source"].chunk(3, dim=-1)
        assert all(map(torch.equal, values, (rotated(query, case), rotated(key, case), value)))
        query, key, value = case["gradients"].unbind(2)
        expected = torch.cat((rotated(query, case, back=True), rotated(key, case, back=True), value), dim=-1)
        assert torch.equal(gradient, expected) and in_place is not bool(apart)


def test_a_tower_computes_the_same_with_rotation_at_the_projection(found):
    (hidden, gradients), (rotated_hidden, rotated_gradients) = found["towers"]
    assert torch.equal(rotated_hidden, hidden) and all(map(torch.equal, rotated_gradients, gradients))
    assert found["launches"] == 2 * 3
