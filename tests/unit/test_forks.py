"""Training processes that are forked from a server: they train, each with its own variables, or are fresh ones."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.photographs import forks

ROOT = Path(__file__).parents[2]
# In a process of its own: other tests have a server with other imports in theirs.
SCRIPT = """
import json, logging, os, sys
from pathlib import Path
from examples.photographs.forks import start_server
from examples.photographs.processes import TrainingProcess

MODES = ("eager", "graphs")

if __name__ == "__main__":
    logging.basicConfig()
    folder, module = Path(sys.argv[1]), sys.argv[2]
    environment = dict(os.environ)
    start_server(environment)
    assert dict(os.environ) == environment
    processes = [
        TrainingProcess(folder / f"{m}.log", module=module, environment={**environment, "OF_THIS_RUN": m}, forked=True)
        for m in MODES
    ]
    for process in processes:
        process.wait_until_ready()
    runs = [process.train(mode, ["--steps", "4"]) for mode, process in zip(MODES, processes)]
    print(json.dumps({"runs": runs, "forked": [process.forked for process in processes], "parent": os.getpid()}))
"""


def run(folder, module, *path):
    script = folder / "script.py"
    script.write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(script), str(folder), module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_forked_processes_train(tmp_path):
    found, _ = run(tmp_path, "tests.unit.forked_training")
    eager, graphs = found["runs"]
    assert found["forked"] == [True, True]
    assert eager["parent"] == graphs["parent"] != found["parent"]
    assert {"transformers", "torch._inductor.compile_fx"} <= set(eager["libraries"])
    assert eager["obstacle"] is None and (eager["variable"], graphs["variable"]) == ("eager", "graphs")
    assert eager["server's"] is None
    assert graphs["replays"] == 4 and eager["replays"] == 0
    assert graphs["losses"] == pytest.approx(eager["losses"], rel=1e-4) and len(set(eager["losses"])) == 4


STAND_IN = """
import json, os
from pathlib import Path

def train_words(words):
    Path(words[words.index("--out") + 1]).write_text(json.dumps({"parent": os.getppid()}))
"""
WITH_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), name="a library's", daemon=True).start()
"""


def test_where_a_library_leaves_a_thread_processes_are_fresh_ones(tmp_path):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "multistorageclient.py").write_text(WITH_A_THREAD)
    found, said = run(tmp_path, "stand_in", tmp_path)
    assert found["forked"] == [False, False]
    assert {each["parent"] for each in found["runs"]} == {found["parent"]}
    assert "threads run in their server" in said and "a library's" in said


@pytest.fixture
def process(tmp_path, monkeypatch):
    """A process that has CUDA's driver and one thread; returns what the driver is asked and answers."""
    (tmp_path / "maps").write_text("7f00 r-xp /usr/lib/libcuda.so.1\n")
    (tmp_path / "task" / "1").mkdir(parents=True)
    monkeypatch.setattr(forks, "PROCESS", tmp_path)
    driver = SimpleNamespace(answer=forks.CUDA_ERROR_NOT_INITIALIZED, folder=tmp_path)
    driver.cuDeviceGetCount = lambda count: driver.answer
    monkeypatch.setattr(forks.ctypes, "CDLL", lambda name: driver)
    return driver


def test_a_driver_that_was_loaded_and_not_begun_is_no_obstacle(process):
    assert forks.obstacle() is None


def test_a_driver_that_has_begun_is_one(process):
    process.answer = 0
    assert forks.obstacle() == "CUDA has begun in their server"


def test_without_a_driver_none_is_asked(process):
    process.answer = 0
    (process.folder / "maps").write_text("7f00 r-xp /usr/lib/libc.so.6\n")
    assert forks.obstacle() is None


def test_threads_are_an_obstacle_and_pythons_are_named(process):
    (process.folder / "task" / "2").mkdir()
    assert "1 threads run" in forks.obstacle()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="a waiting one")
    thread.start()
    try:
        assert "a waiting one" in forks.obstacle()
    finally:
        end.set()
        thread.join()
