"""What makes the host wait for a device, found on any device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge_cg_plugin.vision.known_mask import KnownMask

ATEN = torch.ops.aten
READS = (ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.masked_select.default, ATEN.equal.default)


class HostWait(AssertionError):
    """An operation whose result's size, or the host's next step, depends on what a tensor holds."""


class no_host_waits(TorchDispatchMode):
    """Raises where the host would wait for the device: it reads a tensor, or indexes by a boolean mask."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, KnownMask) for kind in types):
            return NotImplemented  # what the mask makes of it comes here in its turn
        by_mask = func.overloadpacket in (ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_) and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func in READS or by_mask:
            raise HostWait(str(func))
        return func(*args, **(kwargs or {}))
