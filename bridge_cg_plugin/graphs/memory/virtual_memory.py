"""Device addresses that keep their place while the memory behind them comes and goes, by CUDA's driver."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...announce import LOGGER

# Values of cuda.h.
SUCCESS, OUT_OF_MEMORY = 0, 2
# Of a piece of memory at most: pieces go one by one.
PIECE_BYTES = 256 << 20
PINNED, ON_DEVICE, READ_AND_WRITE, MINIMUM_GRANULARITY = 1, 1, 3, 0


class DeviceMemoryError(RuntimeError):
    """A call of the driver failed; the message names the call and the error."""


class NoDeviceMemory(DeviceMemoryError):
    """The device has too little free memory."""


_ADDRESS, _SIZE, _POINTER = ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_void_p
CREATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_ADDRESS), _SIZE, _POINTER, _ADDRESS)
MAP = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS)
ALLOW = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _SIZE, _POINTER, _SIZE)
UNMAP = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _SIZE)
RELEASE = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS)


class DriverTable(ctypes.Structure):
    """`struct driver` of allocator.c: functions, what they are called with, and sizes."""

    _fields_ = (
        ("create", CREATE),
        ("map", MAP),
        ("allow", ALLOW),
        ("unmap", UNMAP),
        ("release", RELEASE),
        ("properties", _POINTER),
        ("access", _POINTER),
        ("page", _SIZE),
        ("most", _SIZE),
    )


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemory:
    """Addresses of one GPU, and memory that is put behind them. Sizes and addresses are multiples of `granularity`.

    Args:
        device: Index of the GPU. Its context is current in every thread that calls.

    Attributes:
        granularity: In bytes.
        table: What makes memory and puts it behind addresses.

    Raises:
        OSError: There is no driver.
        DeviceMemoryError: The GPU has no virtual memory.
    """

    def __init__(self, device: int) -> None:
        # Calls let other threads of Python run: the driver may wait for one of them.
        self._driver = ctypes.CDLL("libcuda.so.1")
        location = _Location(ON_DEVICE, device)
        self._properties = _Properties(type=PINNED, location=location)
        self._access = _Access(location, READ_AND_WRITE)
        found = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(found),
            ctypes.byref(self._properties),
            ctypes.c_int(MINIMUM_GRANULARITY),
        )
        self.granularity = found.value
        names = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")
        kinds = (CREATE, MAP, ALLOW, UNMAP, RELEASE)
        functions = (kind((name, self._driver)) for kind, name in zip(kinds, names, strict=True))
        given = map(ctypes.addressof, (self._properties, self._access))
        self.table = DriverTable(*functions, *given, self.granularity, PIECE_BYTES)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == SUCCESS:
            return
        raise (NoDeviceMemory if status == OUT_OF_MEMORY else DeviceMemoryError)(f"{name}: {self.name_of(status)}")

    def name_of(self, status: int) -> str:
        """Return the name of an error."""
        text = ctypes.c_char_p()
        self._driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        return (text.value or str(status).encode()).decode()

    def reserve(self, nbytes: int) -> int:
        """Return the first of `nbytes` addresses that nothing else gets until `free`."""
        address = ctypes.c_uint64()
        rest = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(nbytes), *rest)
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """Give addresses back; no memory is behind them."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def host_memory(self, nbytes: int) -> Tensor:
        """Return `[nbytes]` uint8 memory of the host, fast to copy to and from the device if there is such.

        Raises:
            DeviceMemoryError: There is none.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            LOGGER.info("the host keeps %d bytes of graphs in pageable memory, which is slower: %s", nbytes, error)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise DeviceMemoryError(f"the host has no memory for what graphs read: {error}") from error

    def wait(self) -> None:
        """Wait for all work of the device."""
        self._call("cuCtxSynchronize")

    def read(self, address: int, content: Tensor) -> None:
        """Copy device memory to the host, as much as `content` holds."""
        begin, size = ctypes.c_uint64(address), ctypes.c_size_t(content.nbytes)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(content.data_ptr()), begin, size)

    def write(self, address: int, content: Tensor) -> None:
        """Copy `content` to device memory; the copy has ended on return."""
        begin, size = ctypes.c_uint64(address), ctypes.c_size_t(content.nbytes)
        self._call("cuMemcpyHtoD_v2", begin, ctypes.c_void_p(content.data_ptr()), size)
        # From pageable memory, the call may return before the copy has ended, for which PyTorch's streams do not wait.
        self._call("cuStreamSynchronize", ctypes.c_uint64(0))
