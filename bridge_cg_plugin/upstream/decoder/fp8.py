"""Layers that compute in fp8 while they are recorded: weights quantized once a step, scales that follow microbatches.

Eager quantizes a weight in a step's first microbatch and keeps the result in its module. Recordings read and write the
same copies, and whether they write is an input of the graph: eager and replayed microbatches of a step can alternate.
Parameters that are in fp8 themselves are read where they are.
"""

import importlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.errors import CaptureError
from ...graphs.instance import every_module
from ...graphs.recordings.recording import Gradients
from ...language.packed.program import DecoderPart, RecordedPack
from ...upstream_types import UpstreamModule
from ..seams.registry import seam
from ..wrappers import overridden

# Where Transformer Engine's tensors have values and scales: those with one scale, and those with a scale for a block.
COLUMNS, STALE = "_transpose", "_transpose_invalid"
WITH_ONE_SCALE = ("_data", COLUMNS, "_scale_inv")
WITH_SCALES = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


class _Held:
    """What entries of dicts held when they were noted.

    Args:
        what: Is said of those that hold something else.
        noted: Returns what is kept of a value.
        is_there: Whether a value is still what was noted; asked of all entries in every microbatch.
    """

    def __init__(
        self,
        what: str,
        noted: Callable[[Any], Any] = lambda value: value,
        is_there: Callable[[Any, Any], bool] = operator.is_,
    ) -> None:
        self._what, self._noted, self._is_there = what, noted, is_there
        self.entries: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}

    def note(self, entries: Iterable[tuple[dict[str, Any], str]]) -> None:
        """Note what entries hold.

        Raises:
            CaptureError: One holds something else than was noted before.
        """
        found = {(id(table), key): (table, key, self._noted(table[key])) for table, key in entries}
        if not self._are_there(self.entries[place] for place in found.keys() & self.entries.keys()):
            raise CaptureError(self._what)
        self.entries.update(found)

    def are_there(self) -> bool:
        """Whether all entries hold what they did."""
        return self._are_there(self.entries.values())

    def _are_there(self, entries: Iterable[tuple[dict[str, Any], str, Any]]) -> bool:
        return all(self._is_there(table.get(key), noted) for table, key, noted in entries)


def _addresses(parameter: Any) -> dict[str, int]:
    """Return the addresses of what a parameter's tensor holds, by their names there."""
    held = {name: vars(parameter).get(name) for name in (*WITH_ONE_SCALE, *WITH_SCALES)}
    return {name: tensor.data_ptr() for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _lies_at(parameter: Any, addresses: dict[str, int]) -> bool:
    held = {} if parameter is None else vars(parameter)
    pairs = zip(map(held.get, addresses), addresses.values(), strict=True)
    return all(tensor is not None and tensor.data_ptr() == address for tensor, address in pairs)


def is_quantized(parameter: object) -> bool:
    """Whether a parameter is kept in fp8."""
    return hasattr(parameter, "update_usage")


@torch.no_grad()
def complete(tensor: Any) -> None:
    """Let a quantized tensor have what both a forward and a backward read, and keep it where values are written."""
    if tensor._quantizer is not None:
        tensor._quantizer.set_usage(rowwise=True, columnwise=True)
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)


CONTEXT, STATE = seam("packed_fp8_context"), seam("packed_fp8_state")
REDUCE = "reduce_and_update_fp8_tensors"
# Of a module: whether a microbatch is a step's first, quantized weights, what quantizes by its scales.
FIRST, COPIES, QUANTIZERS = "is_first_microbatch", "_fp8_workspaces", "quantizers"
DELAYED = "delayed"
# A product's rows must be a multiple of it: weight gradients sum over them.
ROWS = 16
# Of a module's state: what delayed scaling keeps for its forward and its backward.
STATES, KEPT = ("scaling_fwd", "scaling_bwd"), ("scale", "amax_history")


def computes_in_fp8(config: Any) -> bool:
    """Whether layers compute in fp8, as their config is now."""
    return bool(getattr(config, "fp8", None))


def is_delayed(config: Any) -> bool:
    """Whether scales come from earlier microbatches."""
    return computes_in_fp8(config) and bool(config.fp8_recipe == DELAYED)


def is_on_around() -> bool:
    """Whether the caller of the layers has switched fp8 on, besides what their config says."""
    module = sys.modules.get(STATE.module)
    return module is not None and bool(getattr(module, STATE.target).is_fp8_enabled())


def in_fp8(part: DecoderPart, layer: UpstreamModule) -> Callable[[RecordedPack], tuple[Tensor, ...]]:
    """Return what runs a layer's part as the layer's block would: in fp8, where the config has it."""

    def run(pack: RecordedPack) -> tuple[Tensor, ...]:
        if not computes_in_fp8(layer.config):
            return part.run(pack)
        with getattr(importlib.import_module(CONTEXT.module), CONTEXT.target)(layer.config, layer.layer_number - 1):
            return part.run(pack)

    return run


