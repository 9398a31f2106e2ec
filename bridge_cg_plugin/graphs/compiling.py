"""Compiling kernels in a thread of its own while warm-up steps run."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..announce import LOGGER

# How far from a microbatch's size, as factors, those of buckets may lie: the kernels of a size differ by its magnitude.
FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25, 8.0)


class KernelCompiler:
    """Compiles for sizes like those seen; a recording that comes later finds its kernels ready.

    What cannot be compiled here is left to the recording, which raises the error.

    Args:
        compile_for: Compiles what recordings call for a number of tokens.
    """

    def __init__(self, compile_for: Callable[[int], None]) -> None:
        self._compile_for = compile_for
        self._started: set[int] = set()
        self._pool: ThreadPoolExecutor | None = None

    def saw(self, tokens: int) -> None:
        """Compile for a microbatch's size and those around it, unless sizes of its magnitude came before."""
        magnitude = tokens.bit_length()
        if magnitude in self._started:
            return
        self._started.add(magnitude)
        self._pool = self._pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="bridge-cg compiles")
        self._pool.submit(self._compile, tokens)

    def _compile(self, tokens: int) -> None:
        try:
            for factor in FACTORS:
                self._compile_for(max(int(tokens * factor), 1))
        except Exception:
            LOGGER.debug("kernels were not compiled ahead", exc_info=True)

    def wait(self) -> None:
        """Wait for what was started."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
