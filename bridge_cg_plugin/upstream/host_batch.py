"""What the host has of batches whose tensors are on the device, so that it need not wait to read them."""

from ..graphs.host_copies import HostCopies, HostTensors
from ..vision.batch import HostGrids

TOKENS = HostTensors()
"""Token ids, from where they are copied or read to the model's forward."""

KEPT = HostTensors()
"""Which tokens are kept, of batches that were padded to one length."""

GRIDS = HostGrids()
"""Grids of images and videos."""

PACK_OFFSETS = HostCopies()
"""Offsets of the documents of packs."""
