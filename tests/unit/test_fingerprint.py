import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.vision.kernels import fingerprint as module
from bridge_cg_plugin.vision.kernels.fingerprint import fingerprint
from tests.scripts import interpreted

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def draw(*shape, seed=0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=5), st.data())
def test_every_bit_of_every_tensor_counts(sizes, data):
    tensors = [draw(size, seed=seed, dtype=dtype) for seed, (size, dtype) in enumerate(sizes)]
    found = fingerprint(tensors)
    assert fingerprint([each.clone() for each in tensors]) == found
    filled = [index for index, each in enumerate(tensors) if each.numel()]
    if filled:
        changed = [each.clone() for each in tensors]
        flat = changed[data.draw(st.sampled_from(filled))].view(torch.uint8)
        flat[data.draw(st.integers(0, flat.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert fingerprint(changed) != found


def test_the_order_of_values_and_of_tensors_counts():
    a, b = draw(7), draw(7, seed=1)
    assert len({fingerprint(each) for each in ([a, b], [b, a], [a], [b], [torch.cat([a, b])], [a.flip(0), b])}) == 6


def test_what_the_memory_looks_like_does_not_count():
    a = draw(6, 8)
    assert fingerprint([a.t().contiguous().t()]) == fingerprint([a])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [7, 8])
def test_a_tensor_may_begin_inside_a_word(dtype, size):
    """As a parameter behind one of odd size in a flat buffer."""
    a = draw(1 + size, dtype=dtype)
    assert fingerprint([a[1:]]) == fingerprint([a[1:].clone()])


def test_parts_of_a_long_tensor_are_at_their_places(monkeypatch):
    a = draw(1000)
    whole = fingerprint([a])
    monkeypatch.setattr(module, "CHUNK", 64)
    assert fingerprint([a]) == whole


def test_it_is_splitmix64s_finalizer():
    def mixed(word, place, seed):
        value = ((place * module.STEP + seed) ^ word) % 2**64
        value = (value ^ value >> 30) * module.FIRST % 2**64
        value = (value ^ value >> 27) * module.SECOND % 2**64
        return value ^ value >> 31

    words = [3, 2**32 - 5]
    expected = (sum(mixed(w - (w >> 31 << 32), place, s) for place, w in enumerate(words)) for s in module.SEEDS)
    tensor = torch.tensor([3, -5], dtype=torch.int32)
    assert fingerprint([tensor]) == tuple(module.signed(total % 2**64) for total in expected)


KERNEL = """
from tests import interpreted

interpreted.prepare()
import torch

from bridge_cg_plugin.vision.kernels.fingerprint import Piece, add, add_by_kernel

tensors = [torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).int() for count in (1, 4096, 9001, 2048)]
places = [12345678901, 0, 77, 2**40]
sums = [torch.tensor([5, -7]) for _ in range(2)]
for words, place in zip(tensors, places):
    add(sums[0], words, place)
add_by_kernel(sums[1], [Piece(words.data_ptr(), len(words), place) for words, place in zip(tensors, places)])
assert sums[0].tolist() == sums[1].tolist()
print("same")
"""


def test_the_kernel_computes_the_same():
    assert interpreted(KERNEL).endswith("same\n")
