"""The ways to run the vision tower that are compared: eager, upstream's graphs, torch.compile, the plugin."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

import bridge_cg_plugin
from bridge_cg_plugin.cli.runs.comparison import WRONG
from scripts.performance.models.tower import Batch, MainGrads

# What stands in for the tower, and fields for the record.
Prepared = tuple[Callable[..., tuple[Any, ...]], dict[str, Any]]

GIB = 2**30
# Upstream makes a causal mask of tokens squared on the host for each layer: minutes beyond this, and it captures one
# length for a whole run, which a larger image exceeds.
UPSTREAM_LONGEST = 8192
# Bucket sizes for which a second bucket, half as large, is captured as well, to see what it adds.
HALF_AS_WELL = (2304, 6720, 16384)


def check_attention(wanted: str, called: str) -> None:
    """Refuse to measure graphs whose attention is not the one asked for.

    Args:
        wanted: `vision_cuda_graph_tuning.attention`.
        called: What recordings call, by the same names.

    Raises:
        RuntimeError: It is not.
    """
    if wanted not in ("auto", called):
        raise RuntimeError(f"attention={wanted} cannot be had: {called} is called")


class Mode(Protocol):
    """One way of running the tower."""

    name: str

    @contextmanager
    def on(self, model: nn.Module, grads: MainGrads, batch: Batch) -> Iterator[Prepared]:
        """Prepare the tower for the batch's size and yield what runs it, with fields for the record."""


class Plugin:
    """The plugin's graphs, a bucket of exactly the batch's size.

    Args:
        choices: Fields of `VisionGraphOptions` that are not the default.
    """

    def __init__(self, name: str, **choices: str | int) -> None:
        self.name = name
        self.choices: dict[str, Any] = dict(choices)
        self._helper: Any = None

    def training_step(self) -> AbstractContextManager[None]:
        """Return what a training step's microbatches run in, inside `on`."""
        step: AbstractContextManager[None] = self._helper.graphs.step()
        return step

    @contextmanager
    def on(self, model: nn.Module, grads: MainGrads, batch: Batch) -> Iterator[Prepared]:
        """See `Mode`."""
        from bridge_cg_plugin.options import VisionGraphOptions

        half = batch.tokens // 2 // 4 * 4
        both = self.name == "plugin" and batch.tokens in HALF_AS_WELL
        options = VisionGraphOptions(
            impl="transformer_engine",
            buckets=(half, batch.tokens) if both else (batch.tokens,),
            slots=1,
            max_frames=batch.frames,
            evaluation=False,
            cost_fallback=False,
            strict=True,
            **self.choices,
        )
        helper = self._helper = new_helper(model, options)
        for region in helper.graphs._regions:
            region.sources.current.sinks._reduction = grads
        try:
            check_attention(options.attention, helper.graphs.workload.attention)
            statistics = helper.graphs.statistics()
            large = memory_at(statistics, batch.tokens)
            fields = {
                "bucket": batch.tokens,
                "slots": 1,
                "memory_gb": (large + statistics.static_bytes) / GIB,
                "capture_s": statistics.capture_seconds,
            }
            if both and large:
                fields["added_share"] = memory_at(statistics, half) / large
            yield model, fields
            ran = helper.graphs.statistics()
            if ran.fallbacks or not ran.replays:
                raise RuntimeError(f"the plugin did not replay: {ran.replays} replays, fallbacks {dict(ran.fallbacks)}")
        finally:
            helper.delete_cuda_graphs()


def new_helper(model: nn.Module, options: Any) -> Any:
    """Capture the tower with the options and return its helper."""
    from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper

    helper = VisionTECudaGraphHelper(model, model.config, options=options)
    try:
        helper.create_cudagraphs()
    except BaseException:
        if helper.graphs is not None:
            helper.graphs.detach()
        helper.graphs = None
        raise
    return helper


def memory_at(statistics: Any, tokens: int) -> int:
    """Return the pool memory in bytes that the buckets of one capacity added."""
    return sum(counts.memory for bucket, counts in statistics.buckets.items() if bucket.tokens == tokens)


