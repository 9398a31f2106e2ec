"""Flags, fields and options, also those that have gone, as people write them on a command line or in a recipe."""

import argparse
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Literal, Optional

import numpy
import pytest

from bridge_cg_plugin.cli.checks import refuse_flags
from bridge_cg_plugin.options import (
    OFFLOAD_MODULES,
    PROVIDER_FIELDS,
    OptionError,
    graph_options,
    normalize,
    vision_options,
)
from bridge_cg_plugin.options.declaration import GONE
from bridge_cg_plugin.options.flags import FLAGS, add_flags, given_flags, take_flags
from bridge_cg_plugin.options.sources import FIELDS
from bridge_cg_plugin.upstream.environment import check_process
from bridge_cg_plugin.upstream.hooks.overrides import check_value, check_word


def parse(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", default=1)
    add_flags(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda f: f.flags[0])
def test_both_spellings_set_the_field(flag):
    assert flag.field in FIELDS
    found = [given_flags(parse(spelling, "attn_norm")) for spelling in flag.spellings]
    assert all(one == found[0] and one[flag.field] == "attn_norm" for one in found)
    assert {flag.flags[0], flag.flags[0].replace("_", "-")} <= {s.removeprefix("--") for s in flag.spellings}


def test_a_word_under_a_misspelt_section_is_refused():
    with pytest.raises(OptionError, match="no such section"):
        normalize(["vision_cuda_graph_tunning.slots=2"])


@pytest.mark.parametrize("flag", ["--vision_cuda_graph_tuning", "--vision-cuda-graph-tuning=slots=2"])
def test_a_flag_that_has_gone_is_refused_before_another_program_reads_it(flag):
    for read in (take_flags, lambda words: refuse_flags(words, parse())):
        with pytest.raises(OptionError, match="Cannot use vision_cuda_graph_tuning='.*': the option has gone"):
            read([flag, "slots=2"])


@pytest.mark.parametrize(
    "annotation, held, text",
    [
        (int, 4, "8"),
        (int | None, None, "null"),
        (int, 4, "${train.train_iters}"),
        (int, 0.02, "0.5"),  # upstream's annotation is wrong, as the value shows
        (int, [1, 2], "[3]"),
        (float, 1.0, "1e-5"),
        (bool, True, "False"),
        (int | str, 1, "auto"),
        ("torch.dtype", None, "bf16"),
        (Literal["full"], "full", "some"),
    ],
)
def test_values_that_are_set(annotation, held, text):
    check_value("section.field", annotation, held, text)


@pytest.mark.parametrize(
    "annotation, held, text, allowed",
    [
        (int, 4, "foo", "a whole number"),
        (int, 4, "1.5", "a whole number"),
        (int | None, None, "true", "a whole number"),
        (Optional[int], None, "true", "a whole number"),  # noqa: UP045
        ("typing.Optional[bool]", None, "1.5", "true or false"),
        (int | float, None, "[1]", "a number or a whole number"),
        (bool, True, "maybe", "true or false"),
    ],
)
def test_values_that_are_refused(annotation, held, text, allowed):
    with pytest.raises(OptionError) as refused:
        check_value("section.field", annotation, held, text)
    assert str(refused.value) == f"Cannot use section.field={text!r}: it must be {allowed}. Correct the value."


def test_words_of_a_configuration_are_checked():
    @dataclass
    class Train:
        steps: int = 5

    @dataclass
    class Config:
        train: Train
        model: Train

    config = Config(Train(), Train())
    for word in ("train.steps=7", "+train.steps=7", "~train.steps"):
        check_word(config, word)
    with pytest.raises(OptionError, match="train.steps='x'"):
        check_word(config, "++train.steps=x")
    for place in ("", "model.", "++model."):
        with pytest.raises(OptionError, match="vision_cuda_graph_tuning.slots='2': the option has gone"):
            check_word(config, f"{place}vision_cuda_graph_tuning.slots=2")


def nested(name, value):
    *path, field = ("model", *name.split("."))
    found = {field: value}
    for section in reversed(path):
        found = {section: found}
    return found


def on_an_object(name, value):
    found = nested(name, value)["model"]
    return SimpleNamespace(**found)


SPELLINGS = {
    "word": lambda name, value: [f"model.{name}={value}"],
    "flag": lambda name, value: [f"--{name}={value}"],
    "mapping": nested,
    "object": on_an_object,
}


@pytest.mark.parametrize("name", GONE)
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_value_of_an_option_that_has_gone_is_refused_in_one_line(name, spelling):
    with pytest.raises(OptionError) as caught:
        graph_options(spelling(name, 0.1))
    said = str(caught.value)
    assert caught.value.field == name and "has gone" in said and GONE[name] in said and "\n" not in said


@pytest.mark.parametrize("name", GONE)
@pytest.mark.parametrize("spelling", [nested, on_an_object])
def test_a_field_that_holds_nothing_is_let_pass(name, spelling):
    assert graph_options(spelling(name, None)) == graph_options({})


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


REFUSED = {
    "vision_cuda_graph_impl": ["local", True],
    "vision_cuda_graph_scope": [["attn", "router"], Scope.full_iteration],
    "max_vision_cuda_graph_seq_length": [0, True, 66, 64.5],
    "vision_cuda_graph_buckets": ["[]", 64, [64, 64], [64, 66], [0, 64], [64, None], "automatic"],
    "vision_cuda_graph_slots": [-1, numpy.array([2, 4])],
    "vision_cuda_graph_kernels": [3],
    "vision_cuda_graph_offload": ["all,mlp"],
    "vision_cuda_graph_recompute": [True],
    "vision_cuda_graph_strict": ["maybe"],
    "cuda_graph_impl": ["cuda", True],
    "cuda_graph_modules": ["none", "full,attn", ["attn", None]],
    "inference_cuda_graph_scope": ["model"],
    "enable_cuda_graph": ["perhaps"],
    "cuda_graph_max_packed_seqs": ["many"],
    "cuda_graph_packed_buckets": [[0, 64]],
    "cuda_graph_packed_slots": [-1],
}


@pytest.mark.parametrize("field, value", [(field, value) for field, values in REFUSED.items() for value in values])
def test_refused_values_name_their_field(field, value):
    with pytest.raises(OptionError) as caught:
        graph_options({"vision_cuda_graph_impl": "transformer_engine", field: value})
    assert caught.value.field == field
    assert f"{field}=" in str(caught.value) and "it must be" in str(caught.value)


def test_a_bucket_above_the_largest_length():
    with pytest.raises(OptionError, match="at most max_vision_cuda_graph_seq_length=128") as caught:
        read(impl="transformer_engine", buckets=[64, 256], max_seq_length=128)
    assert caught.value.field == "vision_cuda_graph_buckets"
    assert read(impl="transformer_engine", buckets=[64, 128], max_seq_length=128).buckets == (64, 128)


def test_capacities_follow_the_merge_unit():
    assert read(9, impl="transformer_engine", buckets=[9, 18]).buckets == (9, 18)
    with pytest.raises(OptionError, match="a multiple of 9"):
        read(9, impl="transformer_engine", buckets=[64])


def test_a_variable_that_has_gone_is_named_once(monkeypatch, caplog):
    monkeypatch.setenv("BRIDGE_CG_WATCHDOG_MINUTES", "10")
    check_process()
    check_process()
    assert caplog.text.count("BRIDGE_CG_WATCHDOG_MINUTES has gone") == 1
