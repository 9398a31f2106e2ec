"""What tests make go wrong in the processes of a run; each is called in every process before it trains."""

import os

import torch


def second_rank_cannot_capture() -> None:
    """Let rank 1 run out of memory in its second recording, after both ranks began to capture."""
    from bridge_cg_plugin.graphs import executor

    original, calls = executor.CudaGraphRecording, []

    def recording(*args):
        calls.append(args)
        if os.environ["RANK"] == "1" and len(calls) == 2:
            raise torch.OutOfMemoryError("made to fail")
        return original(*args)

    executor.CudaGraphRecording = recording


def second_rank_cannot_warm_up() -> None:
    """Let rank 1 fail inside a warm-up pass, between two collectives that the other rank has as well."""
    from bridge_cg_plugin.vision.qwen3_vl import Qwen3VLEncoder

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