class QuantizedWeights:
    """The quantized copies of a piece's weights, and its parameters that are quantized themselves.

    Args:
        roots: Returns the piece's modules.
        config: The model's.
    """

    def __init__(self, roots: Callable[[], Sequence[nn.Module]], config: Any) -> None:
        self._roots, self._config = roots, config
        # Of all states of the model that were recorded.
        self._linear: dict[UpstreamModule, None] = {}
        self._copies = _Held("weights have other quantized copies than earlier recordings write")
        self._scales = _Held("scales lie elsewhere than earlier recordings read")
        what = "parameters in fp8 lie elsewhere than earlier recordings read"
        self._parameters = _Held(what, _addresses, _lies_at)

    def changed(self) -> bool:
        """Return whether eager would quantize now, and note in the modules that a replay does."""
        for table, name, addresses in self._parameters.entries.values():
            if COLUMNS in addresses and vars(table[name]).get(STALE):
                complete(table[name])  # what is read by column of values written since, as eager's next forward would
        first = [module for module in self._linear if module.is_first_microbatch]
        for module in first:
            vars(module)[FIRST] = False  # PyTorch's own way of setting an attribute takes ten times as long
        return bool(first)

    @property
    def replaced(self) -> bool:
        """Whether modules have other copies, scales or parameters than recordings read and write."""
        return not (self._copies.are_there() and self._scales.are_there() and self._parameters.are_there())

    @contextmanager
    def recorded(self, unchanged: Tensor) -> Iterator[None]:
        """Run a recorded forward inside, which writes the copies unless a flag on the device says that they hold.

        Args:
            unchanged: `[1]` float32, 1 where weights are as they were quantized last.

        Raises:
            CaptureError: Copies came while work was captured, in memory of the graph, or are others than those that
                earlier recordings write; or scales or parameters lie elsewhere.
        """
        if not computes_in_fp8(self._config):
            yield
            return
        linear = linear_modules(self._roots())
        self._linear.update(dict.fromkeys(linear))
        with ExitStack() as stack:
            if not getattr(self._config, "disable_parameter_transpose_cache", False):
                stack.enter_context(_skipping(unchanged))
            before = [dict(getattr(module, COPIES)) for module in linear]
            yield
        self._keep(linear, before)

    def _keep(self, linear: Sequence[UpstreamModule], before: Sequence[dict[str, Any]]) -> None:
        copies = [getattr(module, COPIES) for module in linear]
        new = any(
            old.get(key) is not copy for old, now in zip(before, copies, strict=True) for key, copy in now.items()
        )
        if new and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise CaptureError("weights were not quantized for this mode before")
        quantizers = [vars(module).get(QUANTIZERS, {}) for module in linear]
        scales = [table for table in quantizers if any(map(len, table.values()))]  # a layer in bf16 has none yet
        for entries, tables in ((self._copies, copies), (self._scales, scales)):
            entries.note((table, key) for table in tables for key in table)
        tables = [module._parameters for module in every_module(self._roots())]
        self._parameters.note((t, name) for t in tables for name, each in t.items() if is_quantized(each))


def linear_modules(roots: Sequence[nn.Module]) -> list[UpstreamModule]:
    """Return the modules that quantize their weights and ask whether a microbatch is a step's first."""
    return [module for module in every_module(roots) if {FIRST, COPIES} <= vars(module).keys()]


@contextmanager
def _skipping(unchanged: Tensor) -> Iterator[None]:
    """Let captured products read this flag, where Transformer Engine's own graphs have one for the process."""
    state = getattr(_manager(), "quantization_state", _manager())  # an object with slots, before 2.15 the class
    before = state.skip_fp8_weight_update_tensor
    state.skip_fp8_weight_update_tensor = unchanged
    try:
        yield
    finally:
        state.skip_fp8_weight_update_tensor = before


def _manager() -> Any:
    return getattr(importlib.import_module(STATE.module), STATE.target)


@contextmanager
def fp8_recorded(modules: Sequence[nn.Module], config: Any) -> Iterator[None]:
    """Be around recorded work, and passes before it: no microbatch is a first one, and scales stay as they are.

    Eager updates delayed scales when a pass ends, with other ranks; after a replay, `DelayedScales` does.
    """
    if not computes_in_fp8(config):
        yield
        return
    with ExitStack() as stack:
        for module in linear_modules(modules):
            stack.enter_context(overridden(module, FIRST, False))
        stack.enter_context(overridden(_manager(), REDUCE, staticmethod(lambda forward=True: None)))
        yield


class DelayedScales:
    """Updates delayed scales after a replay, where eager does: the graph has written what they come from."""

    def after_forward(self) -> None:
        """Update what the forward quantizes with, as a pass in which gradients are enabled does."""
        if torch.is_grad_enabled():
            _manager().reduce_and_update_fp8_tensors(forward=True)

    def before_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """See `BackwardObserver`."""

    def after_backward(self, gradients: Gradients) -> None:
        """See `BackwardObserver`: update what the backward quantizes with."""
        _manager().reduce_and_update_fp8_tensors(forward=False)


def delayed_state(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the tensors that delayed scaling keeps, which passes before a capture must leave as they are."""
    metas = [vars(module).get("fp8_meta") or {} for module in every_module(modules)]
    held = (getattr(meta.get(state), name, None) for meta in metas for state in STATES for name in KEPT)
    return [tensor for tensor in held if isinstance(tensor, Tensor)]


def complete_weights(modules: Sequence[nn.Module]) -> None:
    """Let quantized weights, and parameters in fp8, be fit for a backward, too, before one is recorded.

    Eager replaces copies that evaluation made. What is made here is outside of a graph's memory.
    """
    for module in linear_modules(modules):
        for copy in filter(is_quantized, getattr(module, COPIES).values()):
            complete(copy)
    for module in every_module(modules):
        for parameter in filter(is_quantized, module._parameters.values()):
            complete(parameter)
