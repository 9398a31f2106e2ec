"""Training processes forked from one that has imported the stack, half a minute's work for each of them otherwise."""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver

PRELOADED = "examples.photographs.preloaded"


def start_server(environment: Mapping[str, str]) -> None:
    """Start the process that processes are forked from, unless it runs; it imports while this one goes on.

    Args:
        environment: Its variables. What reads variables as it is imported has read these.
    """
    multiprocessing.set_forkserver_preload([PRELOADED])
    wanted = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # As few threads as each of several processes has; none may be there when it is forked.
    with _variables({**wanted, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
