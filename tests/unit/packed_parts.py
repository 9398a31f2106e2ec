"""Parts of a small GPT model's layers on graphs over packed documents."""

from contextlib import contextmanager

import torch

from bridge_cg_plugin.options import OFFLOAD_MODULES

from . import packs

# 287 and 500 tokens, of the buckets 320 and 512.
SMALL, LARGE = (30, 180, 77), (300, 150, 50)
# What leaves the device: all, as parts that share memory, or nothing, with memory apart.
CHAIN, APART = OFFLOAD_MODULES, None


def new_model(**options):
    return packs.new_model(**{"layers": 3, **options})


@contextmanager
def on_parts(
    model, modules=("attn",), offload=CHAIN, capture=True, executor=None, warmup=(packs.WARMUP,), grows=False, **options
):
    """Put graphs of parts of layers on a model, each a region of its own; yields its graphs.

    Args:
        model: The model.
        modules: The parts.
        offload: Parts of the model whose activations leave the device; None makes no chain.
        capture: Whether to capture.
        executor: Makes recordings.
        warmup: Lengths of the packs before the capture, or their arguments.
        grows: Whether named buckets are captured when packs ask for them.
        options: Of packed-sequence graphs, by the names that `PackedOptions` has for them.
    """
    values = {f"cuda_graph_packed_{name}": value for name, value in options.items()}
    values |= {"cuda_graph_modules": list(modules), "cuda_graph_packed_offload": offload}
    seen = [lengths if isinstance(lengths, dict) else packs.pack(lengths) for lengths in warmup]
    with (
        packs.ON_CPU(),
        packs.graphs_on(model, *seen, capture=False, executor=executor, grows=grows, **values) as graphs,
    ):
        graphs.workload.family.parts = graphs.workload.family.layer_parts
        if capture:
            graphs.capture()
        yield graphs


def losses(model, lengths, seed=0):
    """Return per-token losses of a pack."""
    return model(**packs.pack(lengths, seed))


def results(model, lengths, seed=0):
    """Return losses and the gradients of all trainable parameters."""
    return packs.losses_and_gradients(model, packs.pack(lengths, seed))


def same(found, expected) -> bool:
    """Whether two `results` are equal to the bit."""
    return torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))
