"""Per-layer graphs of a vision-language model's language model: what upstream leaves out of them.

Transformer Engine replays the keyword arguments it captured and drops the others without a word. megatron-core captures
`rotary_pos_emb` for position embedding "rope" only, so layers of a model with "mrope" would be captured, and replayed,
without rotary embedding. And graphs replay one sequence length, while Bridge's Qwen3-VL step pads to it under pipeline
and expert parallelism only.

Upstream refuses models of loops that say that lengths vary, as verl does, beside any graphs of the language model, for
its own have one length. Packed graphs take packs of any length.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ...options import OptionError, packed_options
from ...options.language_model import IMPL
from ..host_batch import TOKENS
from ..seams.patches import Patch
from ..seams.registry import seam
from ..seams.registry.language_model import STEP
from ..wrappers import overridden

ROTARY_PATCH = "language_model_rotary"
LENGTH_PATCH = "language_model_length"


def rotary_stand_in(config: Any, seq_length: int, micro_batch_size: int, device: Any) -> torch.Tensor:
    """Return a tensor of the shape and type that multimodal rotary embedding gives a layer.

    It is a new one on every call: upstream decides which captures may share it.
    """
    size = config.kv_channels
    percent = getattr(config, "rotary_percent", 1.0)
    if percent < 1.0:
        size = int(size * percent)
    shape = (seq_length // config.context_parallel_size, micro_batch_size, 1, size)
    return torch.zeros(shape, dtype=torch.float32, device=device)


def _with_rotary(old: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(old)
    def get_layer_static_inputs(self: Any, seq_length: int, micro_batch_size: int) -> dict[str, Any]:
        inputs = old(self, seq_length, micro_batch_size)
        captures_attention = "attention_mask" in inputs
        if captures_attention and getattr(self.config, "position_embedding_type", None) == "mrope":
            device = inputs["hidden_states"].device
            inputs["rotary_pos_emb"] = rotary_stand_in(self.config, seq_length, micro_batch_size, device)
        return inputs

    return get_layer_static_inputs


def _at_fixed_length(old: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    @functools.wraps(old)
    def get_batch(data_iterator: Any, cfg: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        batch = old(data_iterator, cfg, *args, **kwargs)
        replays = replays_one_length(cfg.model) and not packed_options(cfg.model).enabled
        return padded(batch, cfg.model.seq_length) if replays else batch

    return get_batch


def replays_one_length(model: Any) -> bool:
    """Whether a model's configuration, in any release's words, asks for graphs that replay one sequence length."""
    impl = getattr(model, "cuda_graph_impl", "none")
    if impl != "local":
        return impl in ("transformer_engine", "full_iteration")
    return "full_iteration" in (getattr(scope, "name", scope) for scope in getattr(model, "cuda_graph_scope", ()) or ())


def padded(batch: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Return what Bridge's Qwen3-VL step calls a batch with every sequence padded to `length` tokens.

    Raises:
        OptionError: A sequence is longer.
    """
    tokens, labels, loss_mask, attention_mask, position_ids, *rest = batch
    longest = length if tokens is None else tokens.shape[1]  # stages between the first and the last may get nothing
    if longest == length:
        return batch
    if longest > length:
        raise OptionError(
            "model.seq_length",
            length,
            f"at least {longest}, the tokens of this microbatch, with language-model graphs",
            "Raise it or shorten the samples.",
        )
    step = sys.modules[STEP]
    flat = functools.partial(step.pad_or_truncate_2d_to_len, target_len=length, max_cap=length)
    longer = flat(tokens, pad_value=0)
    host = None if tokens is None else TOKENS.known(tokens)
    if host is not None:
        TOKENS.remember(longer, flat(host, pad_value=0))
    return (
        longer,
        flat(labels, pad_value=-100),
        flat(loss_mask, pad_value=0),
        step.pad_or_truncate_attn_to_len(attention_mask, target_len=length, max_cap=length),
        step.pad_or_truncate_pos_to_len(position_ids, target_len=length, max_cap=length),
        *rest,
    )


def _with_packed_graphs(old: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(old)
    def expose(self: Any) -> None:
        config = getattr(self.language_model, "config", None)
        if getattr(config, IMPL, None) != "transformer_engine" or not packed_options(config).enabled:
            return old(self)
        with overridden(config, "variable_seq_lengths", False):
            return old(self)

    return expose


PATCHES = (
    Patch(seam(ROTARY_PATCH), _with_rotary),
    Patch(seam(LENGTH_PATCH), _at_fixed_length),
    Patch(seam("variable_lengths"), _with_packed_graphs),
)
