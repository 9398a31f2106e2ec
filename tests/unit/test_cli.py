"""Command lines: words, flags, launchers, what importing Bridge spares; docs/recipes.md against the parser."""

import argparse
import io
import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.announce import LOGGER, warn
from bridge_cg_plugin.cli.answers import say, table
from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.cli.runs import train as run_recipe
from bridge_cg_plugin.cli.runs.compare import read_arguments
from bridge_cg_plugin.cli.runs.recipe import build_parser, quiet, read
from bridge_cg_plugin.options import GraphOptionWarning
from bridge_cg_plugin.options.flags import FLAGS


@pytest.mark.parametrize(
    "words, nearest",
    [
        (["docter"], "doctor"),
        (["plan", "packd", "lengths.json"], "packed"),
        (["explain", "some_recipe", "--graphs", "h20"], "h200"),
        (["doctor", "--jsn"], "--json"),
        (["plan", "packed", "lengths.json", "--pak-size", "4"], "--pack-size"),
    ],
)
def test_a_mistyped_word_names_the_nearest(capsys, words, nearest):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and f"Did you mean {nearest}?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["help"]])
def test_the_command_alone_prints_its_help(capsys, words):
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "usage: bridge-cg" in said and "bridge-cg explain RECIPE cuda_graphs=exact" in said


