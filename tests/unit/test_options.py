"""Options of vision graphs, of every spelling."""

from enum import Enum
from types import SimpleNamespace

import numpy
import pytest

from bridge_cg_plugin.options import OFFLOAD_MODULES, PROVIDER_FIELDS, OptionError, normalize, vision_options


class Scope(Enum):
    attn = 1
    mlp = 2
    full = 3
    full_iteration = 4


class Implementation(Enum):
    none = 1
    transformer_engine = 2
    local = 3


def read(merge_unit=4, **options):
    fields = {PROVIDER_FIELDS[name]: value for name, value in options.items()}
    found = vision_options(SimpleNamespace(**fields), merge_unit)
    assert vision_options(fields, merge_unit) == found
    return found


# Spellings of each kind of value.
ACCEPTED = [
    ("impl", " Transformer_Engine ", "transformer_engine"),
    ("impl", Implementation.transformer_engine, "transformer_engine"),
    ("impl", "CudaGraphImpl.none", "none"),
    ("scope", ["full"], ()),
    ("scope", "ATTN, mlp", ("attn", "mlp")),
    ("scope", ["mlp", "attn", "mlp"], ("mlp", "attn")),
    ("scope", [Scope.attn, "CudaGraphScope.mlp"], ("attn", "mlp")),
    ("max_seq_length", "4096", 4096),
    ("buckets", " auto ", "auto"),
    ("buckets", ["64", 128], (64, 128)),
    ("buckets", "[64, 128]", (64, 128)),
    ("slots", "auto", "auto"),
    ("slots", "3", 3),
    ("exact_below", 0, 0),
    ("kernels", "fast", "fast"),
    ("offload", "all", OFFLOAD_MODULES),
    ("offload", "none", ()),
    ("recompute", "[gelu, layernorm]", ("gelu", "layernorm")),
    ("strict", "1", True),
]


@pytest.mark.parametrize("option, value, expected", ACCEPTED)
def test_accepted_spellings(option, value, expected):
    found = getattr(read(**{option: value}), option)
    assert found == expected
    assert type(found) is type(expected)


REFUSED = [
    ("impl", "local"),
    ("impl", True),
    ("scope", ["attn", "router"]),
    ("scope", Scope.full_iteration),
    ("max_seq_length", 0),
    ("max_seq_length", True),
    ("max_seq_length", 66),
    ("max_seq_length", 64.5),
    ("buckets", "[]"),
    ("buckets", 64),
    ("buckets", [64, 64]),
    ("buckets", [64, 66]),
    ("buckets", [0, 64]),
    ("buckets", [64, None]),
    ("buckets", "automatic"),
    ("slots", -1),
    ("slots", numpy.array([2, 4])),
    ("kernels", 3),
    ("offload", "all,mlp"),
    ("recompute", True),
    ("strict", "maybe"),
]


@pytest.mark.parametrize("option, value", REFUSED)
def test_refused_values_name_their_field(option, value):
    given_options = {"impl": "transformer_engine", option: value}
    with pytest.raises(OptionError) as caught:
        read(**given_options)
    assert caught.value.field == PROVIDER_FIELDS[option]
    assert f"{PROVIDER_FIELDS[option]}=" in str(caught.value) and "it must be" in str(caught.value)


def test_a_bucket_above_the_largest_length():
    with pytest.raises(OptionError, match="at most max_vision_cuda_graph_seq_length=128") as caught:
        read(impl="transformer_engine", buckets=[64, 256], max_seq_length=128)
    assert caught.value.field == "vision_cuda_graph_buckets"
    assert read(impl="transformer_engine", buckets=[64, 128], max_seq_length=128).buckets == (64, 128)


def test_capacities_follow_the_merge_unit():
    assert read(9, impl="transformer_engine", buckets=[9, 18]).buckets == (9, 18)
    with pytest.raises(OptionError, match="a multiple of 9"):
        read(9, impl="transformer_engine", buckets=[64])


def test_later_values_win_one_by_one():
    recipe = SimpleNamespace(vision_cuda_graph_kernels="exact", vision_cuda_graph_slots=2)
    vision = normalize(recipe, "vision_cuda_graph_slots=4")[0].vision
    assert (vision.kernels, vision.slots) == ("exact", 4)
    vision = normalize(recipe, "vision_cuda_graph_slots=null")[0].vision
    assert (vision.kernels, vision.slots) == ("exact", "auto")
