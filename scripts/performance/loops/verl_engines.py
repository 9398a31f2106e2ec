"""verl's Megatron engines on one GPU without ray: a policy that is trained, and a reference."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.performance.loops.ray_stand_in import stand_in
from scripts.performance.loops.rounds import join_alone

LEARNING_RATE = 1e-5
# What eager needs as well: attention of a package that is there, and gradients without Apex.
TRANSFORMER = {"attention_backend": "fused", "gradient_accumulation_fusion": False}
KL = 0.1


def join_world() -> None:
    """Be the only process of a process group."""
    join_alone()
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def engine_of(model: Path, trained: bool, fields: Mapping[str, Any], lora: Mapping[str, Any] | None = None) -> Any:
    """Return an engine whose model is not built yet.

    Args:
        model: Folder of the model's files.
        trained: Whether it has an optimizer.
        fields: Fields of the model's provider.
        lora: verl's settings of adapters; None trains all weights.
    """
    stand_in()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    return MegatronEngineWithLMHead(
        HFModelConfig(path=str(model), lora=dict(lora or {})),
        McoreEngineConfig(
            forward_only=not trained,
            vanilla_mbridge=False,
            use_dynamic_bsz=False,
            override_transformer_config={**TRANSFORMER, **fields},
        ),
        McoreOptimizerConfig(
            lr=LEARNING_RATE, lr_decay_style="constant", lr_decay_steps=1000, total_training_steps=1000
        ),
        CheckpointConfig(),
    )


def loss_function() -> Any:
    """Return verl's loss of PPO with a term for the distance from the reference."""
    stand_in()
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=2, use_kl_loss=True, kl_loss_coef=KL
    )
    return partial(ppo_loss, config)


def log_probs_of(engine: Any, batch: Any) -> Any:
    """Return what an engine computes of a batch in evaluation."""
    with engine.eval_mode(disable_auto_offload=True):
        return engine.infer_batch(batch)


def compute_gradients(engine: Any, batch: Any, loss: Any) -> None:
    """Let a policy go forward and backward over a batch as an update does, and forget the gradients."""
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss, forward_only=False)
        engine.optimizer_zero_grad()


def train(engine: Any, batch: Any, loss: Any) -> tuple[float, float]:
    """Update a policy once; returns the loss and the gradients' norm."""
    with engine.train_mode(disable_auto_offload=True):
        found = engine.train_batch(batch, loss)
    return float(sum(found["loss"])), float(found["metrics"]["grad_norm"])


def sizes_of(engine: Any) -> list[int]:
    """Return bytes of the blocks that leave the device with an engine's parameters and gradients."""
    found = []
    for chunk in engine.module:
        buffers = [*getattr(chunk, "buffers", [])] if not callable(getattr(chunk, "buffers", None)) else []
        for buffer in buffers:
            found += [each.nbytes for each in (buffer.param_data, buffer.grad_data) if each is not None]
        found += [each.nbytes for each in chunk.parameters() if not (buffers and each.requires_grad)]
    return found


def addresses_of(engine: Any) -> list[int]:
    """Return the addresses of an engine's parameters."""
    return [parameter.data_ptr() for chunk in engine.module for parameter in chunk.parameters()]
