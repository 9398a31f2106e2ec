"""A vision or audio encoder as a benchmark and the GPU tests know it, and batches for it.

Without a GPU the encoders are small: the same code runs, for tests.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from scripts.performance.measure import on_gpu
from tests.models.mixes import ImageMixes, Mixes
from tests.models.reference import without_tf32
from tests.models.workloads import CASES, Grid, one_image, tokens_of

# Query, key and value weights that make attention as peaked as in a trained model.
PEAKED_STD = 0.05
# The same for encoders with RMSNorm, which would amplify the rounding of bf16 until fp32's outputs are lost.
RMSNORM_STD = 0.03
# One image of 784, 2304 and 8192 patches, and mixes of 6720 and 8192.
IMAGES: dict[str, Grid] = {
    **{name: CASES[name] for name in ("1x448", "1x768", "8mix")},
    "1x8192": one_image(8192),
    "9mix": [*CASES["8mix"], (1, 32, 46)],
}


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch, with random gradients for the outputs.

    Attributes:
        arguments: What the encoder is called with, by name.
        gradients: Of every output.
        tokens: Patches.
        images: Images and videos.
    """

    arguments: dict[str, Any]
    gradients: list[Tensor]
    tokens: int
    images: int


class Reference(Protocol):
    """An encoder in fp32: what every mode is measured against."""

    def step(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs and gradients of the encoder's parameters, in its order."""


def _copied(encoder: "Encoder", model: nn.Module) -> Reference:
    return Fp32Copy(encoder, copy.deepcopy(model).float())


@dataclass(frozen=True, slots=True)
class Encoder:
    """One encoder.

    Attributes:
        layers: Of the full size.
        build: Builds it with so many layers, bf16 on a GPU, fp32 on a CPU.
        make_batch: Makes a batch of a size (rows of grid_thw, or a number of images) from a seed.
        outputs: Takes the tensors out of what its forward returns.
        sizes: What the benchmark measures, by name.
        modes: The plugin's: "plugin" with kernels as eager's rounding asks for, "plugin_fast" where there are others.
        noise: Parameters whose gradient is zero but for rounding, by the end of their names.
        mixes: What many batches of different sizes are.
        reference: Makes the encoder in fp32 from one that has no graphs on it.
    """

    layers: int
    build: Callable[[int], nn.Module]
    make_batch: Callable[[nn.Module, Any, int], Batch]
    outputs: Callable[[Any], list[Tensor]]
    sizes: dict[str, Any]
    modes: tuple[str, ...] = ("plugin", "plugin_fast")
    noise: tuple[str, ...] = ()
    mixes: Mixes = ImageMixes()
    reference: Callable[["Encoder", nn.Module], Reference] = _copied

    def compared(self, model: nn.Module) -> list[bool]:
        """Return of each trainable parameter, in the model's order, whether its gradient says anything."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return [not name.endswith(self.noise) for name, _ in named] if self.noise else [True] * len(named)


def forward(encoder: Encoder, model: nn.Module, batch: Batch) -> list[Tensor]:
    """Return all outputs."""
    return encoder.outputs(model(**batch.arguments))


def step(encoder: Encoder, model: nn.Module, batch: Batch, between: Callable[[], object] | None = None) -> list[Tensor]:
    """Run forward and backward; returns the outputs. `between` is called when the forward was submitted."""
    outputs = forward(encoder, model, batch)
    if between is not None:
        between()
    torch.autograd.backward(outputs, batch.gradients)
    return [o.detach() for o in outputs]


def device() -> torch.device:
    """Return where encoders are."""
    return torch.device("cuda" if on_gpu() else "cpu")


def dtype() -> torch.dtype:
    """Return what they compute in."""
    return torch.bfloat16 if on_gpu() else torch.float32


def peaked(model: nn.Module, names: Sequence[str], std: float = PEAKED_STD) -> nn.Module:
    """Return a model in training mode, parameters whose names have one of these parts drawn anew."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.normal_(std=std)
    return model.to(device(), dtype()).train()


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normal numbers."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn(shape, device=device(), generator=generator).to(dtype())


def patches_batch(model: nn.Module, rows: Grid, seed: int) -> Batch:
    """Make random patches; the grid is announced to the plugin as Bridge's batch step does."""
    from bridge_cg_plugin.upstream.hooks.batches import GRIDS

    config: Any = model.config
    host = torch.tensor(rows)
    tokens = tokens_of(rows)
    grid = host.to(device(), copy=True)
    GRIDS.remember(grid, host)
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    arguments = {"hidden_states": random((tokens, width), seed), "grid_thw": grid, "return_dict": True}
    shape = (tokens // config.spatial_merge_size**2, config.out_hidden_size)
    outputs = 1 + len(getattr(config, "deepstack_visual_indexes", ()))
    gradients = [random(shape, seed + number) for number in range(1, 1 + outputs)]
    return Batch(arguments, gradients, tokens, len(rows))


class Fp32Copy:
    """See `Reference`.

    Args:
        encoder: The encoder.
        model: The encoder in fp32.
        parameters: Its parameters in the encoder's order; None where that is its own.
    """

    def __init__(self, encoder: Encoder, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None) -> None:
        self._encoder, self._model = encoder, model
        self._parameters = list(model.parameters()) if parameters is None else list(parameters)

    def step(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """See `Reference`. Pixels and the outputs' gradients are cast up."""
        arguments = {
            name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in batch.arguments.items()
        }
        with without_tf32():
            outputs = self._encoder.outputs(self._model(**arguments))
            gradients = torch.autograd.grad(outputs, self._parameters, [g.float() for g in batch.gradients])
        return [o.detach() for o in outputs], list(gradients)
