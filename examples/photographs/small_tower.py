"""Bridge's Qwen3-VL vision tower on a CPU: small, fp32, with a layer spec that needs no Transformer Engine kernel."""

import copy
import os
import socket
from typing import Any

import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import get_vision_model_config
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import PatchMergerSubmodules
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
from megatron.core import parallel_state
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig


def start_single_process() -> None:
    """Start the process groups that Megatron's modules ask for, for one process on a CPU."""
    if not torch.distributed.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ["MASTER_PORT"] = str(port)
        parallel_state.destroy_model_parallel()  # of process groups that somebody ended
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(1234)


class SegmentAttention(nn.Module):
    """Attention inside the segments of a packed batch, by a dense mask made from `cu_seqlens`."""

    def __init__(self, config: TransformerConfig, **unused: object) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **unused: object,
    ) -> Tensor:
        """Attend; `query`, `key`, `value` are `[tokens, heads, width]`. Tokens outside every segment give zero."""
        ends = packed_seq_params.cu_seqlens_q[1:].contiguous()
        token = torch.arange(query.shape[0], device=query.device, dtype=ends.dtype)
        segment = torch.searchsorted(ends, token, right=True)
        inside = (token < ends[-1])[:, None]
        mask = (segment[:, None] == segment[None, :]) & inside & inside.T
        # A row with no key would be NaN: padding attends to itself and is zeroed below.
        mask = mask | torch.eye(len(token), dtype=torch.bool, device=mask.device)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0].transpose(0, 1)
        return torch.where(inside, context.reshape(len(token), -1), 0)


def vision_config(
    layers: int = 4, width: int = 64, heads: int = 4, out: int = 96, deepstack: bool = True, **changes: Any
) -> Qwen3VLVisionConfig | Qwen3_5VisionConfig:
    """Return a small vision configuration in Hugging Face's terms: Qwen3-VL's, or Qwen3.5-VL's without deepstack."""
    features = {"deepstack_visual_indexes": [0, layers // 2]} if deepstack else {}
    settings: dict[str, Any] = {
        "depth": layers,
        "hidden_size": width,
        "num_heads": heads,
        "intermediate_size": 2 * width,
        "out_hidden_size": out,
        "num_position_embeddings": 256,
        **features,
    }
    return (Qwen3VLVisionConfig if deepstack else Qwen3_5VisionConfig)(**{**settings, **changes})


def build_tower(seed: int = 0, **changes: Any) -> Qwen3VLVisionModel:
    """Build the tower with random weights, in training mode; tensor-parallel ranks hold parts of the same weights.

    Args:
        seed: Of the weights.
        changes: Arguments of `vision_config`.
    """
    start_single_process()
    torch.manual_seed(seed)
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    base = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
    )
    config = get_vision_model_config(vision_config(**changes), megatron_config=base)
    config.use_cpu_initialization = True
    config.perform_initialization = True
    config.gradient_accumulation_fusion = False
    spec = copy.deepcopy(get_vit_layer_with_local_spec())
    spec.submodules.self_attention.module = Qwen3VLSelfAttention
    spec.submodules.self_attention.submodules.core_attention = SegmentAttention
    merger = PatchMergerSubmodules(WrappedTorchNorm, ColumnParallelLinear, RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = Qwen3VLVisionModel(config, spec, merger, pg_collection=groups)
    half = config.hidden_size // config.num_attention_heads // 2
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, half, 2, dtype=torch.float) / half))
    model.rotary_pos_emb.register_buffer("inv_freq", frequencies, persistent=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_qkv.weight" in name:
                whole = parameter.new_empty(ranks * parameter.shape[0], *parameter.shape[1:]).normal_(std=0.05)
                parameter.copy_(whole.chunk(ranks)[rank])
    return model.train()
