"""Device addresses that keep their place while the memory behind them comes and goes, by CUDA's driver."""

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor

from ...announce import LOGGER

# Values of cuda.h.
SUCCESS, OUT_OF_MEMORY = 0, 2
PINNED, ON_DEVICE, READ_AND_WRITE, MINIMUM_GRANULARITY = 1, 1, 3, 0


class DeviceMemoryError(RuntimeError):
    """A call of the driver failed; the message names the call and the error."""


class NoDeviceMemory(DeviceMemoryError):
    """The device has too little free memory."""


class VirtualMemory(Protocol):
    """Addresses, memory, and putting one behind the other. Sizes and addresses are multiples of `granularity`.

    Attributes:
        granularity: In bytes.
    """

    granularity: int

    def reserve(self, nbytes: int) -> int:
        """Return the first of `nbytes` addresses that nothing else gets until `free`."""

    def free(self, address: int, nbytes: int) -> None:
        """Give addresses back; no memory is behind them."""

    def create(self, nbytes: int) -> int:
        """Return a handle of device memory.

        Raises:
            NoDeviceMemory: There is not enough.
        """

    def destroy(self, handle: int) -> None:
        """Give memory back, once it is behind no address."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put memory behind addresses that were reserved together, for reading and writing."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Take memory away from addresses, all that `map` put there; no work of the device uses them."""

    def host_memory(self, nbytes: int) -> Tensor:
        """Return `[nbytes]` uint8 memory of the host, fast to copy to and from the device if there is such."""

    def read(self, address: int, content: Tensor) -> None:
        """Copy device memory to the host, as much as `content` holds."""

    def write(self, address: int, content: Tensor) -> None:
        """Copy `content` to device memory; the copy has ended on return."""

    def copy(self, address: int, other: int, nbytes: int) -> None:
        """Copy device memory from the `other` address; the copy has ended on return."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaVirtualMemory:
    """Memory of one GPU. See `VirtualMemory`.

    Args:
        device: Index of the GPU. Its context is current in every thread that calls.

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

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == SUCCESS:
            return
        text = ctypes.c_char_p()
        self._driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        said = (text.value or str(status).encode()).decode()
        raise (NoDeviceMemory if status == OUT_OF_MEMORY else DeviceMemoryError)(f"{name}: {said}")

    def reserve(self, nbytes: int) -> int:
        """See `VirtualMemory`."""
        address = ctypes.c_uint64()
        rest = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(nbytes), *rest)
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """See `VirtualMemory`."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def create(self, nbytes: int) -> int:
        """See `VirtualMemory`."""
        handle = ctypes.c_uint64()
        what = ctypes.c_size_t(nbytes), ctypes.byref(self._properties), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), *what)
        return handle.value

    def destroy(self, handle: int) -> None:
        """See `VirtualMemory`."""
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """See `VirtualMemory`."""
        begin, size = ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        self._call("cuMemMap", begin, size, ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_uint64(0))
        try:
            self._call("cuMemSetAccess", begin, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        except DeviceMemoryError:
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """See `VirtualMemory`."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def host_memory(self, nbytes: int) -> Tensor:
        """See `VirtualMemory`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            LOGGER.info("the host keeps %d bytes of graphs in pageable memory, which is slower: %s", nbytes, error)
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def read(self, address: int, content: Tensor) -> None:
        """See `VirtualMemory`."""
        begin, size = ctypes.c_uint64(address), ctypes.c_size_t(content.nbytes)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(content.data_ptr()), begin, size)

    def write(self, address: int, content: Tensor) -> None:
        """See `VirtualMemory`."""
        begin, size = ctypes.c_uint64(address), ctypes.c_size_t(content.nbytes)
        self._call("cuMemcpyHtoD_v2", begin, ctypes.c_void_p(content.data_ptr()), size)
        self._wait()  # from pageable memory, the call may return before the copy has ended

    def copy(self, address: int, other: int, nbytes: int) -> None:
        """See `VirtualMemory`."""
        to, begin = ctypes.c_uint64(address), ctypes.c_uint64(other)
        self._call("cuMemcpyDtoD_v2", to, begin, ctypes.c_size_t(nbytes))
        self._wait()

    def _wait(self) -> None:
        """Wait for copies: PyTorch's own streams do not wait for the stream that they run on."""
        self._call("cuStreamSynchronize", ctypes.c_uint64(0))
