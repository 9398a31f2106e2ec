"""Token ids of batches that the host has while their copies are on the device."""

from ..graphs.host_copies import HostTensors

TOKENS = HostTensors()
