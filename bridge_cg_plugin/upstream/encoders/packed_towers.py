"""What Hugging Face's encoders of images of any size share: calls, segments, rotation, attention, the backward."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...attention_bounds import cudnn_pays
from ...graphs.buckets import Bucket
from ...graphs.program import Call
from ...offload import never_offload
from ...options import OptionError
from ...upstream_types import UpstreamModule
from ...vision.batch import BatchError, EncoderBatch, HostGrids
from ...vision.encoder import EncoderFamily, OtherAttention, RecordingKernels, encoder_call
from ...vision.grid_encoder import GridEncoder
from ...vision.kernels.packed_attention import DTYPES, PackedSegments, packed_attention, taken_apart
from ...vision.layout import TokenPositions, segment_offsets
from ..kernels.layers import kernels_available
from ..kernels.recompute import recomputing
from ..kernels.transformer_engine import known_activations
from ..seams.own_code import as_shipped
from ..wrappers import forwards_replaced, overridden
from .direct_attention import Locate, flash_attention_refusal, located, segment_attention_refusal


def held_as(attribute: str, tower: str) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function that finds a tower in the module that holds it, or takes the tower itself; see `EncoderFamily`.

    Args:
        attribute: Under which a model holds it.
        tower: Its class; one derived from it is found as well.
    """

    def find(holder: nn.Module) -> nn.Module | None:
        for module in (getattr(holder, attribute, None), holder):
            if isinstance(module, nn.Module) and tower in {base.__name__ for base in type(module).__mro__}:
                return module
        return None

    return find


# What arguments ask for of a module's result, and its configuration where they do not.
OF_RESULT = ("return_dict", "output_hidden_states", "output_attentions")


def returns_an_object(model: UpstreamModule, others: dict[str, Any]) -> bool:
    """Whether a call of a Hugging Face module asks for its usual result and for nothing else.

    Args:
        model: The module.
        others: Further arguments.
    """
    by_default = {name: getattr(model.config, name, None) for name in OF_RESULT}
    asked = {**by_default, **{name: value for name, value in others.items() if value is not None}}
    as_object = asked.pop("return_dict") is not False
    return as_object and all(value is None or value is False for value in asked.values())


def result(**tensors: Any) -> Any:
    """Return what a tower's forward returns, with these tensors in it."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(**tensors)


def refuse_unusual(model: UpstreamModule, encoder: str, weight: Tensor) -> None:
    """Refuse a tower whose attention packed kernels do not compute.

    Args:
        model: The tower.
        encoder: Its name, for messages.
        weight: One of its weights.

    Raises:
        OptionError: It is refused.
    """
    where = f"with vision graphs of {encoder}"
    if dropout := getattr(model.config, "attention_dropout", 0):
        remedy = "Its layers attend in packed kernels without dropout. Set it to 0, or switch vision graphs off."
        raise OptionError("vision_config.attention_dropout", dropout, f"0 {where}", remedy)
    if weight.device.type == "cuda" and weight.dtype not in DTYPES:
        remedy = "Its layers attend in PyTorch's packed flash kernels. Train in bf16, or switch vision graphs off."
        raise OptionError("model.params_dtype", weight.dtype, f"torch.bfloat16 or torch.float16 {where}", remedy)


class TowerEncoder(GridEncoder):
    """Hugging Face's encoder of images of any size, in one region; see `GridEncoder`.

    Layers get `PackedSegments` where upstream passes `cu_seqlens`; `kernels` must let attention take them.
    """

    def read(self, grids: HostGrids, hidden_states: Tensor, grid_thw: Tensor, **others: Any) -> Call:
        """See `Encoder`."""
        batch, misfit = self.patches(grids, hidden_states, grid_thw)
        out_of_bounds = self.out_of_bounds(batch, misfit)
        if out_of_bounds is not None:
            raise BatchError(out_of_bounds)
        return encoder_call(batch, returns_an_object(self.model, others), misfit)

    def out_of_bounds(self, batch: EncoderBatch, misfit: str | None) -> str | None:
        """Return why eager would read out of bounds on the device, None where it does not.

        Args:
            batch: The microbatch.
            misfit: What is wrong with it, None where nothing is.
        """
        return None

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `Encoder`."""
        return returned.pooler_output, returned.last_hidden_state

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `Encoder`."""
        merged, hidden = outputs
        return result(last_hidden_state=hidden, pooler_output=merged)


def frame_segments(grid: Tensor, bucket: Bucket) -> PackedSegments:
    """Return where a bucket's frames lie."""
    frames, largest = bucket.limits
    return PackedSegments(segment_offsets(grid, frames), largest)


