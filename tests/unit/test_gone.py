"""Options that have gone: whoever still writes one is told so in a line, wherever it is written."""

from types import SimpleNamespace

import pytest

from bridge_cg_plugin.options import OptionError, graph_options
from bridge_cg_plugin.options.declaration import GONE


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