class Upstream:
    """Upstream's own vision graphs, captured at exactly the batch's length: the best that they do.

    The tower must have been built with `impl="transformer_engine"`, in a process without the plugin.
    """

    name = "upstream"
    wrong = WRONG

    @contextmanager
    def on(self, model: nn.Module, grads: MainGrads, batch: Batch) -> Iterator[Prepared]:
        """See `Mode`."""
        from megatron.core.transformer.cuda_graphs import VisionTECudaGraphHelper

        if bridge_cg_plugin.status()["active"]:
            raise RuntimeError("the plugin is active in this process; start it with BRIDGE_CG_PLUGIN=0")
        length = min(batch.tokens, UPSTREAM_LONGEST)
        _one_microbatch_a_step()
        helper = VisionTECudaGraphHelper([_Holder(model)], model.config, length, 1, 1)
        fields = {"wrong": self.wrong, "captured_tokens": length}
        with _configured(model, "transformer_engine", length):
            if batch.tokens <= length:
                torch.cuda.empty_cache()  # as the capture does
                before = torch.cuda.memory_reserved()
                began = time.perf_counter()
                grads.release()
                try:
                    helper.create_cudagraphs()
                finally:
                    grads.attach()
                fields["capture_s"] = time.perf_counter() - began
                fields["memory_gb"] = (torch.cuda.memory_reserved() - before) / GIB
            try:
                yield model, fields
            finally:
                if helper.graphs_created():
                    helper.delete_cuda_graphs()


def _one_microbatch_a_step() -> None:
    """Tell megatron-core how many microbatches a step has, as its training would; the helper asks."""
    from megatron.core import num_microbatches_calculator as calculator

    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, 1, 1, 1)


class _Holder(nn.Module):
    """What upstream's helper looks for: a model that has a vision model."""

    def __init__(self, vision_model: nn.Module) -> None:
        super().__init__()
        self.vision_model = vision_model


@contextmanager
def _configured(model: nn.Module, impl: str, length: int) -> Iterator[None]:
    """Set upstream's fields on the configuration of every module, for the duration."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    values = {"cuda_graph_impl": impl, "max_vision_cuda_graph_seq_length": length}
    before = [{name: getattr(config, name, None) for name in values} for config in configs]
    for config in configs:
        vars(config).update(values)
    try:
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            vars(config).update(old)


class Compiled:
    """The tower under `torch.compile`.

    Args:
        compile_mode: The argument `mode` of `torch.compile`.
    """

    def __init__(self, name: str, compile_mode: str) -> None:
        self.name, self.compile_mode = name, compile_mode
        self._compiled: Any = None

    @contextmanager
    def on(self, model: nn.Module, grads: MainGrads, batch: Batch) -> Iterator[Prepared]:
        """See `Mode`. The record has the graph breaks, and the time of the first step, which compiles."""
        from torch._dynamo.utils import counters

        if self._compiled is None:
            self._compiled = torch.compile(model, mode=self.compile_mode)
        counters.clear()
        began = time.perf_counter()
        self._run(batch)
        breaks = sum(counters["graph_break"].values())
        yield self._call, {"compile_s": time.perf_counter() - began, "graph_breaks": breaks}

    def _run(self, batch: Batch) -> None:
        from scripts.performance.models.tower import step

        step(self._call, batch)

    def _call(self, pixels: torch.Tensor, grid: torch.Tensor) -> tuple[Any, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        outputs: tuple[Any, ...] = self._compiled(pixels, grid)
        return outputs


class Eager:
    """The tower as it is."""

    name = "eager"

    @contextmanager
    def on(self, model: nn.Module, grads: MainGrads, batch: Batch) -> Iterator[Prepared]:
        """See `Mode`."""
        with _configured(model, "none", 0):
            yield model, {}


MODES: dict[str, Callable[[], Mode]] = {
    "eager": Eager,
    "plugin": lambda: Plugin("plugin", kernels="exact", streams=1),
    "plugin_fast": lambda: Plugin("plugin_fast", kernels="fast", streams=1),
    "plugin_streams": lambda: Plugin("plugin_streams", kernels="fast", streams=2),
    "plugin_flash": lambda: Plugin("plugin_flash", kernels="fast", attention="flash", streams=1),
    "plugin_flash_streams": lambda: Plugin("plugin_flash_streams", kernels="fast", attention="flash", streams=2),
    "plugin_te_attention": lambda: Plugin(
        "plugin_te_attention", kernels="exact", attention="transformer_engine", streams=1
    ),
    "upstream": Upstream,
    "compile": lambda: Compiled("compile", "default"),
    "compile_reduce_overhead": lambda: Compiled("compile_reduce_overhead", "reduce-overhead"),
}