def test_recipes_are_counted_by_family(capsys):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 60 and "  qwen3_vl (" in out and "vision_graphs_h200" in out
    assert main(["recipes", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 500


def test_recipes_by_a_part_of_their_name(capsys):
    assert main(["recipes", "qwen3_vl_8b"]) == 0
    presets, others = capsys.readouterr().out.split("recipes of Megatron-Bridge\n")
    assert "  qwen3_vl_8b_vision_graphs_h200_sft_config\n" in presets
    assert "  qwen3_vl_8b_sft_config\n" in others and "graphs" not in others
    assert main(["recipes", "--json", "small_vision"]) == 0
    assert json.loads(capsys.readouterr().out)["presets"] == ["qwen3_vl_small_vision_graphs_pretrain_mock_config"]
    assert main(["recipes", "no_such_name"]) == 2
    remedy = "Write another part of it; bridge-cg recipes lists all."
    assert capsys.readouterr().err == f"Cannot find a recipe with 'no_such_name' in its name. {remedy}\n"


@pytest.mark.parametrize("command", ["train", "compare"])
def test_commands_with_a_parser_of_their_own(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: bridge-cg {command}" in said and "--recipe" in said
    assert all(len(line) <= 80 for line in said.splitlines())
    assert main([command]) == 2
    assert capsys.readouterr().err == "Name a recipe. `bridge-cg recipes` lists them.\n"


@pytest.mark.parametrize("written", [["{}"], ["--recipe", "{}"], ["--cuda_graphs", "exact", "{}", "train.seed=1"]])
@pytest.mark.parametrize("name", ["qwen3_vl_8b_sft_config", "Qwen3_VL_8B_sft_Config"])
def test_a_recipe_is_named_by_its_place_or_a_flag_in_any_case(written, name):
    parsed, words = read([*(word.format(name) for word in written), "--graphs", "H200"])
    assert (parsed.recipe, parsed.graphs) == ("qwen3_vl_8b_sft_config", "h200")
    assert words == [word for word in written if "=" in word]
    compared, rest = read_arguments([word.format(name) for word in written])
    assert compared.recipe == "qwen3_vl_8b_sft_config" and name not in rest


def test_two_recipes_are_one_too_many(capsys):
    for command in ("train", "explain"):
        assert main([command, "a_config", "--recipe", "b_config"]) == 2
        assert "b_config is the recipe, and other words must be section.name=value" in capsys.readouterr().err


RECIPE = ["--recipe", "qwen3_vl_8b_sft_config", "--vision_cuda_graph_impl", "transformer_engine", "train.train_iters=5"]


def test_torchrun_gets_the_script_as_a_worker(monkeypatch):
    class Started(Exception):
        pass

    def start(*words):
        raise Started(*words)

    monkeypatch.setattr(os, "execvp", start)
    monkeypatch.setattr(run_recipe.first_look, "looked", lambda *_: (0, ""))
    given = ["--launcher", "torchrun", "--gpus-per-node=4", "--nodes", "1", *RECIPE]
    with pytest.raises(Started) as started:
        run_recipe.main(given)
    program, command = started.value.args
    assert program == command[0] == sys.executable and "--nproc_per_node=4" in command
    words = command[command.index(run_recipe.__file__) + 1 :]
    assert words[:-2] == given and read(words)[0].launcher == "none"


@pytest.mark.parametrize(
    "words, said",
    [
        (["--launcher", "torchrun", "--nodes", "2"], "Cannot use nodes=2: it must be 1 with --launcher torchrun"),
        (["--launcher", "mpirun"], "Cannot use launcher='mpirun': it must be none or torchrun"),
        (["--launcher", "slurm"], "Cannot use launcher='slurm': it must be none or torchrun"),
        (["--container-image=i.sqsh"], "Cannot use '--container-image': there is no such flag"),
    ],
)
def test_what_would_not_start_is_refused(monkeypatch, capsys, words, said):
    monkeypatch.setattr(run_recipe, "prepare", lambda *_: pytest.fail("went on"))
    assert run_recipe.main([*words, "--dry-run", *RECIPE]) == 2
    assert said in capsys.readouterr().err


def test_other_libraries_are_quiet_and_the_plugin_is_not(caplog):
    with warnings.catch_warnings(record=True) as shown, quiet():
        warnings.warn("Apex is not installed", stacklevel=1)
        warnings.warn("pynvml is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("write another field", GraphOptionWarning, stacklevel=1)
        logging.getLogger("other").warning("No CUDA runtime is found")
        warn("a seam does not fit")
    assert [record.message for record in caplog.records] == ["[rank 0] a seam does not fit"]
    logging.getLogger("other").warning("afterwards")
    assert caplog.messages[-1] == "afterwards" and LOGGER.isEnabledFor(logging.WARNING)
    assert [str(one.message) for one in shown] == ["write another field"]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
# docs/options.md has the options.
OPTIONS = {spelling for flag in FLAGS for spelling in flag.spellings}


def test_the_page_has_every_flag_that_is_no_option_and_no_other():
    section = PAGE.read_text().partition("## From a command line\n")[2].partition("\n## ")[0]
    actions = [action for action in build_parser()._actions if "--help" not in action.option_strings]
    spellings = [set(action.option_strings) for action in actions]
    shown = [set(action.option_strings) for action in actions if action.help != argparse.SUPPRESS]
    own = [names for names in shown if not names & OPTIONS]
    named = set(re.findall(r"`(--[\w-]+)", section))
    assert len(own) > 8 and [names for names in own if not names & named] == []
    assert named <= {name for names in shown for name in names} | OPTIONS | {"--help"}
    assert {name for names in spellings for name in names} >= OPTIONS
    assert all(names & {flag.spellings[0] for flag in FLAGS} for names in shown if names & OPTIONS)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("out", "variables", "coloured"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (io.StringIO, {"TERM": "xterm"}, False),
    ],
)
def test_colour_where_the_terminal_has_it(monkeypatch, out, variables, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out())
    say("time a step: 5 ms\nwarning: slow", '{"a": 1}')
    bold, yellow = "\033[1mtime a step:\033[0m 5 ms", "\033[33mwarning:\033[0m slow"
    plain = "time a step: 5 ms\nwarning: slow"
    said = f"{bold}\n{yellow}" if coloured else plain
    assert sys.stdout.getvalue() == f'{said}\n{{"a": 1}}\n'


words = st.lists(st.text("abc_", min_size=1, max_size=9), min_size=1, max_size=6).map(" ".join)


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(words, min_size=n, max_size=n), min_size=2, max_size=5)))
def test_a_table_is_no_wider_than_the_terminal(rows):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "80")
        lines = table(rows)
    assert max(map(len, lines)) <= 80
    assert "".join("".join(lines).split()) != ""
    for word in {piece for row in rows for cell in row for piece in cell.replace("_", "_ ").split()}:
        assert any(word in line for line in lines)
