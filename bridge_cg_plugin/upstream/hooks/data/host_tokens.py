"""A batch's token ids on the host, from where Bridge's Qwen3-VL step copies them to the device to its model's forward.

What upstream asks the device about tokens (where images are, positions, lengths) the host can then answer itself.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....graphs.host_copies import HostTensors, on_device
from ...host_batch import PACK_OFFSETS, TOKENS
from ...seams.patches import Patch
from ...seams.registry import seam
from ..helpers.graph_helper import any_on_graphs

# Those that the step's padding returned and the step then cloned: its model gets no others.
STEP_TOKENS = HostTensors()


class _StepTokens(Tensor):
    """Tokens as the step's padding returns them: a clone keeps their host values.

    Any other operation gives plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    host: Tensor

    def clone(self, **kwargs: Any) -> Tensor:
        """Return a plain tensor of these tokens."""
        made = self.as_subclass(Tensor).clone(**kwargs)
        for known in (TOKENS, STEP_TOKENS):
            known.remember(made, self.host)
        return made


def _with_host_copy(tokens: Tensor, host: Tensor) -> Tensor:
    noted = tokens.as_subclass(_StepTokens)
    noted.host = host
    return noted


def _padded_on_host(old: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Pad tokens, and compute what describes a pack, on the host, by upstream's own code."""

    @functools.wraps(old)
    def pad_and_pack(tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        host = TOKENS.known(tokens) if any_on_graphs() else None
        if host is None:
            return old(tokens, *args, **kwargs)
        padded, *others, params = old(host, *args, **kwargs)
        on = tokens if padded is host else on_device(padded, tokens.device)
        return _with_host_copy(on, padded), *others, params_on_device(params, tokens.device)

    return pad_and_pack


def with_tensors(params: Any, moved: Callable[[Tensor], Tensor | None]) -> Any:
    """Return a pack's description with other tensors in the place of its own; None where there is none for one."""
    made, others = copy.copy(params), dict[int, Tensor | None]()
    for name, value in vars(params).items():
        if isinstance(value, Tensor):
            if id(value) not in others:
                others[id(value)] = moved(value)
            setattr(made, name, others[id(value)])
    return None if any(each is None for each in others.values()) else made


def params_on_device(params: Any, device: torch.device) -> Any:
    """Return a pack's description with its offsets on the device, where packed graphs know them without reading."""

    def moved(offsets: Tensor) -> Tensor:
        made = on_device(offsets, device)
        PACK_OFFSETS.remember(made, offsets)
        return made

    return with_tensors(params, moved)


PATCHES = (Patch(seam("step_padding"), _padded_on_host),)
