"""Addresses of the host that nothing gets while they are held: freed memory is not given to others."""

import ctypes
import mmap

# Linux: fail where something is mapped there already.
FIXED_NOREPLACE = 0x100000
NO_ACCESS = 0
# What the C library puts beside a large block in its mapping.
BESIDE = 128

_C = ctypes.CDLL(None)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HeldAddresses:
    """Holds the pages of a large block that was freed, unless somebody has some of them.

    Args:
        address: Of the block.
        nbytes: Its size.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self._start = address - address % mmap.PAGESIZE
        self._nbytes = -(-(nbytes + BESIDE) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED_NOREPLACE
        self.held = _C.mmap(self._start, self._nbytes, NO_ACCESS, flags, -1, 0) == self._start

    def let_go(self) -> None:
        """Let others have them again."""
        if self.held:
            _C.munmap(self._start, self._nbytes)
            self.held = False
