"""LoRA on the tower, with weights that matter."""

from collections.abc import Sequence

import torch
from torch import nn


def add_lora(model: nn.Module, targets: Sequence[str], dropout: float = 0.0) -> None:
    """Freeze the model and give the named linear modules trainable LoRA weights."""
    from megatron.bridge.peft.lora import LoRA

    LoRA(target_modules=list(targets), dim=8, alpha=8, dropout=dropout)(model, training=True)
    model.cuda().bfloat16().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_out" in name:
                parameter.normal_(std=0.02)
