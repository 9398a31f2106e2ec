"""Ports for training runs on this machine."""

import itertools
import os
import socket

FIRST_PORT, PORTS = 20_000, 10_000
# Processes that ask at the same time, with neighbouring numbers, start as far apart.
CALLS_EACH = 97
_CALLS = itertools.count()


def free_port() -> int:
    """Return a port that nothing listens on, another one at each call.

    It is below those that the system gives to connections: such a one could be taken before the run listens on it.

    Raises:
        OSError: There is none.
    """
    for _ in range(PORTS):
        port = FIRST_PORT + (os.getpid() * CALLS_EACH + next(_CALLS)) % PORTS
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} is free")