@dataclass(frozen=True, slots=True)
class Rotation:
    """How queries and keys are rotated; upstream's layers hand it on.

    Attributes:
        upstreams: Cosines and sines `[tokens, width]` as upstream's function takes them, both halves equal.
        halves: One half of each, fp32, for the plugin's kernel; None without it.
        rounds: Whether upstream's function computes in the dtype of queries, and else in fp32.
    """

    upstreams: tuple[Tensor, Tensor]
    halves: tuple[Tensor, Tensor] | None
    rounds: bool

    @classmethod
    def of(cls, cosines: Tensor, sines: Tensor, rounds: bool = False) -> Self:
        """Return the rotation by cosines and sines whose halves are equal."""
        if not has_kernels(cosines):
            return cls((cosines, sines), None, rounds)
        # All layers read them: offloaded, they would come back at once.
        one, other = (never_offload(t[:, : t.shape[1] // 2].float().contiguous()) for t in (cosines, sines))
        return cls((cosines, sines), (one, other), rounds)


def has_kernels(tensor: Tensor) -> bool:
    """Whether the plugin's kernels compute with a tensor."""
    return tensor.is_cuda and kernels_available()


def places(positions: TokenPositions) -> Tensor:
    """Return tokens' rows and columns, `[tokens, 2]`."""
    return torch.stack((positions.row, positions.column), dim=-1)


def rotation(model: UpstreamModule, positions: Tensor) -> Rotation:
    """Return the rotation of tokens by rows and columns `[tokens, 2]`, as the model computes it.

    Its embedding gives angles `[tokens, width / 2]`; after transformers 5.16 cosines and sines of both halves.
    """
    if "x" in inspect.signature(model.rotary_pos_emb.forward).parameters:
        return Rotation.of(*model.rotary_pos_emb(positions, positions))
    angles = model.rotary_pos_emb(positions)
    angles = torch.cat((angles, angles), dim=-1)
    return Rotation.of(angles.cos(), angles.sin())


def _gains_by_alignment(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not as_shipped(module, "forward"):
        return False
    misaligned = any(size % ALIGNMENT for size in module.weight.shape)
    return misaligned or (module.bias is not None and has_kernels(module.weight))


def _has_rms_norm_kernel(module: nn.Module) -> bool:
    weight, kind = module._parameters.get("weight"), cast(Any, type(module))
    return weight is not None and has_kernels(weight) and is_rms_norm(kind) and as_shipped(module, "forward")


@functools.cache
def is_rms_norm(kind: type[nn.Module]) -> bool:
    """Whether a class of Hugging Face's computes `weight * x / sqrt(mean(x**2) + variance_epsilon)`: it is tried."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator) for size in ((3, 8), (8,)))
    try:
        tried: UpstreamModule = kind(8, eps=0.25)
        with torch.no_grad():
            tried.weight.copy_(weight)
            found = tried(x)
        names = [name for name, _ in tried.named_parameters()]
    except Exception:  # another signature
        return False
    expected = functional.rms_norm(x, (8,), weight, 0.25)
    plain = names == ["weight"] and getattr(tried, "variance_epsilon", None) == 0.25
    return plain and isinstance(found, Tensor) and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def _rms_norm_forward(norm: UpstreamModule, x: Tensor) -> Tensor:
    from ...vision.kernels.norms import rms_norm

    forward = partial(type(norm).forward, norm)
    if x.dtype != norm.weight.dtype or torch.is_autocast_enabled(x.device.type):
        plain: Tensor = forward(x)
        return plain
    return rms_norm(x, norm.weight, norm.variance_epsilon, forward)


@contextmanager
def reordering_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let an encoder's modules call kernels that round a gradient otherwise than eager does.

    The backward of linear layers multiplies aligned matrices and sums a bias's gradient, that of RMSNorm is one kernel.
    """
    with (
        forwards_replaced(modules, _aligned_forward, _gains_by_alignment),
        forwards_replaced(modules, _rms_norm_forward, _has_rms_norm_kernel),
    ):
        yield


def _aligned_forward(linear: nn.Linear, x: Tensor) -> Tensor:
    if x.dim() != 2 or torch.is_autocast_enabled(x.device.type):
        return functional.linear(x, linear.weight, linear.bias)
    out: Tensor = _AlignedBackward.apply(x, linear.weight, linear.bias)
    return out


ALIGNMENT = 8  # elements of 2 bytes in the 16 that kernels load at once


class _AlignedBackward(Function):
    """`x @ weight.T + bias` as PyTorch computes it; the backward multiplies matrices of aligned sizes.

    Matrix libraries have no fast kernels for rows that begin at odd places: Qwen2.5-VL's MLP is 3420 wide, and its
    products take twice as long as those of 3424. Zeros up to the next multiple change no sum but its order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        padded = _padded(gradient)
        return (
            (padded @ _padded(_padded(weight.t()).t()))[:, : x.shape[1]] if of_x else None,
            (padded.t() @ _padded(x))[: weight.shape[0], : weight.shape[1]] if of_weight else None,
            _sum(gradient) if of_bias else None,
        )


def _sum(gradient: Tensor) -> Tensor:
    """Return the sum over rows."""
    if not (gradient.is_cuda and has_kernels(gradient)):
        return gradient.sum(0)
    from ...vision.kernels.reduction import column_sum

    return column_sum(gradient.contiguous(), gradient.dtype)


def _padded(matrix: Tensor) -> Tensor:
    """Return a matrix with zeros behind its columns, up to a multiple of `ALIGNMENT`."""
    missing = -matrix.shape[1] % ALIGNMENT
    return functional.pad(matrix, (0, missing)) if missing else matrix


# By which recorded layers attend beside PyTorch's kernels: cuDNN's, and FlashAttention's. One thread records at a time,
# and no backward attends.
_locate: Locate | None = None
_by_flash = False


def attend(
    made: tuple[Tensor, ...],
    rotate: Callable[..., Any],
    rotation: Rotation,
    segments: PackedSegments,
    scale: float,
) -> Tensor:
    """Attend by the kernels that are recorded now; returns `[tokens, heads, width]`.

    Args:
        made: What projections made; see `taken_apart`.
        rotate: Upstream's function that rotates queries and keys.
        rotation: How they are rotated.
        segments: Where to attend.
        scale: What products of queries and keys are multiplied by.
    """
    query, key, value = taken_apart(made)
    if rotation.halves is None:
        query, key = rotate(query, key, *rotation.upstreams)
        return packed_attention(query, key, value, segments, scale)
    from ...vision.kernels.rotary import apply_rotary, rotate_interleaved

    tables = *rotation.halves, rotation.rounds
    if _by_flash:
        from . import flash_attention as flash

        if flash.suits(query, segments.largest):
            parts = rotate_interleaved(made, *tables)
            return flash.flash_attention(*parts, segments.offsets, segments.largest, scale)
    if _locate is not None and (plans := _plans(query, segments, scale)) is not None:
        from ...vision.kernels.cudnn_attention import segment_attention

        parts = rotate_interleaved(made, *tables)
        return segment_attention(*parts, _locate(segments.offsets, *query.shape[1:]), plans)
    return packed_attention(apply_rotary(query, *tables), apply_rotary(key, *tables), value, segments, scale)


def _plans(query: Tensor, segments: PackedSegments, scale: float) -> Any:
    """Return cuDNN's plans where its kernels are the faster and take these sizes; else None."""
    from ...vision.kernels.cudnn_attention import plans_for

    most = segments.offsets.shape[0] - 1
    pays = cudnn_pays(most, segments.largest, query.shape[0])
    return plans_for(query, most, segments.largest, scale) if pays else None


def _attending_by(name: str, value: Callable[[], Any]) -> RecordingKernels:
    return lambda modules: overridden(sys.modules[__name__], name, value())


# Called with the module, hidden states, segments, and the rotation as upstream's layers hand them on.
AttentionForward = Callable[..., Any]


def attending(attention: str, forward: AttentionForward) -> RecordingKernels:
    """Return kernels that let attention take `PackedSegments` while a region is recorded, and layers be recomputed.

    Hugging Face's own reads the offsets on the host and attends segment by segment, or hands the longest segment's
    length over as a device tensor.

    Args:
        attention: Name of the class of attention.
        forward: Called in its place, with the module first.
    """

    def wanted(module: nn.Module) -> bool:
        return type(module).__name__ == attention and as_shipped(module, "forward")

    @contextmanager
    def kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
        with recomputing(modules), forwards_replaced(modules, forward, wanted):
            yield

    return kernels


def tower_family(
    attention: str, forward: AttentionForward, *, name: str, encoder: type[TowerEncoder], **others: Any
) -> EncoderFamily:
    """Return the family of Hugging Face's encoder of images of any size; it refuses what `refuse_unusual` does.

    Args:
        attention: Name of its class of attention.
        forward: Called in the place of attention's; see `attending`.
        name: Of the encoder, for messages.
        encoder: Its class.
        others: See `EncoderFamily`.
    """

    def made(model: UpstreamModule, *args: Any, **kwargs: Any) -> TowerEncoder:
        found = encoder(model, *args, **kwargs)
        refuse_unusual(model, name, found.weight())
        return found

    other = partial(OtherAttention, replaces="PyTorch's", rounds_as_eager=False)
    common: dict[str, Any] = {
        "kernels": attending(attention, forward),
        "reordering_kernels": reordering_kernels,
        "direct_attention": other(_attending_by("_locate", located), segment_attention_refusal),
        "flash_attention": other(_attending_by("_by_flash", lambda: True), flash_attention_refusal),
        "known_activations": known_activations,
    }
    return EncoderFamily(name=name, encoder=made, **common | others)


def projections(attention: UpstreamModule, hidden_states: Tensor, *names: str) -> tuple[Tensor, ...]:
    """Return what projections of these names make of hidden states, `[tokens, heads, width]` each."""
    shape = hidden_states.shape[-2], attention.num_heads, -1
    return tuple(getattr(attention, name)(hidden_states).view(shape) for name in names)


def joint_attention(
    attention: UpstreamModule,
    hidden_states: Tensor,
    cu_seqlens: PackedSegments,
    position_embeddings: Rotation,
) -> Tensor:
    """Attend by queries, keys and values of one projection; see `AttentionForward`."""
    tokens = hidden_states.shape[0]
    mixed = attention.qkv(hidden_states).view(tokens, 3, attention.num_heads, -1)
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb_vision
    context = attend((mixed,), rotate, position_embeddings, cu_seqlens, attention.scaling)
    projected: Tensor = attention.proj(context.reshape(tokens, -1))
    return projected
