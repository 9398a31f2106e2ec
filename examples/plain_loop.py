"""A training loop of one's own over megatron-core's schedule, on graphs by one call. Copy it.

    python examples/plain_loop.py --model Qwen/Qwen3-VL-2B-Instruct

Needs a GPU, megatron-bridge and the model's files. `--cuda-graphs off` trains eager, to compare losses and times.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

import bridge_cg_plugin

TEXT = "<|vision_start|><|image_pad|><|vision_end|>Noise of several sizes."
Step = Callable[[Iterator[Any], torch.nn.Module], Any]


def train(model: Sequence[torch.nn.Module], optimizer: Any, step: Step, batches: Any, steps: int) -> Iterator[float]:
    """Train; yields every step's mean loss. Steps may have any number of microbatches."""
    schedule: Any = get_forward_backward_func()
    for number in range(steps):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        microbatches = 2 + number % 3
        call: Any = {"forward_step_func": step, "data_iterator": batches, "model": list(model), "forward_only": False}
        losses = schedule(**call, num_microbatches=microbatches, seq_length=1, micro_batch_size=1)
        optimizer.step()
        yield sum(float(each["loss"]) for each in losses) / microbatches


def caption_step(batches: Iterator[Any], model: torch.nn.Module) -> Any:
    """Return the losses of a microbatch's tokens, and what makes one of them."""
    batch = next(batches)
    tokens, images = batch["input_ids"], {name: batch[name] for name in ("pixel_values", "image_grid_thw")}
    labels, mask = tokens.roll(-1, 1), (tokens != tokens[:, -1:]).float()

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (losses.float() * mask).sum() / mask.sum()
        return loss, {"loss": loss.detach().clone()}

    return model(tokens, position_ids=None, attention_mask=None, labels=labels, loss_mask=mask, **images), mean


def main() -> None:
    """Build the model, put it on graphs, train on noise."""
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from PIL import Image
    from transformers import AutoProcessor

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-VL-2B-Instruct", help="name on the hub, or a folder")
    parser.add_argument("--cuda-graphs", default="exact", choices=("exact", "fastest", "off"))
    args = parser.parse_args() if torch.cuda.is_available() else parser.error("it needs an NVIDIA GPU")
    provider: Any = AutoBridge.from_hf_pretrained(args.model).to_megatron_provider()
    provider.finalize()
    provider.initialize_model_parallel(seed=1234, seed_kwargs={"te_rng_tracker": True})
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = provider.provide_distributed_model(ddp_config=ddp)
    settings = OptimizerConfig(lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, model)
    provider.finalize_model_grads_func, provider.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    bridge_cg_plugin.enable(model, cuda_graphs=args.cuda_graphs)
    processor = AutoProcessor.from_pretrained(args.model)
    images = (Image.effect_noise((64 * (4 + n % 5), 256), 50).convert("RGB") for n in count())
    batches = (processor(text=[TEXT], images=[image], return_tensors="pt").to("cuda") for image in images)
    began = time.perf_counter()
    for loss in train(model, optimizer, caption_step, batches, steps=20):
        print(f"loss {loss:.4f}, {time.perf_counter() - began:.2f} s since the start", flush=True)


if __name__ == "__main__":
    main()
