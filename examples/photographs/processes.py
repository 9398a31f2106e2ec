"""Training runs in processes of their own, which import the stack, half a minute's work, before they are needed."""

import importlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from bridge_cg_plugin.cli.runs.recipe import free_port
from examples.photographs.hosts import placement

# Seconds that the other processes of a run have to end once one failed: they may wait for it in a collective.
GRACE_S = 20.0
LAST_WRITTEN = 8000  # characters of a failed process's output that a message shows


class TrainingFailed(RuntimeError):
    """A training process ended with an error; the message ends with the last that it wrote, where that was kept.

    Args:
        message: Which process, how it ended and what it was doing.
        written: All that it wrote.

    Attributes:
        written: All that it wrote.
    """

    def __init__(self, message: str, written: str = "") -> None:
        super().__init__(f"{message}\n{written[-LAST_WRITTEN:]}")
        self.written = written


class TrainingProcess:
    """New processes, one for each rank of a run, that import the stack at once and wait for what they shall train.

    Args:
        log: File for the output; a further process has the rank before the suffix. Without it the output goes to this
            process's.
        ranks: Processes.
        devices: Indices of the GPUs that they see, among those that this process sees; None for all. Where they are
            fewer than the ranks, several ranks share each.
        prepare: `module:function` that every process calls before it trains, for tests.
        module: What trains: a module that imports the stack and has `train_words(words)`, which takes a command line.
        environment: The processes' variables; None for this process's as they are now, with what megatron-core has set
            for models that were built here.
    """

    def __init__(
        self,
        log: Path | None = None,
        ranks: int = 1,
        devices: Sequence[int] | None = None,
        prepare: str | None = None,
        module: str = "examples.photographs.training",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._ranks = [
            _Rank(rank, ranks, _log_of(log, rank), devices, prepare, module, environment) for rank in range(ranks)
        ]

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[Self]:
        """Start a process of its own without arguments; it ends with the `with` block."""
        process = cls()
        try:
            yield process
        finally:
            process.close()

    def wait_until_ready(self) -> None:
        """Wait until everything is imported.

        Raises:
            TrainingFailed: A process failed.
        """
        for rank in self._ranks:
            if not rank.is_ready():
                self._fail("importing the stack")

    def train(self, mode: str, arguments: Sequence[str], limit_s: float | None = None) -> dict[str, Any]:
        """Train once, and end the processes.

        Args:
            mode: "eager", "graphs" or "upstream".
            arguments: The command line's other words.
            limit_s: Seconds after which processes that still run are ended, as if one had failed; None for no limit.

        Returns:
            What the module's `train_words` writes to its `--out` on rank 0, as JSON.

        Raises:
            TrainingFailed: A process failed; the others were ended.
        """
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run.json"
            words = ["--train", mode, "--out", str(out), *arguments]
            port = free_port()
            for rank in self._ranks:
                rank.connection.send((words, port))
            if not self._all_end_well(limit_s):
                self._fail(" ".join(words))
            found: dict[str, Any] = json.loads(out.read_text())
            return found

    def close(self) -> None:
        """End the processes if they still import or wait."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()

    def _all_end_well(self, limit_s: float | None) -> bool:
        """Wait for every process as long as the limit says, once one failed no longer than the grace."""
        running, failed = list(self._ranks), False
        end = None if limit_s is None else time.monotonic() + limit_s
        while running:
            left = None if end is None else max(end - time.monotonic(), 0.0)
            ended = wait([rank.process.sentinel for rank in running], GRACE_S if failed else left)
            if not ended:
                for rank in running:
                    rank.process.kill()
                failed = True
                continue
            for rank in [rank for rank in running if rank.process.sentinel in ended]:
                rank.process.join()
                rank.first = rank.process.exitcode != 0 and not failed
                failed = failed or rank.first
                running.remove(rank)
        return not failed

    def _fail(self, doing: str) -> None:
        """Raise with what the process that failed first wrote."""
        for rank in self._ranks:
            if rank.process.exitcode is None and not rank.first:
                rank.connection.close()
                rank.process.join(GRACE_S)
        named = next((rank for rank in self._ranks if rank.first), None)
        named = named or next((rank for rank in self._ranks if rank.process.exitcode), self._ranks[0])
        raise TrainingFailed(
            f"process {named.rank} of {len(self._ranks)} ended with status {named.process.exitcode}: {doing}",
            named.log.read_text() if named.log is not None else "",
        )


class _Rank:
    """One process of a run.

    Attributes:
        first: Whether it failed before any other did.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        log: Path | None,
        devices: Sequence[int] | None,
        prepare: str | None,
        module: str,
        environment: Mapping[str, str] | None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank, self.log, self.first = rank, log, False
        self.connection, theirs = context.Pipe()
        # One process alone is told too where torchrun started the parent, which knows of more.
        variables = dict(os.environ if environment is None else environment)
        placed = world > 1 or "WORLD_SIZE" in variables
        if placed:
            variables |= placement(rank, world, None if devices is None else len(devices))
        if devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(device) for device in devices)
        self.process = context.Process(target=_import_and_train, args=(theirs, log, variables, placed, prepare, module))
        self.process.start()
        theirs.close()

    def is_ready(self) -> bool:
        """Wait until everything is imported; whether it could be."""
        try:
            self.connection.recv()
        except EOFError:
            self.process.join()
            self.first = True
            return False
        return True


def _visible(device: int) -> str:
    """Return what CUDA_VISIBLE_DEVICES calls a GPU that this process knows by an index."""
    here = os.environ.get("CUDA_VISIBLE_DEVICES")
    return here.split(",")[device] if here else str(device)


def _log_of(log: Path | None, rank: int) -> Path | None:
    return log if log is None or rank == 0 else log.with_suffix(f".{rank}{log.suffix}")


def _import_and_train(
    connection: Connection,
    log: Path | None,
    environment: dict[str, str],
    placed: bool,
    prepare: str | None,
    module: str,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # As torchrun does: with a thread for every core in each of several processes they mostly wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A pool of compiler processes beside each of several would take longer to start than it saves.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # A spawned process spawns its data loader's workers, too; some of Bridge's data sets cannot be pickled for them.
    multiprocessing.set_start_method("fork", force=True)
    if log is not None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    train_words = importlib.import_module(module).train_words
    if prepare is not None:
        place, _, function = prepare.partition(":")
        getattr(importlib.import_module(place), function)()
    connection.send("ready")
    try:
        words, port = connection.recv()
    except EOFError:
        return
    if placed:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # where torchrun started the parent
    os.environ["MASTER_PORT"] = str(port)
    train_words(words)
