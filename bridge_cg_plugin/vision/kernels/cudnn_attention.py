"""cuDNN's attention over packed segments, described and planned through NVIDIA's package `nvidia-cudnn-frontend`.

The kernels are those that Transformer Engine runs. Gradients come interleaved as the projection's output lies, and only
rows behind the last segment are zeroed.

Transformer Engine describes it with at least 32 segments, each as long as all tokens rounded up to a power of two, and
the backward has a pass over every row that it was described with. Here segments and their length are the bucket's own,
but for the length in forwards, whose time does not depend on it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...announce import warn
from ...graphs.errors import CaptureError, named
from .padding import clear_padding

PACKAGE = "nvidia-cudnn-frontend"
PLAN = "a plan of cuDNN's attention"
OLDEST_PACKAGE = (1, 24)
# It has engines in Python and lets no plan be chosen; earlier releases have the library's engines alone.
UNCHOSEN = (1, 27)
# Releases before that describe packed backwards for this cuDNN and later ones, whatever is loaded.
THEIR_CUDNN = 92200
# Statistics of packed segments, as numbered by `cudnn.backend_version()`.
OLDEST_CUDNN = 90600
# Forwards take as long, to the percent, where they are described with longer segments than there are (16 of 1408 to
# 8192 tokens, an H200), so that one plan of 45 ms serves many buckets.
SHORTEST_FORWARD = 8192
# Unique numbers of a graph's tensors.
QUERY, KEY, VALUE, OUT, STATS, GRADIENT, D_QUERY, D_KEY, D_VALUE = range(1, 10)
LENGTHS, MIXED_OFFSETS, OUT_OFFSETS, STATS_OFFSETS = range(20, 24)
# Tensors that do not lie interleaved: their offsets, and how many heads' widths lie between two heads.
LAYOUTS = {OUT: (OUT_OFFSETS, 1), GRADIENT: (OUT_OFFSETS, 1), STATS: (STATS_OFFSETS, 1)}


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """What attention over packed segments is planned for.

    Attributes:
        segments: How many segments there are at most.
        largest: Tokens of the largest one at most.
        tokens: Rows of the packed tensors.
        heads, width: Attention heads and the size of one.
        dtype: bf16 or fp16.
        scale: What the products of queries and keys are multiplied by.
    """

    segments: int
    largest: int
    tokens: int
    heads: int
    width: int
    dtype: torch.dtype
    scale: float


def unavailable() -> str | None:
    """Return why cuDNN cannot be called directly here, or None where it can."""
    try:
        cudnn = importlib.import_module("cudnn")
        release = tuple(int(part) for part in cudnn.__version__.split(".")[:2])
        version = cudnn.backend_version()
    except (ImportError, AttributeError, ValueError, RuntimeError, OSError) as error:
        return f"the package {PACKAGE} cannot be used ({type(error).__name__}: {error})"
    if release < OLDEST_PACKAGE:
        return f"{PACKAGE} is {cudnn.__version__}, older than {'.'.join(map(str, OLDEST_PACKAGE))}"
    if release == UNCHOSEN:
        return f"{PACKAGE} {cudnn.__version__} may choose kernels of its own: install another release"
    if release < UNCHOSEN and version < THEIR_CUDNN:
        return f"{PACKAGE} {cudnn.__version__} needs cuDNN {THEIR_CUDNN}, and this is {version}"
    return None if version >= OLDEST_CUDNN else f"cuDNN is {version}, older than {OLDEST_CUDNN}"


def forward_graph(cudnn: ModuleType, shape: SegmentShape, **target: Any) -> Any:
    """Return the graph of `softmax(query key^T scale) value` in every segment, not planned yet.

    Args:
        cudnn: The frontend's module.
        shape: What to describe.
        target: What the graph is for, as `cudnn.pygraph` takes it: `handle`, or `sm_version` and `device_property`.
    """
    described = _Description(cudnn, shape, target)
    inputs = dict(zip("qkv", map(described.tensor, (QUERY, KEY, VALUE)), strict=True))
    outputs = described.graph.sdpa(name="attention", generate_stats=True, **inputs, **described.inside_segments())
    for uid, output in zip((OUT, STATS), outputs, strict=True):
        described.lay_out(output.set_output(True).set_uid(uid), uid)
    outputs[1].set_data_type(cudnn.data_type.FLOAT)
    return described.graph


def backward_graph(cudnn: ModuleType, shape: SegmentShape, **target: Any) -> Any:
    """Return the graph of the gradients of queries, keys and values, not planned yet; arguments as `forward_graph`."""
    described = _Description(cudnn, shape, target)
    names = {"q": QUERY, "k": KEY, "v": VALUE, "o": OUT, "dO": GRADIENT, "stats": STATS}
    gradients = described.graph.sdpa_backward(
        name="attention_backward",
        max_total_seq_len_q=shape.tokens,
        max_total_seq_len_kv=shape.tokens,
        **{name: described.tensor(uid) for name, uid in names.items()},
        **described.inside_segments(),
    )
    for uid, gradient in zip((D_QUERY, D_KEY, D_VALUE), gradients, strict=True):
        described.lay_out(gradient.set_output(True).set_uid(uid), uid)
    return described.graph


class _Description:
    """A graph with what forward and backward have in common.

    Queries, keys and values lie interleaved: `[tokens, heads, 3, width]`. Offsets count elements.
    """

    def __init__(self, cudnn: ModuleType, shape: SegmentShape, target: dict[str, Any]) -> None:
        kinds = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
        self._cudnn, self._shape, self._kind = cudnn, shape, kinds[shape.dtype]
        self.graph = cudnn.pygraph(
            io_data_type=self._kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            **target,
        )
        self._offsets: dict[int, Any] = {}

    def tensor(self, uid: int) -> Any:
        """Return an input of the graph."""
        dim, stride, offsets = self._layout(uid)
        kind = self._cudnn.data_type.FLOAT if uid == STATS else self._kind
        return self._input(uid, dim, stride, kind, offsets)

    def lay_out(self, output: Any, uid: int) -> None:
        """Say where an output of the graph lies."""
        dim, stride, offsets = self._layout(uid)
        output.set_dim(dim).set_stride(stride).set_ragged_offset(offsets)

    def inside_segments(self) -> dict[str, Any]:
        """Return what keeps attention inside segments, as arguments of cuDNN's operations."""
        lengths = self._per_segment(LENGTHS, self._shape.segments, self._cudnn.data_type.INT32)
        scale = self._shape.scale
        return {"attn_scale": scale, "use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}

    def _layout(self, uid: int) -> tuple[list[int], list[int], Any]:
        """Return sizes `[segments, heads, rows, width]`, strides and offsets of segments."""
        shape, (kind, parts) = self._shape, LAYOUTS.get(uid, (MIXED_OFFSETS, 3))
        width = 1 if uid == STATS else shape.width
        row = shape.heads * parts * width
        if kind not in self._offsets:
            self._offsets[kind] = self._per_segment(kind, shape.segments + 1, self._cudnn.data_type.INT64)
        dim = [shape.segments, shape.heads, shape.largest, width]
        return dim, [shape.largest * row, parts * width, row, 1], self._offsets[kind]

    def _per_segment(self, uid: int, count: int, kind: Any) -> Any:
        return self._input(uid, [count, 1, 1, 1], [1, 1, 1, 1], kind)

    def _input(self, uid: int, dim: list[int], stride: list[int], kind: Any, offsets: Any = None) -> Any:
        return self.graph.tensor(
            name=f"tensor_{uid}", uid=uid, dim=dim, stride=stride, ragged_offset=offsets, data_type=kind
        )


class _Plan:
    """One graph, planned for a device: cuDNN's own first choice, the one that Transformer Engine takes as well."""

    def __init__(self, cudnn: ModuleType, graph: Any, handle: Any) -> None:
        self._cudnn, self._graph, self._handle = cudnn, graph, handle
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        if hasattr(graph, "select_plan"):
            is_python_engine = importlib.import_module("cudnn.engines.engine_ids").is_python_engine
            native = [i for i, plan in enumerate(graph.plans) if not is_python_engine(plan.engine_id)]
            if not native:
                raise cudnn.cudnnGraphNotSupportedError("cuDNN's library has no plan for it")
            graph.select_plan(native[0])
        graph.check_support()
        graph.build_plans()
        self._workspace, self._has_run = max(graph.get_workspace_size(), 1), False

    def run(self, tensors: dict[int, torch.Tensor]) -> None:
        """Run on the current stream; a capture records it, but for the first run, which loads the kernels.

        Raises:
            CaptureError: A capture is under way and this is the first run.
        """
        if not self._has_run:
            refuse_capture(f"{PLAN} would run")
        device = tensors[LENGTHS].device
        workspace = torch.empty(self._workspace, dtype=torch.uint8, device=device)
        self._cudnn.set_stream(self._handle, torch.cuda.current_stream(device).cuda_stream)
        pointers = {uid: tensor.data_ptr() for uid, tensor in tensors.items()}
        self._graph.execute(pointers, workspace.data_ptr(), handle=self._handle)
        self._has_run = True


# Attention over packed segments, ready to run: forward and backward.
SegmentPlans = tuple[_Plan, _Plan]


def refuse_capture(what: str) -> None:
    """Refuse what must come before a capture.

    Args:
        what: What would be done.

    Raises:
        CaptureError: A capture is under way.
    """
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(f"{what} for the first time inside a capture")


@cache
def segment_plans(shape: SegmentShape, device: int) -> SegmentPlans | None:
    """Return the plans of a shape on a device, None with a warning where cuDNN has none.

    The first call builds them. They are kept for the life of the process: a recorded graph runs kernels that belong
    to its plan.

    Raises:
        CaptureError: A capture is under way and the plans are not built.
    """
    refuse_capture(f"{PLAN} would be built")
    cudnn = importlib.import_module("cudnn")
    try:
        with torch.cuda.device(device):
            largest = max(1 << (shape.largest - 1).bit_length(), SHORTEST_FORWARD)
            forward = _forward_plan(replace(shape, largest=largest, tokens=0), device)
            backward = _planned(backward_graph, shape, device)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, NotImplementedError, ValueError, ImportError) as error:
        _say_refused(shape.heads, shape.width, shape.dtype, named(error))
        return None
    return forward, backward


