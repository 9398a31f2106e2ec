import importlib.util
import sys
from types import SimpleNamespace

import pytest

from bridge_cg_plugin import launch
from bridge_cg_plugin.launch import Job
from bridge_cg_plugin.options import OptionError
from scripts.performance import run_recipe

RECIPE = ["--recipe", "qwen3_vl_8b_sft_config", "--vision_cuda_graph_impl", "transformer_engine", "train.train_iters=5"]


class NemoRun:
    """The parts of nemo_run that are used; remembers what it was given."""

    def __init__(self):
        self.executor = self.task = self.detached = None

    def Script(self, **kwargs):
        return SimpleNamespace(**kwargs)

    def LocalTunnel(self):
        return "tunnel"

    def Packager(self):
        return "packager"

    def SlurmExecutor(self, **kwargs):
        return SimpleNamespace(**kwargs)

    def Experiment(self, name):
        self.name = name
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def add(self, task, executor, name):
        self.task, self.executor = task, executor

    def run(self, detach):
        self.detached = detach


@pytest.fixture
def nemo_run(monkeypatch):
    fake = NemoRun()
    monkeypatch.setitem(sys.modules, "nemo_run", fake)
    find = importlib.util.find_spec
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda n: fake if n == "nemo_run" else find(n))
    return fake


@pytest.fixture
def without_nemo_run(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda n: None if n == "nemo_run" else find(n))


def test_torchrun_gets_the_script_without_launcher_flags(monkeypatch):
    started = []
    monkeypatch.setattr(launch.os, "execvpe", lambda *args: started.append(args))
    launcher = ["--launcher", "torchrun", "--gpus-per-node=4", "--env", "A=b=c"]
    assert run_recipe.main([*launcher, *RECIPE]) == 0
    ((program, command, environment),) = started
    assert program == command[0] == sys.executable and "--nproc_per_node=4" in command
    assert command[command.index(run_recipe.__file__) + 1 :] == RECIPE
    assert environment["A"] == "b=c"


def test_torchrun_is_for_one_machine():
    with pytest.raises(OptionError, match="nodes=2.*slurm"):
        launch.torchrun(Job(nodes=2), "script.py", [])


def test_slurm_goes_through_nemo_run(nemo_run):
    words = ["--launcher", "slurm", "--account", "a", "--partition", "p", "--nodes", "2", "--gpus_per_node", "8"]
    container = ["--container_image", "i.sqsh", "--mount", "/x:/x", "--mount", "/y:/y", "--env", "A=b"]
    assert run_recipe.main([*words, *container, *RECIPE]) == 0
    assert nemo_run.task.args == RECIPE and nemo_run.task.path == run_recipe.__file__ and nemo_run.detached
    found = nemo_run.executor
    assert (found.nodes, found.ntasks_per_node, found.gpus_per_node, found.account) == (2, 8, 8, "a")
    assert (found.container_image, found.container_mounts) == ("i.sqsh", ["/x:/x", "/y:/y"])
    assert found.env_vars == {"A": "b"}


def test_slurm_without_nemo_run_says_so(without_nemo_run, capsys):
    assert run_recipe.main(["--launcher", "slurm", "--account", "a", "--partition", "p", *RECIPE]) == 2
    err = capsys.readouterr().err
    assert "launcher='slurm'" in err and "nemo-run" in err and "srun" in err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--launcher", "slurm", "--partition", "p"], "Pass --account"),
        (["--launcher", "slurm", "--account", "a"], "Pass --partition"),
        (["--launcher", "slurm", "--account", "a", "--partition", "p", "--env", "A"], "NAME=VALUE"),
        (["--launcher", "slurm", "--vision_cuda_graph_kernels", "quick"], "auto or exact or fast"),
    ],
)
def test_a_job_that_cannot_run_is_not_submitted(nemo_run, capsys, words, said):
    assert run_recipe.main([*words, *RECIPE]) == 2
    assert said in capsys.readouterr().err and nemo_run.task is None


@pytest.mark.parametrize(
    "words, said",
    [
        (["--cuda_graph_imp", "none"], "allowed is --cuda_graph_impl"),
        (["--recpie", "x"], "allowed is --recipe"),
        (["--cuda-graph-impl", "cuda"], "cuda_graph_impl='cuda'"),
        (["--vision_cuda_graph_buckets", "64,32"], "Sort the list"),
    ],
)
def test_flags_are_refused_before_anything_is_imported(capsys, monkeypatch, words, said):
    monkeypatch.setattr(run_recipe, "prepare", lambda *_: pytest.fail("went on"))
    assert run_recipe.main([*RECIPE, *words]) == 2
    assert said in capsys.readouterr().err
