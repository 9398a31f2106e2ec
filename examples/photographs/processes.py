"""Training runs in processes of their own, forked from one that has imported the stack: imports take half a minute."""

import json
import multiprocessing
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# The server must not initialize CUDA, which a forked process could not use: PyTorch then asks NVML for GPUs.
SERVER_ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_starting = threading.Lock()


class TrainingFailed(RuntimeError):
    """A training process ended with an error; the message ends with what it wrote, where that was kept."""


def train_in_process(mode: str, arguments: Sequence[str], log: Path | None = None) -> dict[str, Any]:
    """Train in a new process.

    Args:
        mode: "eager" or "graphs".
        arguments: The command line's other words.
        log: File for the process's output; without it the output goes to this one's.

    Returns:
        What `training.train` returns.

    Raises:
        TrainingFailed: The process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        words = ["--train", mode, "--out", str(out), *arguments]
        process = _context().Process(target=_train, args=(words, free_port(), log))
        process.start()
        process.join()
        if process.exitcode != 0:
            written = log.read_text()[-8000:] if log is not None else ""
            raise TrainingFailed(f"training {' '.join(words)} ended with status {process.exitcode}\n{written}")
        return json.loads(out.read_text())


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    with _starting:
        context.set_forkserver_preload([f"{__package__}.imported"])
        before = {name: os.environ.get(name) for name in SERVER_ENVIRONMENT}
        os.environ.update(SERVER_ENVIRONMENT)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def _train(words: list[str], port: int, log: Path | None) -> None:
    from .arguments import parse
    from .training import train_once

    os.environ["MASTER_PORT"] = str(port)
    if log is not None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    train_once(parse(words))
