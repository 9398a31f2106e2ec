import sys
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli import launch
from bridge_cg_plugin.cli.runs import train as run_recipe

RECIPE = ["--recipe", "qwen3_vl_8b_sft_config", "--vision_cuda_graph_impl", "transformer_engine", "train.train_iters=5"]


class NemoRun:
    """The parts of nemo_run that are used, with its own parameters; remembers what it was given."""

    config = SimpleNamespace(get_nemorun_home=lambda: "/home/runs")

    def __init__(self):
        self.executor = self.task = self.detached = None

    def Script(self, *, path, entrypoint, args):
        return SimpleNamespace(path=path, args=args)

    def LocalTunnel(self, *, job_dir):
        return job_dir

    def Packager(self):
        return "packager"

    def SlurmExecutor(
        self, *, account, partition, nodes, ntasks_per_node, gpus_per_node, mem, exclusive, time, tunnel, packager
    ):
        return SimpleNamespace(**{name: value for name, value in locals().items() if name != "self"})

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
    return fake


def test_torchrun_gets_the_script_without_launcher_flags(monkeypatch):
    started = []
    monkeypatch.setattr(launch.os, "execvpe", lambda *args: started.append(args))
    launcher = ["--launcher", "torchrun", "--gpus-per-node=4", "--env", "A=b=c"]
    assert run_recipe.main([*launcher, *RECIPE]) == 0
    ((program, command, environment),) = started
    assert program == command[0] == sys.executable and "--nproc_per_node=4" in command
    assert command[command.index(run_recipe.__file__) + 1 :] == RECIPE
    assert environment["A"] == "b=c"


def test_slurm_goes_through_nemo_run(nemo_run):
    words = ["--launcher", "slurm", "--account", "a", "--partition", "p", "--nodes", "2", "--gpus_per_node", "8"]
    container = ["--container_image", "i.sqsh", "--mount", "/x:/x", "--mount", "/y:/y", "--env", "A=b"]
    assert run_recipe.main([*words, *container, *RECIPE]) == 0
    assert nemo_run.task.args == RECIPE and nemo_run.task.path == run_recipe.__file__ and nemo_run.detached
    found = nemo_run.executor
    assert (found.nodes, found.ntasks_per_node, found.gpus_per_node, found.account) == (2, 8, 8, "a")
    assert (found.container_image, found.container_mounts) == ("i.sqsh", ["/x:/x", "/y:/y"])
    assert found.env_vars == {"A": "b"} and found.tunnel == "/home/runs/experiments"


def test_slurm_without_nemo_run_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    assert run_recipe.main(["--launcher", "slurm", "--account", "a", "--partition", "p", *RECIPE]) == 2
    err = capsys.readouterr().err
    assert "Cannot use --launcher slurm: it" in err and "nemo-run" in err and "srun" in err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--launcher", "slurm", "--partition", "p"], "Cannot submit a job without --account"),
        (["--launcher", "slurm", "--account", "a", "--partition", "p", "--env", "A"], "NAME=VALUE"),
        (["--launcher", "slurm", "--vision_cuda_graph_tuning", "kernels=quick"], "auto or exact or fast"),
    ],
)
def test_a_job_that_cannot_run_is_not_submitted(nemo_run, capsys, words, said):
    assert run_recipe.main([*words, *RECIPE]) == 2
    assert said in capsys.readouterr().err and nemo_run.task is None


@pytest.mark.parametrize(
    "words, said",
    [
        (["--launcher", "torchrun", "--nodes", "2"], "Cannot use --nodes 2: it must be 1 with --launcher torchrun"),
        (["--launcher", "slurm", "--account", "a"], "Cannot submit a job without --partition"),
        (["--launcher", "torchrun", "--time", "02:00:00"], "Cannot use --time: with --launcher torchrun no job"),
        (["--mount", "/a:/b"], "Cannot use --mount: with --launcher none no job is submitted"),
        (["--launcher", "torchrun", "--env", "A"], "NAME=VALUE"),
        (["--env", "A=b"], "Cannot use --env A=b: without a launcher this process is the worker"),
    ],
)
def test_what_would_have_no_effect_or_not_start_is_refused(nemo_run, monkeypatch, capsys, words, said):
    monkeypatch.setattr(run_recipe, "prepare", lambda *_: pytest.fail("went on"))
    assert run_recipe.main([*words, "--dry-run", *RECIPE]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--cuda_graph_imp", "none"], "Did you mean --cuda_graph_impl"),
        (["--recpie", "x"], "Did you mean --recipe"),
        (["--cuda-graph-impl", "cuda"], "Cannot use --cuda-graph-impl cuda: it must"),
        (["--vision_cuda_graph_buckets", "64,32"], "Sort the list"),
    ],
)
def test_flags_are_refused_before_anything_is_imported(capsys, monkeypatch, words, said):
    monkeypatch.setattr(run_recipe, "prepare", lambda *_: pytest.fail("went on"))
    assert run_recipe.main([*RECIPE, *words]) == 2
    assert said in capsys.readouterr().err
