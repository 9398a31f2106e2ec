"""What the plain loop trains: Qwen3-VL on a GPU, its vision tower with a small head on a CPU."""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
from megatron.core.enums import ModelType
from torch import Tensor, nn

from examples.photographs.images import SMALL_SIZES, Images, draw_images

from .photographs.cpu import Captioner

SEED = 1234
ZEROS = torch.zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model and what a loop needs to train it.

    Attributes:
        model: Its chunks.
        batches: Microbatches, one after the other.
        forward_step: Takes the batches and the model; returns what the schedule wants.
        zero_gradients: Called before a step.
        update: Called after the schedule; makes the optimizer's step and returns the gradients' norm.
        sequence: Tokens of a microbatch.
        options: Graph options that the model wants.
        running: Entered around training.
    """

    model: list[nn.Module]
    batches: Iterator[Any]
    forward_step: Callable[..., tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]]
    zero_gradients: Callable[[], None]
    update: Callable[[], float | Tensor]
    sequence: int = 1
    options: Sequence[str] = ()
    running: Callable[[], AbstractContextManager[Any]] = nullcontext


def build(small: bool = False) -> Job:
    """Return the job for this machine; `small` is for GPUs."""
    return _on_gpu(small) if torch.cuda.is_available() else _on_cpu()


def _told(loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return loss, {"loss": loss.detach().clone()}


def _on_gpu(small: bool) -> Job:
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    from bridge_cg_plugin.cli.runs.recipe import free_port
    from examples.photographs.images import PhotographDataset
    from examples.photographs.training import Run, model_provider

    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    run = Run(small=small)
    provider = model_provider(run)
    provider.finalize()
    torch.manual_seed(SEED)  # some weights are drawn outside of megatron-core's tracker
    provider.initialize_model_parallel(seed=SEED, seed_kwargs={"te_rng_tracker": True})
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = provider.provide_distributed_model(ddp_config=ddp)
    settings = OptimizerConfig(lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, model)
    config = get_model_config(model[0])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss

    def zero_gradients() -> None:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()

    samples = PhotographDataset(1 << 30, provider.seq_length, run.most_images(), run.sizes(), 1, 0)
    return Job(
        model=model,
        batches=(samples.collate_fn([samples[index]]) for index in count()),
        forward_step=_caption_step,
        zero_gradients=zero_gradients,
        update=lambda: optimizer.step()[1],
        sequence=provider.seq_length,
    )


def _caption_step(batches: Iterator[Any], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return the losses of a microbatch's tokens, and what makes one of them."""
    # Bridge's own tells the plugin of the images' sizes while the host has them; any other way works too.
    from megatron.bridge.models.qwen_vl.qwen3_vl_step import get_batch_from_iterator

    batch = get_batch_from_iterator(batches, is_first_pp_stage=True, is_last_pp_stage=True)
    losses = model(
        input_ids=batch["tokens"],
        position_ids=None,
        attention_mask=None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        **batch["visual_inputs"].normalized_for_model(),
    )
    return losses, partial(_mean, batch["loss_mask"])


def _mean(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return _told((losses.float() * mask).sum() / mask.sum())


class Photographs(nn.Module):
    """A model as megatron-core's schedule calls it: the vision tower and a head that names each photograph."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self) -> None:
        super().__init__()
        self.captioner = Captioner()
        self.vision_model = self.captioner.tower
        self.config = copy.copy(self.vision_model.config)
        self.config.timers = None

    def set_input_tensor(self, tensor: Any) -> None:
        """Take nothing: there is one pipeline stage."""

    def forward(self, images: Images) -> Tensor:
        """Return the mean loss of the photographs."""
        return self.captioner.loss(images)


def _on_cpu() -> Job:
    print("No GPU: Bridge's vision tower (small, fp32) on the CPU, graphs through the reference executor.")
    model = Photographs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update() -> Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return norm

    return Job(
        model=[model],
        batches=(draw_images(index, 3, SMALL_SIZES) for index in count()),
        forward_step=lambda batches, chunk: (chunk(next(batches)), _told),
        zero_gradients=optimizer.zero_grad,
        update=update,
        options=("max_vision_cuda_graph_seq_length=1024", "vision_cuda_graph_tuning.exact_below=0"),
        running=lambda: mock.patch.object(torch, "zeros", _zeros_on_cpu),
    )


def _zeros_on_cpu(*args: Any, **kwargs: Any) -> Tensor:
    """Stand in for `torch.zeros`: megatron-core's schedule counts its tokens on a GPU."""
    return ZEROS(*args, **{**kwargs, "device": "cpu"})
