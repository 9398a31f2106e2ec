"""A piece of work that saves tensors of every kind for its backward, as a region program for any device."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import Function

from bridge_cg_plugin.graphs.fallback import Fallback

from .rows_program import RowsProgram

WIDTH = 32
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)


def variants(x: Tensor) -> list[Tensor]:
    """Return tensors made from `[tokens, WIDTH]` that autograd shall save: dtypes, views, aliases, sizes."""
    made = [_as(x, dtype) for dtype in DTYPES]
    whole = x * 3 + 1
    quantized = (x / x.abs().amax().clamp(min=1e-3) * 448).to(torch.float8_e4m3fn)
    scales = x.abs().amax(dim=1, keepdim=True) + 1
    return [
        *made,
        whole,
        whole.t(),
        whole[1::2, 2:7],
        whole.view(-1)[5:],
        whole[:, :1].expand(-1, WIDTH),
        scales.expand(-1, 4),
        quantized,
        quantized.view(torch.uint8),
        quantized.t(),
        scales,
        torch.empty(0, WIDTH, device=x.device),
        (x * 0.5).sum(),
        x.permute(1, 0).contiguous().as_strided((3, 5), (7, 2), 4),
    ]


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:
        return x > 0
    return (x * 8 if not dtype.is_floating_point and not dtype.is_complex else x).abs().to(dtype)


def value_of(tensor: Tensor) -> Tensor:
    """Return a number that depends on every element and its place."""
    flat = tensor.reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    places = torch.arange(flat.numel(), device=flat.device, dtype=torch.float32) % 13 + 1
    return (flat.to(torch.float32) * places).sum()


@dataclass
class Found:
    """What a backward got: for each saved tensor dtype, shape, strides, offset; and the groups that share memory."""

    layouts: list
    groups: list


def layout_of(tensors: list[Tensor]) -> Found:
    """Return how tensors lie in memory."""
    addresses = [t.untyped_storage().data_ptr() if t.numel() else -1 for t in tensors]
    groups = [[i for i, other in enumerate(addresses) if other == address] for address in addresses]
    layouts = [(t.dtype, tuple(t.shape), t.stride(), t.storage_offset()) for t in tensors]
    return Found(layouts, [g if addresses[i] != -1 else [i] for i, g in enumerate(groups)])


class _Saves(Function):
    """Doubles its input; the gradient is scaled by a sum over everything that was saved."""

    @staticmethod
    def forward(ctx, x: Tensor, log: dict) -> Tensor:
        tensors = variants(x.detach())
        log["saved"] = layout_of(tensors)
        ctx.save_for_backward(*tensors)
        ctx.log = log
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor):
        tensors = list(ctx.saved_tensors)
        ctx.log["returned"] = layout_of(tensors)
        total = torch.stack([value_of(t) for t in tensors]).sum()
        return gradient * (1 + total / 1e4), None


class Saver(nn.Module):
    """Layers of `_Saves` between products with a weight."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(WIDTH) + 0.05 * torch.randn(WIDTH, WIDTH) for _ in range(layers))
        self.log: dict = {}

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(_Saves.apply(x @ weight, self.log))
        return x


class SaverProgram(RowsProgram):
    """A model over batches that fill their bucket."""

    name = "saver"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, (WIDTH,))

    def refuse(self, batch, bucket):
        return None if len(batch) == bucket.tokens else Fallback.TOO_FEW_TOKENS

    def load_example(self, buffers, bucket):
        buffers["x"].fill_(0.25)


def batch_of(tokens: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a random batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, WIDTH, generator=generator).to(device).requires_grad_()


def results(run, batch: Tensor, parameters) -> list[Tensor]:
    """Return output and gradients of parameters and input."""
    out = run(batch)
    out = out[0] if isinstance(out, tuple) else out
    weights = torch.linspace(0.5, 1.5, out.numel(), device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [*parameters, batch])]
