"""Tensors that a loop gives other memory (`parameter.data = ...`): their values return to addresses of their own.

A copy of a model's weights on the device takes a millisecond, recordings at other addresses take a second.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...announce import LOGGER
from .tensor_homes import Homes, Memory, RangeMemory, is_alone
from .virtual_memory import DeviceMemoryError


class ReturningTensors:
    """Tensors with addresses of their own, to which their values return whenever they were given other memory.

    Args:
        new_memory: Makes what has the addresses, on a device.
        device: The device.
    """

    def __init__(self, device: torch.device, new_memory: Callable[[torch.device], Memory] = RangeMemory) -> None:
        self._device, self._new_memory = device, new_memory
        self._homes: Homes | None = None

    def settle(self, moved: Sequence[Tensor]) -> None:
        """Give tensors memory at their own addresses, with the values that they have.

        Nothing happens where one of them is off the device, shares its memory or is no plain tensor. Without memory for
        a second copy of some `GROUP_BYTES`, those that are left stay elsewhere. Where they are not those of last time,
        or somebody holds what is at the addresses, they get others.

        Args:
            moved: Tensors that lie elsewhere than before.
        """
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._settle(moved)
        except (torch.OutOfMemoryError, DeviceMemoryError) as error:
            LOGGER.info("weights do not return to the addresses that graphs have recorded: %s", error)
            self._release_unused()

    def _settle(self, moved: Sequence[Tensor]) -> None:
        if not moved or (self._homes is not None and self._homes.have(moved)):
            return
        if self._homes is not None and not self._homes.fit(moved):
            self._homes = None  # its memory goes back once nobody is there
        if not all(map(self._can_be_moved, moved)):
            return
        if self._homes is None:
            self._homes = Homes(partial(self._new_memory, self._device), moved)
        self._homes.bring()

    def _can_be_moved(self, tensor: Tensor) -> bool:
        """Whether nobody else sees that a tensor gets other memory."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device == self._device
        return plain and tensor.is_contiguous() and is_alone(tensor)

    def release(self) -> int:
        """Take the addresses' memory off the device unless some tensor is there; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        return 0 if self._homes is None else self._homes.release()

    def _release_unused(self) -> None:
        try:
            self.release()
        except DeviceMemoryError as error:
            LOGGER.info("memory for weights stays on the device: %s", error)

    def stop(self) -> None:
        """Give tensors that are at their addresses memory of PyTorch's, if there is room."""
        if self._homes is None:
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._homes.leave()
        except torch.OutOfMemoryError as error:
            LOGGER.info("weights stay where graphs read them: %s", error)
        self._release_unused()
        self._homes = None
