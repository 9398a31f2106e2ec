"""Compiling kernels ahead, in a thread of its own while steps run; recordings go first and compile what is missing."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Condition

import torch

from ...announce import LOGGER

# Compiles one kernel in any thread when called; equal ones compile the same.
Compilation = Callable[[], None]
# Tokens whose kernels are compiled before a microbatch was seen: most kernels are those of all sizes.
BEGIN_WITH = 1024
# Kernels that a recording lets be compiled at once: most of it is done by processes and C++.
MOST_AT_ONCE = 8

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

    What cannot be compiled here is left to the recording, which raises the error.

    Args:
        compilations: Yields what compiles all that recordings call for a number of tokens.
    """

    def __init__(self, compilations: Callable[[int], Iterator[Compilation]]) -> None:
        self._compilations = compilations
        self._started: set[int] = set()
        self._done: set[Compilation] = set()
        self._ahead: deque[Iterator[Compilation]] = deque()
        self._device = -1  # no device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bridge-cg compiles")

    def begin(self, device: torch.device) -> None:
        """Compile for a size that may come, on a GPU: the first kernel of a process loads the compiler, too."""
        if device.type == "cuda":
            self._device = device.index
            self._go_on(self._missing((BEGIN_WITH,)))

    def saw(self, tokens: int) -> None:
        """Compile for a microbatch's size and those around it, unless sizes of its magnitude came before."""
        magnitude = tokens.bit_length()
        if magnitude not in self._started:
            self._started.add(magnitude)
            self._find_device()
            self._go_on(self._missing(max(int(tokens * factor), 1) for factor in FACTORS))

    def stop(self) -> None:
        """Compile nothing any more, but for a kernel that is under way: what compiles others holds the model."""
        self._ahead = deque()
        self._compilations = lambda tokens: iter(())

    def finish(self, tokens: int) -> None:
        """Compile now what is still missing for a size, several kernels at once; called inside `TURNS.recording`.

        Threads of its own also find out what that is: the caller's may have gradients off, or hooks of a checkpoint.
        """
        self._find_device()
        with ThreadPoolExecutor(_at_once()) as pool:
            try:
                missing = pool.submit(lambda: list(dict.fromkeys(self._missing((tokens,))))).result()
            except Exception:
                LOGGER.debug("what to compile was not found", exc_info=True)
                return
            list(pool.map(self._compile, missing))

    def _find_device(self) -> None:
        if torch.cuda.is_available():
            self._device = torch.cuda.current_device()

    def _missing(self, sizes: Iterable[int]) -> Iterator[Compilation]:
        for tokens in sizes:
            yield from (each for each in self._compilations(tokens) if each not in self._done)

    def _compile(self, kernel: Compilation) -> None:
        try:
            with torch.cuda.device(self._device):
                kernel()
        except Exception:
            LOGGER.debug("a kernel was not compiled ahead", exc_info=True)
        self._done.add(kernel)

    def _go_on(self, missing: Iterator[Compilation]) -> None:
        self._ahead.append(missing)
        self._submit()

    def _submit(self) -> None:
        with suppress(RuntimeError):  # the process ends
            self._thread.submit(self._compile_next)

    def _compile_next(self) -> None:
        """Compile one kernel; the others are the thread's next task, so that a process that ends waits for one."""
        with TURNS.compiling():
            ahead = self._ahead  # `stop` may put another one in its place meanwhile
            if not ahead:
                return
            missing = ahead.popleft()
            try:
                self._compile(next(missing))
            except StopIteration:
                return
            except Exception:
                LOGGER.debug("kernels were not compiled ahead", exc_info=True)
                return
            ahead.append(missing)
        self._submit()


def _at_once() -> int:
    """Return how many kernels this rank's share of the processors compiles at once."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // ranks))