@cache
def _forward_plan(shape: SegmentShape, device: int) -> _Plan:
    """Return the plan of a forward, which asks for no number of rows."""
    return _planned(forward_graph, shape, device)


def _planned(described: Callable[..., Any], shape: SegmentShape, device: int) -> _Plan:
    cudnn, handle = importlib.import_module("cudnn"), _handle(device)
    return _Plan(cudnn, described(cudnn, shape, handle=handle), handle)


@cache
def _say_refused(heads: int, width: int, dtype: torch.dtype, reason: str) -> None:
    what = f"attention of {heads} heads of {width} in {str(dtype).removeprefix('torch.')}"
    warn(f"cuDNN cannot be called directly for {what}, which other kernels compute: {reason}")


@cache
def _handle(device: int) -> Any:
    """Return the device's handle, which every plan on it shares."""
    return importlib.import_module("cudnn").create_handle()


# Where segments lie: `[segments + 1]` int32 `cu_seqlens`, and what a plan binds, by its number in the graph: int32
# lengths, int64 offsets in elements.
Segments = tuple[Tensor, dict[int, Tensor]]


def locate_segments(offsets: Tensor, heads: int, width: int) -> Segments:
    """Return where segments lie in packed tensors of so many heads, computed on the device.

    Args:
        offsets: `[segments + 1]` int32 `cu_seqlens`, non-decreasing, on a device.
        heads, width: Attention heads and the size of one.
    """
    stats = offsets.to(torch.int64) * heads
    out = stats * width
    uids = (LENGTHS, MIXED_OFFSETS, OUT_OFFSETS, STATS_OFFSETS)
    return offsets, dict(zip(uids, (offsets[1:] - offsets[:-1], out * 3, out, stats), strict=True))


