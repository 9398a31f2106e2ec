"""A loop that calls megatron-core's schedule itself, and a model for it."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from torch import nn

import bridge_cg_plugin
from bridge_cg_plugin.upstream.hooks.any_loop import LOOPS
from tests.unit.towers import assert_close, draw, loss_of, new_tower

SIZES = ([[1, 4, 6]], [[1, 8, 8], [1, 4, 4]], [[2, 4, 4]])
ZEROS = torch.zeros
FIELDS = {
    "vision_cuda_graph_impl": "transformer_engine",
    "vision_cuda_graph_buckets": [32, 64, 128],
    "vision_cuda_graph_strict": True,
    "vision_cuda_graph_exact_below": 0,
    "cuda_graph_warmup_steps": 1,
}


class Policy(nn.Module):
    """A vision-language model as far as its encoder."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, seed=0, **fields):
        super().__init__()
        self.vision_model = new_tower(seed)
        self.config = copy.copy(self.vision_model.config)
        vars(self.config).update({**FIELDS, **fields}, timers=None, calculate_per_token_loss=False)

    def set_input_tensor(self, tensor): ...

    def forward(self, rows, seed):
        hidden, deepstack = self.vision_model(*draw(rows, seed))
        return loss_of([hidden, *deepstack])


def gathers(chunk, model, waits, align=False):
    """Let a chunk look as data parallelism does that gathers a model's parameters while it computes.

    Args:
        chunk: A module around the model.
        model: The model.
        waits: What is called, with `skip_next_bucket_dispatch`, to wait for each group of parameters.
        align: Whether groups are dispatched by the pipeline's schedule.
    """
    parameters, groups = list(model.parameters()), [SimpleNamespace(finish_param_sync=wait) for wait in waits]
    chunk.param_to_bucket_group = {p: groups[i * len(groups) // len(parameters)] for i, p in enumerate(parameters)}
    chunk.ddp_config = SimpleNamespace(align_param_gather=align, overlap_grad_reduce=False)
    chunk.remove_forward_pre_hook_handles = {"module": "handle"}


def on_cpu(*args, device=None, **kwargs):
    return ZEROS(*args, **kwargs)


def call(model, microbatches, forward_only=False, seed=0):
    """Run one schedule call as a loop does; returns the losses and, after training, the gradients."""
    losses = run_schedule(model, [(SIZES[i % len(SIZES)], seed + i) for i in range(microbatches)], forward_only)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return losses, gradients


def run_schedule(model, microbatches, forward_only):
    """Run one schedule call over microbatches, which are the model's arguments; returns the losses."""

    def step(iterator, chunk):
        loss = chunk(*next(iterator))
        return loss, lambda output: (output, {"loss": output.detach().clone()})

    model.zero_grad(set_to_none=True)
    with mock.patch.object(torch, "zeros", on_cpu):
        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=[model],
            num_microbatches=len(microbatches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return [each["loss"] for each in found]


def assert_equal(actual, expected):
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


def in_one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let schedules run without a process group inside; models of before and after have nothing to do with it."""
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(**dict.fromkeys(("tp", "cp", "pp", "embd", "pos_embd", "dp_cp"), alone))
    if hasattr(schedules, "_build_default_pg_collection"):
        monkeypatch.setattr(schedules, "_build_default_pg_collection", lambda: groups)
    monkeypatch.setattr(schedules.parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)
    LOOPS.forget()
    yield
    bridge_cg_plugin.deactivate()
    bridge_cg_plugin.activate()
