"""Training runs in processes of their own, which import the stack, half a minute's work, before they are needed."""

import json
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class TrainingFailed(RuntimeError):
    """A training process ended with an error; the message ends with what it wrote, where that was kept."""


class TrainingProcess:
    """A new process that imports the stack at once and then waits for what it shall train.

    Args:
        log: File for the process's output; without it the output goes to this one's.
        gpu: The one GPU that it sees, counted from 0 among those visible here; None is all.
    """

    def __init__(self, log: Path | None = None, gpu: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = log
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_import_and_train, args=(theirs, log, gpu))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait until everything is imported.

        Raises:
            TrainingFailed: The process failed.
        """
        try:
            self._connection.recv()
        except EOFError:
            self._fail("importing the stack")

    def train(self, mode: str, arguments: Sequence[str]) -> dict[str, Any]:
        """Train once, and end the process.

        Args:
            mode: "eager", "graphs" or "upstream".
            arguments: The command line's other words.

        Returns:
            What `training.train` returns.

        Raises:
            TrainingFailed: The process failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run.json"
            words = ["--train", mode, "--out", str(out), *arguments]
            self._connection.send((words, free_port()))
            self._process.join()
            if self._process.exitcode != 0:
                self._fail(" ".join(words))
            return json.loads(out.read_text())

    def close(self) -> None:
        """End the process if it still waits."""
        self._connection.close()
        self._process.join()

    def _fail(self, doing: str) -> None:
        self._process.join()
        written = self._log.read_text()[-8000:] if self._log is not None else ""
        raise TrainingFailed(f"the process ended with status {self._process.exitcode}: {doing}\n{written}")


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _import_and_train(connection: Connection, log: Path | None, gpu: int | None) -> None:
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    # As torchrun does: with a thread for every core in each of several processes they mostly wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if log is not None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    from .arguments import parse
    from .training import train_once

    connection.send("ready")
    try:
        words, port = connection.recv()
    except EOFError:
        return
    os.environ["MASTER_PORT"] = str(port)
    train_once(parse(words))
