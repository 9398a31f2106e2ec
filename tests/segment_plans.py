"""Plans that compute what cuDNN's do, row by row in PyTorch, for processes without a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bridge_cg_plugin.vision.kernels import cudnn_attention
from bridge_cg_plugin.vision.kernels import cudnn_attention as graphs


@dataclass(frozen=True)
class ReferencePlan:
    """Reads and writes what a plan of cuDNN is bound to, found by its offsets; writes nothing behind the segments."""

    shape: graphs.SegmentShape
    backward: bool

    def run(self, tensors: dict[int, Tensor]) -> None:
        shape = self.shape
        assert tensors[graphs.LENGTHS].shape == (shape.segments,)
        for index, length in enumerate(tensors[graphs.LENGTHS].tolist()):
            assert length <= shape.largest
            rows = self._rows(tensors, index, length)
            if self.backward:
                self._differentiate(tensors, rows)
            else:
                self._attend(tensors, rows)

    def _rows(self, tensors: dict[int, Tensor], index: int, length: int) -> slice:
        shape = self.shape
        starts = [
            tensors[graphs.STATS_OFFSETS][index] / shape.heads,
            tensors[graphs.OUT_OFFSETS][index] / (shape.heads * shape.width),
            tensors[graphs.MIXED_OFFSETS][index] / (3 * shape.heads * shape.width),
        ]
        assert len(set(map(float, starts))) == 1
        return slice(int(starts[0]), int(starts[0]) + length)

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.einsum("qhw,khw->hqk", query, key) * self.shape.scale

    def _attend(self, tensors: dict[int, Tensor], rows: slice) -> None:
        query, key, value = (tensors[uid][rows].double() for uid in (graphs.QUERY, graphs.KEY, graphs.VALUE))
        scores = self._scores(query, key)
        out = torch.einsum("hqk,khw->qhw", scores.softmax(-1), value)
        tensors[graphs.OUT][rows] = out.to(self.shape.dtype)
        tensors[graphs.STATS][rows] = scores.logsumexp(-1).t().float()

    def _differentiate(self, tensors: dict[int, Tensor], rows: slice) -> None:
        query, key, value = (tensors[uid][rows].double() for uid in (graphs.QUERY, graphs.KEY, graphs.VALUE))
        out, gradient = (tensors[uid][rows].double() for uid in (graphs.OUT, graphs.GRADIENT))
        weights = (self._scores(query, key) - tensors[graphs.STATS][rows].double().t()[:, :, None]).exp()
        products = torch.einsum("qhw,khw->hqk", gradient, value)
        slopes = weights * (products - (gradient * out).sum(-1).t()[:, :, None]) * self.shape.scale
        found = {
            graphs.D_QUERY: torch.einsum("hqk,khw->qhw", slopes, key),
            graphs.D_KEY: torch.einsum("hqk,qhw->khw", slopes, query),
            graphs.D_VALUE: torch.einsum("hqk,qhw->khw", weights, gradient),
        }
        for uid, computed in found.items():
            tensors[uid][rows] = computed.to(self.shape.dtype)


def use_reference_plans() -> list[graphs.SegmentShape]:
    """Let attention over segments run on reference plans in this process; return the shapes that were planned."""
    planned: list[graphs.SegmentShape] = []

    def segment_plans(shape: graphs.SegmentShape, device: int | None) -> tuple[ReferencePlan, ReferencePlan]:
        planned.append(shape)
        return ReferencePlan(shape, False), ReferencePlan(shape, True)

    cudnn_attention.segment_plans = segment_plans
    return planned
