"""Passes over one layer of each kind: they make what depends on shapes, in a part of the time of a whole pass."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

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


class _Pass:
    """Runs layers' forwards, one of each kind."""

    def __init__(self) -> None:
        # Of each kind: the layer that computed, what it returned behind the hidden states, all None (None: it returned
        # these alone), and its other arguments, kept so that no other object takes their identity.
        self._ran: dict[Hashable, tuple[nn.Module, tuple[None, ...] | None, tuple[object, ...]]] = {}
        self._kinds: dict[nn.Module, Hashable] = {}
        # Of configurations, which have hundreds of settings each and are shared by modules.
        self._settings: dict[int, tuple[object, Hashable]] = {}

    def call(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward, or return its hidden states where a layer of its kind ran."""
        hidden, *others = (*args, *kwargs.values()) or (None,)
        if not isinstance(hidden, Tensor):
            return forward(*args, **kwargs)
        differentiable = hidden.requires_grad and torch.is_grad_enabled()
        key = self._kind(layer), hidden.shape, hidden.dtype, differentiable, tuple(map(id, others))
        ran, behind, _ = self._ran.get(key, (layer, None, ()))
        if ran is not layer:
            return hidden if behind is None else (hidden, *behind)
        returned = forward(*args, **kwargs)
        made, *rest = returned if isinstance(returned, tuple) and returned else (returned,)
        passes_on = isinstance(made, Tensor) and (made.shape, made.dtype) == (hidden.shape, hidden.dtype)
        if passes_on and all(value is None for value in rest):
            nones = (None,) * len(rest) if isinstance(returned, tuple) else None
            self._ran[key] = layer, nones, tuple(others)
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
            with WATCHER.silent():
                method = InstanceMethod(layer, "forward", partial(once.call, layer, layer.forward))
            stack.callback(_restore, method)
        yield


def _restore(method: InstanceMethod) -> None:
    with WATCHER.silent():
        method.restore()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what the outermost lists of modules hold."""
    if isinstance(module, nn.ModuleList):
        yield from module.children()  # a list may also hold None
        return
    for child in module.children():
        yield from _layers(child)


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
