"""What graphs of packed documents are compared with: eager on as many rows, and fp32 documents one by one.

A matrix library may choose another kernel for another number of rows, so eager on a pack and eager on the same pack
with padding differ by bf16 rounding. Graphs pad to a bucket: the same rows give the same kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bridge_cg_plugin.upstream.replaced import replaced

MAX_SEQLENS = ("max_seqlen_q", "max_seqlen_kv")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
# Graphs may be farther from fp32 than eager by this factor: both are a rounding of the same.
FARTHER = 1.1


@contextmanager
def eager_at(graphs: Any, rows: int) -> Iterator[None]:
    """Inside, what the graphs would replay runs eager on `rows` rows: the padding is further documents of zeros.

    Args:
        graphs: A decoder's `PackedGraphs`, captured.
        rows: Tokens of the bucket that would be replayed.
    """
    with ExitStack() as stack:
        stack.enter_context(graphs.paused())
        for owner, attribute in graphs.replaced:
            upstreams = getattr(type(owner), attribute).__get__(owner)
            stack.enter_context(replaced(owner, attribute, _at_rows(upstreams, rows)))
        yield


def _at_rows(call: Callable[..., Any], rows: int) -> Callable[..., Any]:
    def padded(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        params = kwargs.get("packed_seq_params")
        if params is not None:
            kwargs["packed_seq_params"] = padded_params(params, hidden.shape[0], rows)
        outputs = call(pad(hidden, (0, 0, 0, 0, 0, rows - hidden.shape[0])), *args[1:], **kwargs)
        if isinstance(outputs, tuple):
            return tuple(None if output is None else output[: hidden.shape[0]] for output in outputs)
        return outputs[: hidden.shape[0]]

    return padded


def padded_params(params: Any, tokens: int, rows: int) -> Any:
    """Return a pack's metadata with the rows behind its tokens as documents, none longer than the longest there is."""
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = params.max_seqlen_q
    further = [longest] * ((rows - tokens) // longest)
    if rest := rows - tokens - sum(further):
        further.append(rest)
    added = torch.tensor(further, dtype=torch.int32).cumsum(0)
    given = {name: getattr(params, name) for name in OFFSETS}
    offsets = {
        name: torch.cat((value, value[-1:] + added.to(value.device, value.dtype)))
        for name, value in given.items()
        if value is not None
    }
    return PackedSeqParams(qkv_format="thd", **offsets, **{name: getattr(params, name) for name in MAX_SEQLENS})


class Fp32Reference:
    """A model in fp32 that runs every document of a pack alone.

    Args:
        build: Makes the model in fp32.
        model: Whose weights it takes.
    """

    def __init__(self, build: Callable[[], nn.Module], model: nn.Module) -> None:
        self._model = build()
        source = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(source[name])
        self._names = [name for name, parameter in source.items() if parameter.requires_grad]

    def results(self, pack: Any) -> tuple[Tensor, list[Tensor]]:
        """Return per-token losses, `[1, tokens]`, and gradients in the order of the model's trainable parameters."""
        self._model.zero_grad(set_to_none=True)
        losses, start = [], 0
        for length in pack.lengths:
            place = slice(start, start + length)
            alone = {name: pack.arguments[name][:, place] for name in ("input_ids", "position_ids", "labels")}
            loss = self._model(**alone, attention_mask=None)
            loss.backward(pack.weights[:, place].to(loss.dtype))
            losses.append(loss.detach())
            start += length
        found = dict(self._model.named_parameters())
        return torch.cat(losses, 1), [found[name].grad for name in self._names]


def farther(
    graphs: tuple[Tensor, Sequence[Tensor]],
    eager: tuple[Tensor, Sequence[Tensor]],
    exact: tuple[Tensor, Sequence[Tensor]],
) -> dict[str, float]:
    """Return how many times as far from an exact result graphs are as eager is, by what was compared."""
    from scripts.performance.tower import relative

    far = {}
    for who, (losses, gradients) in (("graphs", graphs), ("eager", eager)):
        distances = list(map(relative, gradients, exact[1]))
        far[who] = {
            "losses": relative(losses, exact[0]),
            "mean of gradients": sum(distances) / len(distances),
            "worst gradient": max(distances),
        }
    return {name: distance / max(far["eager"][name], 1e-30) for name, distance in far["graphs"].items()}
