"""Python scripts in processes of their own.

Most are forked from a process that imported Bridge once, which takes long. The plugin is not active there, and Triton
interprets kernels: it looks at TRITON_INTERPRET once, when it is imported.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch

INTERPRET = "TRITON_INTERPRET"
PLUGIN = "BRIDGE_CG_PLUGIN"
# Bridge sets it where it is missing, past `os.environ`, which a started process inherits all the same.
TOKENIZERS = "TOKENIZERS_PARALLELISM"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["wandb", "megatron.bridge.recipes"])  # in this order for the reason in `conftest.py`
LIMIT_S = 300
# What comes before a script of `computed`.
BEFORE = """
import sys

import torch

from tests.interpreted import prepare

prepare()
cases = torch.load(sys.argv[1])
"""


def interpreted(script: str, *arguments: Path) -> str:
    """Return what a script writes whose kernels run in Triton's interpreter; it must end well."""
    return forked(script, *arguments)


def computed(script: str, cases: Any) -> Any:
    """Return `found` of a script that makes it of `cases`, both of tensors; its kernels run in Triton's interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given", Path(folder) / "made"
        torch.save(cases, given)
        interpreted(f"{BEFORE}{script}\ntorch.save(found, sys.argv[2])\n", given, made)
        return torch.load(made)


def forked(script: str, *arguments: Path) -> str:
    """Return what a script writes in a fork of a process with Bridge and without the plugin; it must end well."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        process = CONTEXT.Process(target=_run, args=(script, list(map(str, arguments)), output, dict(os.environ)))
        with mock.patch.dict(os.environ, {INTERPRET: "1", PLUGIN: "0", "PYTHONWARNINGS": "ignore"}):
            os.environ.pop(TOKENIZERS, None)
            os.unsetenv(TOKENIZERS)
            process.start()
        process.join(LIMIT_S)
        hangs = process.is_alive()
        process.kill()
        process.join()
        written = output.read_text() if output.exists() else ""
    assert not hangs and process.exitcode == 0, f"status {process.exitcode}, hangs: {hangs}\n{written[-3000:]}"
    return written


def _run(script: str, arguments: list[str], output: Path, environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment | {INTERPRET: "1"})
    sys.argv = ["-c", *arguments]
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def compiled(script: str, folder: Path) -> str:
    """Return what a script writes whose kernels are compiled, from a file in `folder`: Triton reads their source."""
    file = folder / "compiled.py"
    file.write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != INTERPRET}
    return output([sys.executable, str(file)], environment | {"PYTHONPATH": os.pathsep.join(sys.path)})


def output(command: list[str], environment: dict[str, str]) -> str:
    """Return what a command writes in an environment; it must end well."""
    environment = {**environment, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
