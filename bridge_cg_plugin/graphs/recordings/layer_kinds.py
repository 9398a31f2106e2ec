"""Passes over one layer of each kind: they make what depends on shapes, in a part of the time of a whole pass."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...announce import LOGGER
from ..changes.dict_watch import WATCHER
from ..changes.values import plain
from ..errors import CaptureError, OutOfMemoryInCapture, release_frames
from ..instance import InstanceMethod
from ..planning.buckets import Bucket

# What counts or names layers; those of one kind differ in it.
NUMBERS = frozenset(("layer_number", "layer_idx", "layer_no", "name"))


class _Ran(NamedTuple):
    """A layer that computed.

    Attributes:
        layer: The layer.
        behind: What it returned behind the hidden states, all None; None where it returned these alone.
        others: Its other arguments, kept so that no other object takes their identity.
    """

    layer: nn.Module
    behind: tuple[None, ...] | None
    others: tuple[object, ...]


class _Pass:
    """Runs layers' forwards, one of each kind."""

    def __init__(self) -> None:
        self._ran: dict[Hashable, _Ran] = {}
        self._kinds: dict[nn.Module, Hashable] = {}
        # Of configurations, which have hundreds of settings each and are shared by modules.
        self._settings: dict[int, tuple[object, Hashable]] = {}

    def call(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward, or return its hidden states where a layer of its kind ran."""
        hidden, others = _split(args, kwargs)
        if hidden is None:
            return forward(*args, **kwargs)
        differentiable = hidden.requires_grad and torch.is_grad_enabled()
        key = self._kind(layer), hidden.shape, hidden.dtype, differentiable, tuple(map(id, others))
        ran = self._ran.get(key)
        if ran is not None and ran.layer is not layer:
            return hidden if ran.behind is None else (hidden, *ran.behind)
        returned = forward(*args, **kwargs)
        made, *behind = returned if isinstance(returned, tuple) and returned else (returned,)
        passes_on = isinstance(made, Tensor) and (made.shape, made.dtype) == (hidden.shape, hidden.dtype)
        if passes_on and all(value is None for value in behind):
            self._ran[key] = _Ran(layer, (None,) * len(behind) if isinstance(returned, tuple) else None, others)
        return returned

    def _kind(self, layer: nn.Module) -> Hashable:
        if layer not in self._kinds:
            self._kinds[layer] = tuple(self._traits(name, module) for name, module in layer.named_modules())
        return self._kinds[layer]

    def _traits(self, name: str, module: nn.Module) -> Hashable:
        """Return what decides a module's kernels: its class, settings, configuration, and its tensors' sizes."""
        held = (*module._parameters.values(), *module._buffers.values())
        tensors = tuple((t.shape, t.dtype, t.requires_grad) for t in held if t is not None)
        return name, type(module), _settings(module), self._configured(getattr(module, "config", None)), tensors

    def _configured(self, config: object) -> Hashable:
        if id(config) not in self._settings:
            self._settings[id(config)] = config, _settings(config)  # it is kept: no other takes its identity
        return self._settings[id(config)][1]


@contextmanager
def one_layer_of_each_kind(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Let the first of layers that are alike compute; the others return the hidden states that they are called with.

    Layers are alike where their modules, the sizes of their parameters, their settings and the arguments besides the
    hidden states are, and where what the first one returns could be another's hidden states.

    Args:
        roots: Modules; what their outermost lists of modules hold are the layers.
    """
    once = _Pass()
    layers = dict.fromkeys(layer for root in roots for layer in _layers(root))
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_calling(layer, partial(once.call, layer, layer.forward)))
        yield


@contextmanager
def _calling(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a layer's forward be another function inside."""
    with WATCHER.silent():
        method = InstanceMethod(layer, "forward", forward)
    try:
        yield
    finally:
        with WATCHER.silent():
            method.restore()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what the outermost lists of modules hold."""
    if isinstance(module, nn.ModuleList):
        yield from module.children()  # a list may also hold None
        return
    for child in module.children():
        yield from _layers(child)


def _split(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, tuple[object, ...]]:
    """Return the hidden states, None where the first argument is something else, and the other arguments."""
    hidden, *others = (*args, *kwargs.values()) or (None,)
    return (hidden if isinstance(hidden, Tensor) else None), tuple(others)


def _settings(holder: object) -> Hashable:
    plain = getattr(holder, "__dict__", {}).items()
    return tuple((name, v) for name, v in plain if _is_setting(v) and name not in NUMBERS)


def _is_setting(value: object) -> bool:
    """Whether a kernel may be chosen by a value. Other objects belong to one layer each."""
    return plain(value) or (type(value) is tuple and all(map(_is_setting, value)))


def record_warmed_up(record: Callable[[bool], None], warm: bool, name: str, bucket: Bucket) -> None:
    """Record, warmed up briefly where only shapes should be new, and fully where that proves wrong.

    Args:
        record: Records; is told whether briefly.
        warm: Whether something like it was recorded before.
        name: Of the region, for the log.
        bucket: What is recorded.

    Raises:
        CaptureError: It failed warmed up fully, or for lack of memory.
    """
    if warm:
        try:
            return record(True)
        except OutOfMemoryInCapture:
            raise
        except CaptureError as error:
            LOGGER.info("%s: bucket %s needs whole warm-up passes: %s", name, bucket, error)
            release_frames(error)  # which hold the recording that is thrown away; the next one takes its memory
    return record(False)
