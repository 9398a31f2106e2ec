"""Which values a command line may give a field, by the field's annotation."""

from dataclasses import dataclass
from typing import Literal, Optional

import pytest

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks.overrides import check_value, check_word


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

    config = Config(Train())
    for word in ("train.steps=7", "+train.steps=7", "~train.steps"):
        check_word(config, word)
    with pytest.raises(OptionError, match="train.steps='x'"):
        check_word(config, "++train.steps=x")
