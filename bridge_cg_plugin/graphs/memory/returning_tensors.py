"""Tensors that a loop gives other memory (`parameter.data = ...`): their values return to addresses of their own.

A copy of a model's weights on the device takes a millisecond, recordings at other addresses take a second.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...announce import LOGGER
from .tensor_homes import Group, Memory, RangeMemory, groups_of, is_alone
from .virtual_memory import DeviceMemoryError


class ReturningTensors:
    """Tensors with addresses of their own, to which their values return whenever they were given other memory.

    Args:
        new_memory: Makes what has the addresses, on a device.
        device: The device.
    """

    def __init__(self, device: torch.device, new_memory: Callable[[torch.device], Memory] = RangeMemory) -> None:
        self._device, self._new_memory = device, new_memory
        # One after the other is brought there, so that there are two copies of one of them at a time.
        self._groups: list[Group] = []

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
        if not moved or self._have(moved):
            return
        if not self._fit(moved):
            self._groups = []  # their memory goes back once nobody is there
        if not all(map(self._can_be_moved, moved)):
            return
        self._groups = self._groups or [
            Group(partial(self._new_memory, self._device), each) for each in groups_of(moved)
        ]
        for group in self._groups:
            group.bring()

    def _have(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all tensors are there already: recordings of another state of the model were made elsewhere."""
        there = set().union(*(group.addresses() for group in self._groups))
        return all(tensor.data_ptr() in there for tensor in tensors)

    def _fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these were there last time, as large, and nobody else holds what is at the addresses."""
        known = [tensor for group in self._groups for tensor in group.tensors]
        same = len(tensors) == len(known) and all(map(operator.is_, tensors, known))
        return same and all(group.fits() for group in self._groups)

    def _can_be_moved(self, tensor: Tensor) -> bool:
        """Whether nobody else sees that a tensor gets other memory."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device == self._device
        return plain and tensor.is_contiguous() and is_alone(tensor)

    def release(self) -> int:
        """Take the addresses' memory off the device unless some tensor is there; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        return sum(group.release() for group in self._groups)

    def _release_unused(self) -> None:
        try:
            self.release()
        except DeviceMemoryError as error:
            LOGGER.info("memory for weights stays on the device: %s", error)

    def stop(self) -> None:
        """Give tensors that are at their addresses memory of PyTorch's, if there is room."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                for group in self._groups:
                    group.leave()
        except torch.OutOfMemoryError as error:
            LOGGER.info("weights stay where graphs read them: %s", error)
        self._release_unused()
        self._groups = []
