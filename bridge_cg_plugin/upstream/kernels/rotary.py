"""The plugin's rotary kernels in place of Bridge's formula while a region is recorded."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.instance import modules_where
from ...offload import never_offload
from ...offload.registry import rewrite
from ...upstream_types import UpstreamModule
from ..seams.contract import ROTARY_HOMES, SWAPS
from ..seams.own_code import as_shipped, foreign_function
from ..seams.registry import seam
from ..seams.registry.bridge import ATTENTION
from ..seams.states import fits
from ..wrappers import overridden

ROTARY = seam("rotary_kernel").target


@contextmanager
def fused_rotary(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let the attention modules below `modules` rotate queries and keys with the plugin's kernels."""
    attention = sys.modules.get(ATTENTION)
    if attention is None or not fits("rotary_kernel") or any(foreign_function(home, SWAPS) for home in ROTARY_HOMES):
        yield
        return
    rotation = _Rotation(getattr(attention, ROTARY))
    with ExitStack() as stack:
        stack.enter_context(overridden(attention, ROTARY, rotation.rotated))
        for module in modules_where(_rotates_at_projection, modules):
            projected = functools.partial(rotation.projected, module)
            attend = functools.partial(rotation.attention, module, module.forward)
            stack.enter_context(overridden(module, "forward", attend))
            stack.enter_context(overridden(module, "get_query_key_value_tensors", projected))
        yield


def _rotates_at_projection(module: UpstreamModule) -> bool:
    """Whether attention is Bridge's, and its projection gives query, key and value head by head, and no more."""
    if type(module) is not sys.modules[ATTENTION].Qwen3VLSelfAttention:
        return False
    if not fits("vision_attention", "vision_projection") or not as_shipped(module, "get_query_key_value_tensors"):
        return False
    config = module.config
    one_group_a_head = module.num_query_groups_per_partition == module.num_attention_heads_per_partition
    plain = module.q_layernorm is None and module.k_layernorm is None and config.num_query_groups >= module.world_size
    others = ("attention_output_gate", "flash_decode", "no_rope_freq", "rotary_interleaved")
    unusual = any(getattr(config, name, None) for name in others)
    return bool(one_group_a_head and plain and not unusual and config.apply_rotary_pos_emb_in_fp32)


class _Rotation:
    """Rotates where upstream does, or already at the projection, in one kernel for queries and keys, in place."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self._original = original
        self._tables: dict[tuple[int, torch.dtype | None], tuple[Tensor, Tensor, Tensor]] = {}
        self._angles: Tensor | None = None
        self._done: int | None = None

    def attention(
        self, module: UpstreamModule, forward: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for the attention module's forward: keep the angles for the projection."""
        angles = kwargs.get("rotary_pos_emb")
        packed = kwargs.get("packed_seq_params") is not None and hidden_states.shape[1] == 1
        usual = packed and isinstance(angles, Tensor) and angles.shape[-1] == module.hidden_size_per_attention_head
        self._angles = angles if usual else None
        try:
            return forward(hidden_states, *args, **kwargs)
        finally:
            self._angles = self._done = None

    def projected(self, module: UpstreamModule, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the module's projection to queries, keys and values: these come rotated."""
        from ...vision.kernels.rotary import rotate_qkv

        expected = not kwargs and all(arg is None for arg in args)
        if self._angles is None or not expected:
            return type(module).get_query_key_value_tensors(module, hidden_states, *args, **kwargs)
        mixed, _ = module.linear_qkv(hidden_states)
        heads = module.num_attention_heads_per_partition
        flat, table = mixed.view(mixed.shape[0], -1), self._table(self._angles)
        parts = rotate_qkv(flat, *table, heads)
        rewrite(flat, table, lambda whole, cos, sin: rotate_qkv(whole, cos, sin, heads))
        self._done = parts[0].untyped_storage().data_ptr()
        return tuple(part.unsqueeze(1) for part in parts)

    def rotated(self, t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None) -> Tensor:
        """Stand in for upstream's function, of packed `[tokens, ...]` or unpacked `[sequence, batch, ...]` tensors."""
        from ...vision.kernels.rotary import apply_rotary

        if self._done is not None and t.untyped_storage().data_ptr() == self._done:
            return t
        packed = cu_seqlens is not None
        tokens = (*t.shape[:1], 1) if packed else t.shape[:2]
        a_row_each = t.dim() == (3 if packed else 4) and freqs.shape == (*tokens, 1, t.shape[-1])
        if not a_row_each or config.rotary_interleaved:
            return self._original(t, freqs, config, cu_seqlens)
        rounded = None if config.apply_rotary_pos_emb_in_fp32 else t.dtype
        rows = t if packed else t.flatten(0, 1)
        return apply_rotary(rows, *self._table(freqs, rounded), rounded is not None).view(t.shape)

    def _table(self, angles: Tensor, rounded: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines in fp32, with the values that they have in a dtype that eager rounds them to."""
        from ...vision.kernels.rotary import cos_and_sin

        key = id(angles), rounded
        if key not in self._tables:
            found = cos_and_sin(angles)
            if rounded is not None:
                found = found[0].to(rounded).float(), found[1].to(rounded).float()
            # All layers read them: offloaded, they would come back at once.
            cos, sin = map(never_offload, found)
            self._tables[key] = angles, cos, sin
        return self._tables[key][1:]
