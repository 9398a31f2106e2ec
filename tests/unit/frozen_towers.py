"""Encoders whose outputs are kept on the host, and images for them."""

from .towers import graphs_on, new_tower

IMAGES, OTHERS = [[1, 4, 8], [1, 4, 4]], [[2, 4, 8]]


def frozen_tower(seed=0):
    return new_tower(seed).requires_grad_(False)


def on_graphs(model, gib=1.0, **options):
    return graphs_on(model, frozen_outputs_gb=gib, **options)


def counts(graphs):
    """Return microbatches that were found and that ran."""
    return graphs.workload.frozen.found, graphs.workload.frozen.replays


def activate(model, function):
    for layer in model.decoder.layers:
        layer.mlp.activation_func = function
