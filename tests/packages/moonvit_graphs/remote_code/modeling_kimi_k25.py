"""A stand-in for the vision part of Kimi K2.5's repository, which cannot be downloaded here.

Structure, names and interface are those of the published model, the code is not: MoonViT's layers over packed items
with rotated queries and keys. What runs eager around them is left out: position embeddings, pooling, merged patches.
"""

import torch
from torch import nn
from torch.nn import functional


class VisionTowerConfig:
    """What the tower is built from."""

    def __init__(self, config):
        self.patch_size = config.patch_size
        self.hidden_size = config.vt_hidden_size
        self.num_attention_heads = config.vt_num_attention_heads
        self.num_hidden_layers = config.vt_num_hidden_layers
        self.intermediate_size = config.vt_intermediate_size


def apply_rope(xq, xk, freqs_cis):
    """Rotate queries and keys `[tokens, heads, width]` by `[tokens, width / 2]` complex numbers."""

    def rotated(x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).to(x.dtype)

    return rotated(xq), rotated(xk)


def eager_attention(q, k, v, cu_seqlens):
    """Attend item by item, as `cu_seqlens` on the host says."""
    parts = []
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        one = (t[start:end].transpose(0, 1)[None] for t in (q, k, v))
        parts.append(functional.scaled_dot_product_attention(*one)[0].transpose(0, 1))
    return torch.cat(parts).flatten(1)


class MoonViTEncoderLayer(nn.Module):
    """One layer."""

    def __init__(self, hidden_dim, num_heads, mlp_dim):
        super().__init__()
        self.num_heads = num_heads
        self.hidden_size_per_attention_head = hidden_dim // num_heads
        self.norm0, self.norm1 = nn.LayerNorm(hidden_dim), nn.LayerNorm(hidden_dim)
        self.wqkv, self.wo = nn.Linear(hidden_dim, 3 * hidden_dim), nn.Linear(hidden_dim, hidden_dim)
        gelu = nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(hidden_dim, mlp_dim), gelu, nn.Linear(mlp_dim, hidden_dim))

    def attention_qkvpacked(self, x, cu_seqlens, max_seqlen, rope_freqs_cis=None):
        """Attend inside every item."""
        mixed = self.wqkv(x).unflatten(-1, (3, self.num_heads, self.hidden_size_per_attention_head))
        q, k, v = mixed.unbind(-3)
        return self.wo(eager_attention(*apply_rope(q, k, rope_freqs_cis), v, cu_seqlens))

    def forward(self, hidden_states, cu_seqlens, max_seqlen, rope_freqs_cis=None):
        """Return the hidden states behind the layer."""
        attended = self.attention_qkvpacked(self.norm0(hidden_states), cu_seqlens, max_seqlen, rope_freqs_cis)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.norm1(hidden_states))


class Rope2DPosEmbRepeated(nn.Module):
    """Rotations by column and row in turn, from a table that the first call makes."""

    def __init__(self, dim, max_height, max_width, theta_base=10000):
        super().__init__()
        self.dim, self.max_height, self.max_width, self.theta_base = dim, max_height, max_width, theta_base

    def _table(self, device):
        frequencies = self.theta_base ** (-torch.arange(0, self.dim, 4, device=device).float() / self.dim)
        shape = (self.max_height, self.max_width, -1)
        columns = torch.arange(self.max_width, device=device)[None, :, None] * frequencies
        rows = torch.arange(self.max_height, device=device)[:, None, None] * frequencies
        angles = torch.stack((columns.expand(shape), rows.expand(shape)), dim=-1).flatten(-2)
        return torch.polar(torch.ones_like(angles), angles)

    def get_freqs_cis(self, grid_thws, device):
        """Return the rotations of all patches, `[patches, dim / 2]`."""
        if not hasattr(self, "freqs_cis"):
            self.register_buffer("freqs_cis", self._table(device), persistent=False)
        rows = grid_thws.tolist()
        assert all(h <= self.max_height and w <= self.max_width for _, h, w in rows), rows
        return torch.cat([self.freqs_cis[:h, :w].flatten(0, 1).repeat(t, 1) for t, h, w in rows])


class MoonViT3dEncoder(nn.Module):
    """The layers."""

    def __init__(self, config):
        super().__init__()
        self.rope_2d = Rope2DPosEmbRepeated(config.hidden_size // config.num_attention_heads, 512, 512)
        sizes = (config.hidden_size, config.num_attention_heads, config.intermediate_size)
        self.blocks = nn.ModuleList([MoonViTEncoderLayer(*sizes) for _ in range(config.num_hidden_layers)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, hidden_states, grid_thws):
        """Return the hidden states `[patches, width]` behind all layers."""
        rotation = self.rope_2d.get_freqs_cis(grid_thws, device=hidden_states.device)
        lengths = grid_thws.prod(1)
        cu_seqlens = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        for block in self.blocks:
            hidden_states = block(hidden_states, cu_seqlens, lengths.max(), rope_freqs_cis=rotation)
        return self.final_layernorm(hidden_states)


class MoonViT3dPretrainedModel(nn.Module):
    """The tower."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.patch_embed = nn.Conv2d(3, config.hidden_size, config.patch_size, stride=config.patch_size)
        self.encoder = MoonViT3dEncoder(config)

    def forward(self, pixel_values, grid_thws):
        """Return the patches of every image or video for pixels `[patches, 3, side, side]`."""
        hidden_states = self.encoder(self.patch_embed(pixel_values).flatten(1), grid_thws)
        return hidden_states.split(grid_thws.prod(1).tolist())
