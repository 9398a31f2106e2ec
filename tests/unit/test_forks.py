"""Training processes that are forked from one that has imported the stack."""

import json
import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from examples.photographs import forks, processes
from examples.photographs.processes import UNFIT

SCRIPT = """
import json, os, sys, time
from pathlib import Path
from examples.photographs.forks import start_server
from examples.photographs.processes import TrainingProcess

folder, where = Path(sys.argv[1]), dict(os.environ)
start_server(where | {"NVTE_FUSED_ATTN": "0"})
assert dict(os.environ) == where
told = []
for number in range(2):
    place, prepare = folder / f"{number}.log", "tests.unit.test_forks:stand_in_for_training"
    process = TrainingProcess(place, 2, (2, 3), prepare, environment=where, forked=True)
    process.wait_until_ready()
    told.append(process.train("eager", ["--steps", "1"]))
print(json.dumps({"here": os.getpid(), "told": told}))
"""


def stand_in_for_training():
    from examples.photographs import training

    was = training.train_once

    def train_once(args):
        names = ("RANK", "CUDA_VISIBLE_DEVICES", "NVTE_FUSED_ATTN", "PYTORCH_NVML_BASED_CUDA_CHECK")
        told = {name: os.environ.get(name) for name in names}
        args.out.write_text(json.dumps({**told, "parent": os.getppid(), "real": was.__module__}))

    training.train_once = train_once


def test_processes_are_forked_from_one_that_has_imported_the_stack(tmp_path):
    names = ("NVTE_FUSED_ATTN", "PYTORCH_NVML_BASED_CUDA_CHECK")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    first, second = found["told"]
    assert first["parent"] == second["parent"] != found["here"]
    assert first["real"] == "examples.photographs.training"
    assert first["CUDA_VISIBLE_DEVICES"] == "2,3" and first["RANK"] in "01"
    # The server's own variables are not theirs.
    assert (first["NVTE_FUSED_ATTN"], first["PYTORCH_NVML_BASED_CUDA_CHECK"]) == (None, None)


def test_a_fork_that_cannot_train_says_so_and_ends(monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, forks.PRELOADED, SimpleNamespace(fits=lambda: False))
    environment = dict(os.environ)
    ours, theirs = multiprocessing.Pipe()
    processes._import_and_train(theirs, None, environment, False, None, "no.such.module")
    assert ours.recv() == UNFIT
    assert "a new process imports it" in capfd.readouterr().out


@pytest.mark.parametrize("said, methods", [(UNFIT, ["forkserver", "spawn"]), ("ready", ["forkserver"])])
def test_a_new_process_takes_the_place_of_a_fork_that_cannot_train(monkeypatch, said, methods):
    started = []

    def start(rank, method):
        rank.connection, theirs = multiprocessing.Pipe()
        theirs.send("ready" if started else said)
        rank.process = SimpleNamespace(join=lambda: None)
        started.append(method)

    monkeypatch.setattr(processes._Rank, "_start", start)
    process = processes.TrainingProcess(forked=True)
    process.wait_until_ready()
    assert started == methods
    process.close()