def _bound(query: Tensor, key: Tensor, value: Tensor, out: Tensor, stats: Tensor) -> dict[int, Tensor]:
    uids = (QUERY, KEY, VALUE, OUT, STATS)
    return dict(zip(uids, (query, key, value, out, stats), strict=True))


class _SegmentAttention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, plans: SegmentPlans) -> Tensor:
        tokens, heads, width = query.shape
        out = torch.empty((tokens, heads, width), dtype=query.dtype, device=query.device)
        stats = torch.empty((tokens, heads), dtype=torch.float32, device=query.device)
        (forward, ctx.plan), (offsets, bound) = plans, segments
        forward.run(_bound(query, key, value, out, stats) | bound)
        clear_padding(out, offsets)
        ctx.save_for_backward(query, key, value, out, stats)
        ctx.segments = segments
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        offsets, bound = ctx.segments
        tokens, heads, width = gradient.shape
        whole = torch.empty((tokens, heads, 3, width), dtype=gradient.dtype, device=gradient.device)
        gradients = whole.unbind(2)
        of_gradients = {
            GRADIENT: gradient.contiguous(),
            D_QUERY: gradients[0],
            D_KEY: gradients[1],
            D_VALUE: gradients[2],
        }
        ctx.plan.run(_bound(*ctx.saved_tensors) | of_gradients | bound)
        clear_padding(whole, offsets)
        return *gradients, None, None


def lie_interleaved(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether three `[tokens, heads, width]` tensors are one `[tokens, heads, 3, width]` taken apart."""
    _, heads, width = query.shape
    step = width * query.element_size()
    start = query.data_ptr()
    return (
        query.shape == key.shape == value.shape
        and query.stride() == key.stride() == value.stride() == (heads * 3 * width, 3 * width, 1)
        and (key.data_ptr(), value.data_ptr()) == (start + step, start + 2 * step)
    )


def plans_for(query: Tensor, segments: int, largest: int, scale: float) -> SegmentPlans | None:
    """Return the plans for `segment_attention` over queries `[tokens, heads, width]`, None where cuDNN has none.

    Args:
        query: Of the shape, dtype and device to plan for.
        segments: How many segments there are at most.
        largest: Bound of a segment's length in tokens.
        scale: What the products of queries and keys are multiplied by.
    """
    tokens, heads, width = query.shape
    return segment_plans(SegmentShape(segments, largest, tokens, heads, width, query.dtype, scale), query.device.index)


def segment_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, plans: SegmentPlans) -> Tensor:
    """Attend inside every segment.

    Args:
        query, key, value: `[tokens, heads, width]` bf16 or fp16 on a GPU, interleaved (see `lie_interleaved`).
        segments: Where segments lie; rows behind the last one are padding.
        plans: For these tensors, and for as many segments. Of a segment longer than planned for, a part is read and
            written only.

    Returns:
        `[tokens, heads, width]`, contiguous; zero in padding, as are the gradients.
    """
    out: Tensor = _SegmentAttention.apply(query, key, value, segments, plans)
    return out
