"""Bridge's vision tower on a CPU and its graphs through the reference executor."""

from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import torch

import bridge_cg_plugin
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks import train_loop
from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_helper
from examples.photographs.small_tower import build_tower

from ..executors import new_executor
from . import toy

bridge_cg_plugin.activate()

PATCH = 3 * 2 * 16 * 16
DEFAULTS = {
    "impl": "transformer_engine",
    "buckets": (32, 64, 128, 256),
    "max_frames": 16,
    "exact_below": 0,
    "strict": True,
}


def new_tower(seed: int = 0, deepstack: bool = True, heads: int = 2, layers: int = 3):
    """Build a tower, two of whose layers feed deepstack mergers; without deepstack it is Qwen3.5-VL's."""
    return build_tower(seed, layers=layers, width=32, heads=heads, out=24, deepstack=deepstack)


@cache
def tower():
    """Return a tower that no test changes."""
    return new_tower()


def draw(rows, seed: int = 0):
    """Return random patches and the grid for them."""
    grid = torch.tensor(rows)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grid.prod(1).sum()), PATCH, generator=generator), grid


def move(module):
    """Give a module's parameters other memory."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def split_dim(parameter):
    """Return the dimension in which tensor-parallel ranks split a parameter; None where each has all of it."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def bridges_step(chunks, provider, work):
    """Do something in a step of Bridge's train loop as the plugin has it; returns the result."""
    step = train_loop._with_steps(lambda model, global_state: work())
    return step(chunks, SimpleNamespace(cfg=SimpleNamespace(model=provider)))


def new_helper(model, holder=None, executor=None, num_microbatches: int = 1, **options):
    """Return the train loop's helper for the encoder, with what holds the encoder, before a capture."""
    options = VisionGraphOptions(**{**DEFAULTS, **options})
    given = {"num_microbatches": num_microbatches, "options": options, "executor": executor or new_executor()}
    return encoder_helper(model if holder is None else holder, model.config, **given)


@contextmanager
def graphs_on(model, capture: bool = True, executor=None, **options):
    """Put graphs on the encoder for the duration; yields the `GraphManager`."""
    helper = new_helper(model, executor=executor, **options)
    assert helper.graphs is not None, f"{type(model).__name__} holds no encoder that is declared"
    try:
        if capture:
            helper.create_cudagraphs()
            assert helper.graphs.captured
        yield helper.graphs
    finally:
        if helper.graphs is not None:
            helper.graphs.detach()
            helper.graphs = None


def poison(graphs, value: float) -> None:
    """Overwrite all static memory: floats with `value`, integers with a number that fits nothing."""
    for region in graphs._regions:
        toy.poison(region, value)


def planned(graphs):
    """Return what of the only bucket leaves, with its inventory."""
    ((found,),) = graphs._regions[0].chain.offloading._plans.values()
    return found


def forward(model, rows, seed: int = 0):
    """Return the encoder's outputs as one list: embeddings, then deepstack features."""
    hidden, deepstack = model(*draw(rows, seed))
    return [hidden, *deepstack]


def loss_of(outputs):
    """Weigh every element differently, so that swapped rows are seen."""
    return sum((o * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outputs)


def results(model, rows, seed: int = 0):
    """Return outputs and the gradients of all trainable parameters."""
    outputs = forward(model, rows, seed)
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [o.detach() for o in outputs], torch.autograd.grad(loss_of(outputs), wanted)


def assert_close(actual, expected, tolerance: float = 2e-5) -> None:
    """Compare lists of tensors by relative L2 difference; NaN fails."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        difference = (a - b).norm() / b.norm().clamp(min=1e-3)
        assert difference <= tolerance, f"tensor {index} differs by {difference:.2e}"
