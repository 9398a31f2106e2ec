"""verl's Megatron engines on one GPU, a policy that is trained and a reference, and batches as they take them.

verl imports ray everywhere, and its engines alone never call it: a module stands in for it where it is missing.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.performance.loops.samples import PAIR, Sample

LEARNING_RATE = 1e-5
# What eager needs as well: attention of a package that is there, and gradients without Apex.
TRANSFORMER = {"attention_backend": "fused", "gradient_accumulation_fusion": False}
KL = 0.1
RAY = "ray"
PORT = 29_511  # where the process that starts runs names none


class RayStandIn(ModuleType):
    """Has every name that somebody asks for; what is called with a class or function returns it, as decorators do."""

    __version__ = "0"

    def __init__(self) -> None:
        super().__init__(RAY)
        self.__spec__ = ModuleSpec(RAY, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _undecorated


def _undecorated(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return _undecorated


def stand_in() -> None:
    """Let `import ray` work where ray is not installed."""
    if RAY not in sys.modules and importlib.util.find_spec(RAY) is None:
        sys.modules[RAY] = RayStandIn()


def join_world() -> None:
    """Be the only process of a process group."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
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


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """Return one jagged tensor of rows."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch_of(samples: Sequence[Sample], old: Tensor | None = None, reference: Tensor | None = None) -> Any:
    """Return verl's `TensorDict` of samples.

    Args:
        samples: Of a round.
        old: Jagged log-probabilities of the responses' tokens by the policy before its update.
        reference: The same by the reference.
    """
    from verl.utils import tensordict_utils as tu

    prompts = [torch.tensor(sample.prompt) for sample in samples]
    responses = [torch.tensor(sample.response) for sample in samples]
    masks = jagged([torch.ones_like(each) for each in responses])
    advantages = [torch.full(each.shape, sample.advantage) for sample, each in zip(samples, responses, strict=True)]
    fields: dict[str, Any] = {
        "input_ids": jagged([torch.cat(both) for both in zip(prompts, responses, strict=True)]),
        "prompts": jagged(prompts),
        "responses": jagged(responses),
        "response_mask": masks,
        "loss_mask": masks.clone(),
        "advantages": jagged(advantages),
        "temperature": torch.ones(len(samples)),
        "multi_modal_inputs": [
            {"pixel_values": sample.pixels(), "image_grid_thw": sample.grid_thw()} for sample in samples
        ],
    }
    if old is not None:
        fields["old_log_probs"] = old
    if reference is not None:
        fields["ref_log_prob"] = reference
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": PAIR,
        "use_remove_padding": True,
        "calculate_entropy": False,
        "global_batch_size": len(samples),
    }
    return tu.get_tensordict(fields, settings)


def response_log_probs(output: Any, batch: Any) -> Tensor:
    """Return the jagged log-probabilities, on the CPU, of the responses' tokens in what an engine returned."""
    from verl.workers.utils.padding import response_from_nested

    found: Tensor = response_from_nested(output["model_output"]["log_probs"].cpu().float(), batch["response_mask"])
    return found
