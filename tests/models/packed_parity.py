"""What graphs of packed documents are compared with: eager on as many rows, and fp32 documents one by one.

A matrix library may choose another kernel for another number of rows, so eager on a pack and eager on the same pack
with padding differ by bf16 rounding. Graphs pad to a bucket: the same rows give the same kernels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bridge_cg_plugin.upstream.wrappers import overridden
from tests.models.language_model import draw
from tests.models.tower import largest_relative, relative, relatives

PACKS = 30
MAX_SEQLENS = ("max_seqlen_q", "max_seqlen_kv")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
# What Qwen3-VL's language model gives its layers for every token: angles, and where images are.
PER_TOKEN = ("rotary_pos_emb", "visual_pos_masks")
# How much farther from eager graphs may be than eager runs are from each other.
NOISE = 1.5
# Per-token losses, and gradients in the order of the model's trainable parameters.
Result = tuple[Tensor, list[Tensor]]


@contextmanager
def deterministic(model: nn.Module | None = None) -> Iterator[None]:
    """Inside, everything adds up in one order; new memory stays as it is.

    Args:
        model: One that was built outside, whose attention is told: Transformer Engine's asks when it is built. None for
            models that are built inside.
    """
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    modules = () if model is None else model.modules()
    try:
        with ExitStack() as stack:
            for module in modules:
                if isinstance(getattr(module, "deterministic", None), bool):
                    stack.enter_context(overridden(module, "deterministic", True))
            yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(False)


@contextmanager
def eager_at(graphs: Any, rows: int) -> Iterator[None]:
    """Inside, what the graphs would replay runs eager on `rows` rows: the padding is further documents of zeros.

    Args:
        graphs: A decoder's `GraphManager`, captured.
        rows: Tokens of the bucket that would be replayed.
    """
    with ExitStack() as stack:
        stack.enter_context(graphs.paused())
        for owner, attribute in patched(graphs):
            upstreams = getattr(type(owner), attribute).__get__(owner)
            family = graphs.workload.family
            parts = family.shards * family.ranks
            padded = at_rows(upstreams, lambda tokens: rows, parts, () if family.per_position else PER_TOKEN)
            stack.enter_context(overridden(owner, attribute, padded))
        yield


def patched(graphs: Any) -> list[tuple[Any, str]]:
    """Return the modules of captured graphs and the attributes of theirs that replay."""
    if graphs._parts is None:
        return [(graphs.model, "forward")]
    return [(method.module, method.name) for method in graphs._parts.methods]


def at_rows(
    call: Callable[..., Any], rows_of: Callable[[int], int], parts: int = 1, per_token: Sequence[str] = PER_TOKEN
) -> Callable[..., Any]:
    """Return a decoder's forward that computes padding behind its tokens, further documents of zeros.

    Args:
        call: The forward.
        rows_of: Returns the rows to compute for a pack of so many tokens.
        parts: Ranks that share a pack's tokens.
        per_token: Arguments that have a value for every token.
    """

    def padded(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        rows = rows_of(hidden.shape[0] * parts)
        further = rows // parts - hidden.shape[0]
        for name in per_token:
            if isinstance(value := kwargs.get(name), Tensor):
                behind = (0, further) if value.dim() == 2 else (0, 0, 0, 0, 0, 0, 0, further)
                kwargs[name] = pad(value, behind)
        params = kwargs.get("packed_seq_params")
        if params is not None:
            kwargs["packed_seq_params"] = padded_params(params, hidden.shape[0] * parts, rows)
        outputs = call(pad(hidden, (0, 0, 0, 0, 0, further)), *args[1:], **kwargs)
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
    max_seqlens = {name: getattr(params, name) for name in MAX_SEQLENS}
    return PackedSeqParams(qkv_format="thd", **offsets, **max_seqlens, total_tokens=rows)


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

    def results(self, pack: Any) -> Result:
        """Return per-token losses, `[1, tokens]`, and gradients in the order of the model's trainable parameters."""
        self._model.zero_grad(set_to_none=True)
        losses, start = [], 0
        # Each new length of a document would have megatron-core's fused functions compiled again, for seconds.
        with torch.compiler.set_stance("force_eager"):
            for length in pack.lengths:
                losses.append(self._alone(pack, slice(start, start + length)))
                start += length
        found = dict(self._model.named_parameters())
        return torch.cat(losses, 1), [_gradient(found[name]) for name in self._names]

    def _alone(self, pack: Any, place: slice) -> Tensor:
        """Return one document's losses, and add its gradients up."""
        arguments = {name: pack.arguments[name][:, place] for name in ("input_ids", "position_ids", "labels")}
        loss: Tensor = self._model(**arguments, attention_mask=None)
        loss.backward(pack.weights[:, place].to(loss.dtype))
        return loss.detach()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def thirty_packs(most: int, buckets: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return lengths of the documents of 30 packs by name: 1 to `most` documents with long tails, all sizes of buckets.

    Args:
        most: Documents of the last pack.
        buckets: Two capacities in tokens; every third pack fills one.
    """
    made = {}
    for index in range(PACKS):
        documents = 1 + index * (most - 1) // (PACKS - 1)
        tokens = 300 + (buckets[-1] - 300) // PACKS * index if index % 3 else buckets[index % 2]
        made[f"{index}: {documents} documents, {tokens} tokens"] = draw(tokens, documents, index)
    return made


def noise_of(runs: Sequence[Result]) -> tuple[float, float]:
    """Return the largest relative difference between any two runs: of the losses, and of a gradient."""
    pairs = list(combinations(runs, 2))
    return max(relative(a[0], b[0]) for a, b in pairs), max(largest_relative(a[1], b[1]) for a, b in pairs)


def nearest(found: Result, runs: Sequence[Result]) -> tuple[float, float]:
    """Return the relative difference from the nearest of several runs: of the losses, and of a gradient.

    Where runs differ from each other by chance, a result of the same function is now and then equal to one of them, of
    another function never.
    """
    pairs = [(relative(found[0], run[0]), largest_relative(found[1], run[1])) for run in runs]
    return min(losses for losses, _ in pairs), min(gradients for _, gradients in pairs)


@dataclass(frozen=True, slots=True)
class Spread:
    """How far runs of one pack are from the nearest other eager run, tensor for tensor: losses, then every gradient.

    Attributes:
        eager: `[eager runs, 1 + gradients]` relative differences, each from the other eager runs.
        graphs: `[replays, 1 + gradients]`.
    """

    eager: Tensor
    graphs: Tensor


def spread_of(runs: Sequence[Result], replays: Iterable[Result], least: float = 0.0) -> Spread:
    """Return how far eager runs and replays of one pack are from the nearest eager run, each tensor by itself.

    Args:
        runs: Eager, at least two.
        replays: On graphs; each is dropped before the next is made.
        least: The norm of a gradient counts as at least this share of the largest.
    """

    def apart(one: Result, other: Result) -> Tensor:
        losses = relatives([one[0].float()], [other[0].float()])
        return torch.cat((losses, relatives(one[1], other[1], least)))

    eager = [torch.stack([apart(one, other) for other in runs if other is not one]).amin(0) for one in runs]
    graphs = [torch.stack([apart(one, other) for other in runs]).amin(0) for one in replays]
    return Spread(torch.stack(eager), torch.stack(graphs))


def beyond_noise(spreads: Mapping[str, Spread], names: Sequence[str]) -> list[str]:
    """Return where graphs give something else than eager does, in words.

    A sum that is added up in any order seldom falls on the other side of an edge between two values of bf16. Such a run
    differs from all others, eager as on graphs. So of the replays of a pack the middle one counts, which another
    function moves as it moves all of them. It may be as far away as eager runs are in any pack, tensor for tensor.

    Args:
        spreads: By pack.
        names: Of the gradients.
    """
    eager = torch.cat([spread.eager for spread in spreads.values()]).amax(0)
    missed = []
    for pack, spread in spreads.items():
        middle = spread.graphs.median(0).values
        for name, found, noise in zip(("losses", *names), middle.tolist(), eager.tolist(), strict=True):
            if not found <= NOISE * noise:
                missed.append(f"{pack}: {name} differs by {found:.2e}, eager runs by up to {noise:.2e}")
    return missed


def worst_gradient(found: Result, expected: Result, names: Sequence[str]) -> str:
    """Return how much the gradient that differs most differs, whose it is and in how many of its elements.

    A NaN is more than any number.
    """
    differ = relatives(found[1], expected[1])
    place = int(differ.argmax())
    one, other = found[1][place], expected[1][place]
    apart = (one - other).abs() / torch.maximum(one.abs(), other.abs())
    elements = f"{int((one != other).sum())} of {one.numel()} elements, by at most {apart.nan_to_num(0).max():.1e}"
    return f"{differ[place]:.2e} in {names[place]} ({elements})"


def farthest(found: Sequence[Result], expected: Result) -> Result:
    """Return the result whose gradients are farthest from an expected one."""
    return max(found, key=lambda one: largest_relative(one[1], expected[1]))


def same(one: Result, other: Result) -> bool:
    """Whether two results are equal to the bit."""
    return all(map(torch.equal, (one[0], *one[1]), (other[0], *other[1])))


def distances(found: Result, exact: Result) -> dict[str, float]:
    """Return relative distances from an exact result, by what was compared."""
    gradients = [relative(a, b) for a, b in zip(found[1], exact[1], strict=True)]
    return {
        "losses": relative(found[0], exact[0]),
        "mean of gradients": sum(gradients) / len(gradients),
        "worst gradient": largest_relative(found[1], exact[1]),
    }
