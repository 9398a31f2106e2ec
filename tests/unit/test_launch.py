"""How `bridge-cg train` starts workers, and flags that it refuses before anything is imported."""

import os
import sys

import pytest

from bridge_cg_plugin.cli.runs import train as run_recipe
from bridge_cg_plugin.cli.runs.recipe import read

RECIPE = ["--recipe", "qwen3_vl_8b_sft_config", "--vision_cuda_graph_impl", "transformer_engine", "train.train_iters=5"]


def test_torchrun_gets_the_script_as_a_worker(monkeypatch):
    class Started(Exception):
        pass

    def start(*words):
        raise Started(*words)

    monkeypatch.setattr(os, "execvp", start)
    monkeypatch.setattr(run_recipe.first_look, "refusal", lambda *_: "")
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
        (["--launcher", "torchrun", "--nodes", "2"], "Cannot use --nodes 2: it must be 1 with --launcher torchrun"),
        (["--launcher", "mpirun"], "Cannot use --launcher mpirun: it must be none or torchrun"),
        (["--launcher", "slurm", "--account", "a"], "Cannot use --account: it has gone with --launcher slurm. Start"),
        (["--launcher", "slurm"], "Cannot use --launcher slurm: it has gone"),
        (["--container-image=i.sqsh"], "Cannot use --container_image: it has gone"),
    ],
)
def test_what_would_not_start_is_refused(monkeypatch, capsys, words, said):
    monkeypatch.setattr(run_recipe, "prepare", lambda *_: pytest.fail("went on"))
    assert run_recipe.main([*words, "--dry-run", *RECIPE]) == 2
    assert said in capsys.readouterr().err
