"""Flags, fields and options that have gone, as people write them on a command line or in a recipe."""

import argparse
from dataclasses import dataclass
from typing import Literal, Optional

import pytest

from bridge_cg_plugin.cli.checks import refuse_flags
from bridge_cg_plugin.options import OptionError, normalize
from bridge_cg_plugin.options.flags import (
    FLAGS,
    add_flags,
    given_flags,
    take_flags,
)
from bridge_cg_plugin.options.sources import FIELDS
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


def test_an_unknown_flag_names_the_nearest():
    with pytest.raises(OptionError, match="Did you mean --vision_cuda_graph_impl"):
        refuse_flags(["--vision-cuda-graph-imp=x"], parse())


def test_flags_are_taken_from_a_command_line():
    found, rest = take_flags(
        ["--vision-cuda-graph-slots", "2", "train.train_iters=5", "--vision_cuda_graph_kernels=exact"]
    )
    assert normalize(found)[0].vision.slots == 2 and rest == ["train.train_iters=5"]


def test_a_word_under_a_misspelt_section_is_refused():
    with pytest.raises(OptionError, match="no such section"):
        normalize(["vision_cuda_graph_tunning.slots=2"])


@pytest.mark.parametrize("written", [["model.vision_cuda_graph_tuning.slots=2"], {"vision_cuda_graph_tuning.slots": 2}])
def test_a_section_that_looks_like_an_option_is_refused(written):
    with pytest.raises(OptionError, match="no such section"):
        normalize(written)


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
