"""What tests change in the processes of a run, mostly for the worse; called in every process before it trains."""

import functools
import os
import time

import torch


def second_rank_cannot_capture() -> None:
    """Let rank 1 run out of memory in its second recording, after both ranks began to capture."""
    from bridge_cg_plugin.graphs.recordings import executor

    original, calls = executor.CudaGraphRecording, []

    def recording(*args):
        calls.append(args)
        if os.environ["RANK"] == "1" and len(calls) == 2:
            raise torch.OutOfMemoryError("made to fail")
        return original(*args)

    executor.CudaGraphRecording = recording


def second_rank_cannot_warm_up() -> None:
    """Let rank 1 fail inside a warm-up pass, between two collectives that the other rank has as well."""
    from bridge_cg_plugin.upstream.encoders.qwen3_vl import Qwen3VLEncoder

    original = Qwen3VLEncoder.forward

    def forward(self, buffers, bucket):
        outputs = original(self, buffers, bucket)
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("made to fail")
        return outputs

    Qwen3VLEncoder.forward = forward


def stale_weights_are_nan() -> None:
    """Overwrite, after every optimizer step, what has to be gathered from other ranks before anyone may read it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._copy_main_params_to_model_params

    def copy_main_params_to_model_params(self):
        original(self)
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
                for index, shard in enumerate(bucket.param_data.view(size, -1)):
                    if index != rank:
                        shard.fill_(torch.nan)

    DistributedOptimizer._copy_main_params_to_model_params = copy_main_params_to_model_params


# Steps before the fault: three of warm-up, then two on graphs.
GOOD_STEPS = 5
TIMEOUT_MINUTES = 0.5


def second_rank_stops() -> None:
    """Let rank 1 stop in a step on graphs, as if it waited for data for ever, with a short time-out of its peers.

    NCCL's watchdog waits for longer than the plugin's report may take before it ends a rank.
    """
    from megatron.bridge.training import train

    from examples.photographs import training

    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "120000"
    training.DistributedInitConfig = functools.partial(
        training.DistributedInitConfig, distributed_timeout_minutes=TIMEOUT_MINUTES
    )
    original, steps = train.train_step, []

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        steps.append(None)
        if os.environ["RANK"] == "1" and len(steps) > GOOD_STEPS:
            time.sleep(3600)
        return original(*args, **kwargs)

    train.train_step = train_step
