"""Compiling kernels ahead, in a thread of its own while steps run; recordings go first."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Condition

import torch

from ..announce import LOGGER

# How far from a microbatch's size, as factors, those of buckets may lie: the kernels of a size differ by its magnitude.
FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25, 8.0)


class Turns:
    """Keeps recordings of a process and each kernel that is compiled ahead apart in time."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._recordings, self._compiling = 0, False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside, behind the kernel that is being compiled; the next ones wait."""
        with self._changed:
            self._recordings += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._compiling)
            yield
        finally:
            with self._changed:
                self._recordings -= 1
                self._changed.notify_all()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile one kernel inside, behind all recordings."""
        with self._changed:
            self._changed.wait_for(lambda: not self._recordings and not self._compiling)
            self._compiling = True
        try:
            yield
        finally:
            with self._changed:
                self._compiling = False
                self._changed.notify_all()


TURNS = Turns()


class KernelCompiler:
    """Compiles for sizes like those seen; a recording that comes later finds its kernels ready.

    A recording compiles itself what is not ready yet. What cannot be compiled here is left to it, too; it raises the
    error.

    Args:
        compile_for: Compiles what recordings call for a number of tokens, one kernel with each step of the iterator.
    """

    def __init__(self, compile_for: Callable[[int], Iterator[None]]) -> None:
        self._compile_for = compile_for
        self._started: set[int] = set()
        self._device = -1  # no device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bridge-cg compiles")

    def saw(self, tokens: int) -> None:
        """Compile for a microbatch's size and those around it, unless sizes of its magnitude came before."""
        magnitude = tokens.bit_length()
        if magnitude not in self._started:
            self._started.add(magnitude)
            if torch.cuda.is_available():
                self._device = torch.cuda.current_device()
            self._go_on(self._kernels(tokens))

    def _kernels(self, tokens: int) -> Iterator[None]:
        for factor in FACTORS:
            yield from self._compile_for(max(int(tokens * factor), 1))

    def _go_on(self, kernels: Iterator[None]) -> None:
        with suppress(RuntimeError):  # the process ends
            self._thread.submit(self._compile, kernels)

    def _compile(self, kernels: Iterator[None]) -> None:
        """Compile one kernel; the others are the thread's next task, so that a process that ends waits for one."""
        try:
            with TURNS.compiling(), torch.cuda.device(self._device):
                next(kernels)
        except StopIteration:
            return
        except Exception:
            LOGGER.debug("kernels were not compiled ahead", exc_info=True)
            return
        self._go_on(kernels)
