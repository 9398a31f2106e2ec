"""Qwen3-VL's vision tower in plain fp32 PyTorch, from the weights of Bridge's: what every mode is measured against.

Nothing is fused, each image attends by itself, and no matrix product may use TF32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.tower import Batch, MainGrads, largest_relative, relative, step

# Kernels may be this much farther from fp32 than eager: two sets of eager runs differ by about as much.
ALLOWANCE = 1.02


class Fp32Tower:
    """Forward and backward of a tower in fp32.

    Args:
        model: Bridge's `Qwen3VLVisionModel`; its weights are cast up.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self.config: Any = model.config
        self.parameters = {
            name: p.detach().float().requires_grad_(p.requires_grad) for name, p in model.named_parameters()
        }

    def step(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs and the gradients of the trainable parameters, in the model's order."""
        with without_tf32():
            outputs = self.forward(batch)
            wanted = [p for p in self.parameters.values() if p.requires_grad]
            gradients = torch.autograd.grad(outputs, wanted, [g.float() for g in batch.gradients])
        return [o.detach() for o in outputs], list(gradients)

    def forward(self, batch: Batch) -> list[Tensor]:
        """Return the embeddings, then the deepstack features."""
        from bridge_cg_plugin.vision.grid_encoder import interpolate
        from bridge_cg_plugin.vision.layout import rotary_angles, token_positions

        positions = token_positions(batch.grid, batch.tokens, self.config.spatial_merge_size)
        angles = rotary_angles(positions, self._model.rotary_pos_emb.inv_freq)
        weight = self.parameters["patch_embed.proj.weight"]
        pixels = batch.pixels.float().view(batch.tokens, -1)
        x = functional.linear(pixels, weight.view(len(weight), -1), self.parameters["patch_embed.proj.bias"])
        x = x + interpolate(self.parameters["pos_embed.weight"], batch.grid, positions)
        lengths = [h * w for t, h, w in batch.rows for _ in range(t)]
        features = []
        taps = self._model.decoder.deepstack_visual_indexes
        for index in range(len(self._model.decoder.layers)):
            x = self._layer(f"decoder.layers.{index}", x, angles.view(batch.tokens, 1, -1), lengths)
            if index in taps:
                features.append(self._merger(f"decoder.deepstack_merger_list.{taps.index(index)}", x))
        return [self._merger("merger", x), *features]

    def _layer(self, name: str, x: Tensor, angles: Tensor, lengths: list[int]) -> Tensor:
        attention, mlp = f"{name}.self_attention", f"{name}.mlp"
        normed = self._norm(f"{attention}.linear_qkv.layer_norm_", f"{name}.input_layernorm.", x)
        heads = self.config.num_attention_heads
        mixed = self._linear(f"{attention}.linear_qkv", normed).view(len(x), heads, 3, -1)
        query, key = (_turned(mixed[:, :, part], angles) for part in (0, 1))
        attended = _attend(query, key, mixed[:, :, 2], lengths)
        x = x + self._linear(f"{attention}.linear_proj", attended)
        normed = self._norm(f"{mlp}.linear_fc1.layer_norm_", f"{name}.pre_mlp_layernorm.", x)
        return x + self._mlp(mlp, normed)

    def _merger(self, name: str, x: Tensor) -> Tensor:
        width = self.parameters[f"{name}.linear_fc1.weight"].shape[1]
        own = self.parameters[f"{name}.patch_norm.weight"].numel()
        normed = self._norm(f"{name}.patch_norm.", "", x.reshape(-1, own))
        return self._mlp(name, normed.view(-1, width))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        inner = functional.gelu(self._linear(f"{name}.linear_fc1", x), approximate="tanh")
        return self._linear(f"{name}.linear_fc2", inner)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"])

    def _norm(self, fused: str, own: str, x: Tensor) -> Tensor:
        """Normalize; Transformer Engine's layers keep the norm's parameters in the linear module, others do not."""
        name = fused if f"{fused}weight" in self.parameters else own
        weight, bias = self.parameters[f"{name}weight"], self.parameters[f"{name}bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self.config.layernorm_epsilon)


def errors_of(
    model: Any, grads: MainGrads, batch: Batch, expected: tuple[list[Tensor], list[Tensor]]
) -> tuple[list[Tensor], float, list[float]]:
    """Run one step; returns the outputs, the largest error of one, and each gradient's error.

    Args:
        model: The tower, or what stands in for it.
        grads: Its gradients.
        batch: The tower's input.
        expected: Outputs and gradients in fp32.
    """
    grads.zero()
    outputs = step(model, batch)
    errors = [relative(a, e) for a, e in zip(grads.copy(), expected[1], strict=True)]
    return outputs, largest_relative(outputs, expected[0]), errors


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def _attend(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Attend inside each segment of `[tokens, heads, width]`; returns `[tokens, heads * width]`."""
    found = []
    for q, k, v in zip(*(t.transpose(0, 1).split(lengths, dim=1) for t in (query, key, value)), strict=True):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(1, 2)
        found.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    return torch.cat(found)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Let fp32 matrix products be fp32; what was set before comes back."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
