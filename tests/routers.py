"""What tests look at of megatron-core's routers."""

from collections.abc import Sequence

from torch import Tensor, nn

from bridge_cg_plugin.upstream.decoder.experts import statistics_of


def take_statistics(routers: Sequence[nn.Module]) -> list[Tensor]:
    """Return what routers count and megatron-core would log, and set it to zero."""
    tensors = statistics_of(routers)
    values = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    return values
