"""What GPU tests share: a host that may not wait, a look into graphs' memory, adapters."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Of captures.
ORDERS = {
    "descending": lambda places: sorted(places, reverse=True),
    "ascending": sorted,
    "as they come": lambda places: random.Random(7).sample(places, len(places)),
}


def ordered(monkeypatch, order: str) -> None:
    """Let captures come in another order than the largest first."""
    from bridge_cg_plugin.graphs.region import Region

    planned = Region._planned
    monkeypatch.setattr(Region, "_planned", lambda region, index: ORDERS[order](planned(region, index)))


@contextmanager
def host_may_not_wait() -> Iterator[None]:
    """Let PyTorch raise where the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def vision_graphs(model: nn.Module, capture: bool = True, around: dict[str, Any] | None = None, **options: Any) -> Any:
    """Put vision graphs on an encoder, strict unless an option says otherwise; returns their helper.

    Args:
        model: The encoder.
        capture: Whether to capture at once.
        around: Further arguments of the helper.
        options: Graph options.
    """
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_helper
    from tests.models.tower import MainGrads

    settings: dict[str, Any] = {"impl": "transformer_engine", "strict": True, **options}
    helper = encoder_helper(model, model.config, options=VisionGraphOptions(**settings), **(around or {}))
    MainGrads.reduce_gradients(model, helper.graphs)
    if capture:
        helper.create_cudagraphs()
    return helper


def equal(found, expected) -> bool:
    """Whether tensors are equal to the bit."""
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def poison(graphs) -> None:
    """Fill every static floating-point buffer with NaN, as memory nobody wrote may be."""
    for slot in (slot for region in graphs._regions for slot in region.slots):
        shared = [] if slot.shared is None else [slot.shared.tensors(slot.index)]
        for flat in (flat for tensors in (slot.static, *shared) for flat in tensors.storages):
            if flat.is_floating_point():
                flat.fill_(torch.nan)


def memories(graphs) -> list:
    """Return the memory of each slot's recordings, once each."""
    slots = [slot.common for region in graphs._regions for slot in region.slots]
    return list(dict.fromkeys(memory for common in slots for memory in common._memory.values()))


def spoil(graphs) -> None:
    """Fill all arenas with NaN, as other recordings may leave anything there."""
    device = torch.device("cuda", torch.cuda.current_device())
    for memory in memories(graphs):
        if nbytes := memory.nbytes:
            storage = torch._C._construct_storage_from_data_pointer(memory._addresses.first, device, nbytes)
            content: Tensor = torch.empty(0, dtype=torch.uint8, device=device)
            content.set_(storage, 0, (nbytes,), (1,)).fill_(255)


def add_lora(model: nn.Module, targets: Sequence[str], dropout: float = 0.0) -> None:
    """Freeze the model and give the named linear modules trainable LoRA weights that matter."""
    from megatron.bridge.peft.lora import LoRA

    LoRA(target_modules=list(targets), dim=8, alpha=8, dropout=dropout)(model, training=True)
    model.cuda().bfloat16().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_out" in name:
                parameter.normal_(std=0.02)
