"""The flags of `bridge-cg train` in docs/recipes.md against the parser."""

import argparse
import re
from pathlib import Path

from bridge_cg_plugin.cli.runs.recipe import build_parser
from bridge_cg_plugin.options.flags import FLAGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
# docs/options.md has the options.
OPTIONS = {spelling for flag in FLAGS for spelling in flag.spellings}


def test_the_page_has_every_flag_that_is_no_option_and_no_other():
    section = PAGE.read_text().partition("## From a command line\n")[2].partition("\n## ")[0]
    spellings = [
        set(action.option_strings)
        for action in build_parser()._actions
        if "--help" not in action.option_strings and action.help != argparse.SUPPRESS
    ]
    own = [names for names in spellings if not names & OPTIONS]
    named = set(re.findall(r"`(--[\w-]+)", section))
    assert len(own) > 8 and [names for names in own if not names & named] == []
    assert named <= {name for names in spellings for name in names} | {"--help"}
    assert {name for names in spellings for name in names} >= OPTIONS
