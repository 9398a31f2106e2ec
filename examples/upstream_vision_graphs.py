"""Show that Megatron-Bridge's own vision CUDA graphs compute another function than eager.

    python examples/upstream_vision_graphs.py

Needs an NVIDIA GPU, megatron-bridge 0.6, megatron-core 0.19 and Transformer Engine, and nothing of this package. A
vision encoder of Qwen3-VL with random weights encodes two images: eager, on upstream's graphs, and eager without rotary
position embedding and with both images as one sequence. The graphs agree with the last of these.
"""

import argparse
import os
from types import SimpleNamespace

if __name__ == "__main__":
    os.environ["BRIDGE_CG_PLUGIN"] = "0"  # has an effect only where the plugin is installed

import torch
from torch import Tensor, nn

GRID = ((1, 28, 28), (1, 28, 28))  # two images of 448 x 448 pixels
PATCH = 3 * 2 * 16 * 16


def start() -> None:
    """Start one process's groups, with random states that can be captured."""
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(use_te_rng_tracker=True)
    model_parallel_cuda_manual_seed(1234)
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 1, 1, 1)


def new_encoder(layers: int) -> nn.Module:
    """Return a bf16 vision encoder of Qwen3-VL as Bridge builds it with vision graphs on."""
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import get_vision_model_config
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import PatchMergerSubmodules
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    torch.manual_seed(0)
    base = TransformerConfig(num_layers=1, hidden_size=1152, num_attention_heads=16)
    base.vision_cuda_graph_impl, base.vision_cuda_graph_scope = "transformer_engine", []
    published = Qwen3VLVisionConfig(depth=layers, out_hidden_size=4096, deepstack_visual_indexes=[0, layers // 2])
    config = get_vision_model_config(published, megatron_config=base)
    config.params_dtype, config.bf16, config.gradient_accumulation_fusion = torch.bfloat16, True, False
    spec = get_vit_layer_with_transformer_engine_spec()
    spec.submodules.self_attention.module = Qwen3VLSelfAttention
    merger = PatchMergerSubmodules(TENorm, TEColumnParallelLinear, TERowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    encoder = Qwen3VLVisionModel(config, spec, merger, pg_collection=groups).cuda().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if "linear_qkv.weight" in name:
                parameter.normal_(std=0.05)  # attention as peaked as in a trained model
    return encoder.train()


def configure(encoder: nn.Module, impl: str, length: int) -> None:
    """Set upstream's fields of vision graphs on every configuration in the encoder."""
    for module in encoder.modules():
        if hasattr(module, "config"):
            module.config.cuda_graph_impl, module.config.max_vision_cuda_graph_seq_length = impl, length


class Holder(nn.Module):
    """A model that has a vision encoder, which upstream's helper looks for."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.vision_model = encoder


def on_graphs(encoder: nn.Module, pixels: Tensor, grid: Tensor) -> Tensor:
    """Return the embeddings by upstream's graphs, captured at exactly this length."""
    from megatron.core.transformer.cuda_graphs import VisionTECudaGraphHelper

    configure(encoder, "transformer_engine", len(pixels))
    helper = VisionTECudaGraphHelper([Holder(encoder)], encoder.config, len(pixels), 1, 1)
    helper.create_cudagraphs()
    try:
        return encoder(pixels, grid)[0].detach().clone()
    finally:
        helper.delete_cuda_graphs()
        configure(encoder, "none", 0)


def without_positions_and_boundaries(encoder: nn.Module, pixels: Tensor, grid: Tensor) -> Tensor:
    """Return eager's embeddings without rotary position embedding and with all images as one sequence."""
    rotary, pack = encoder.rot_pos_emb, encoder.build_packed_seq_params
    together = torch.tensor([[1, 1, len(pixels)]], device=grid.device)
    encoder.rot_pos_emb = lambda grid: torch.zeros_like(rotary(grid))
    encoder.build_packed_seq_params = lambda _: pack(together)
    try:
        return encoder(pixels, grid)[0].detach()
    finally:
        encoder.rot_pos_emb, encoder.build_packed_seq_params = rotary, pack


def distance(one: Tensor, other: Tensor) -> float:
    """Return the relative L2 difference of two tensors."""
    return float((one.float() - other.float()).norm() / other.float().norm())


def compare(layers: int) -> SimpleNamespace:
    """Return the differences of outputs, by what is compared."""
    start()
    encoder = new_encoder(layers)
    configure(encoder, "none", 0)
    grid = torch.tensor(GRID, device="cuda")
    pixels = torch.randn(int(grid.prod(1).sum()), PATCH, device="cuda", dtype=torch.bfloat16)
    eager = encoder(pixels, grid)[0].detach()
    again = encoder(pixels, grid)[0].detach()
    changed = without_positions_and_boundaries(encoder, pixels, grid)
    graphs = on_graphs(encoder, pixels, grid)
    return SimpleNamespace(
        two_eager=distance(again, eager), graphs=distance(graphs, eager), graphs_changed=distance(graphs, changed)
    )


def main() -> None:
    """Print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="layers of the encoder; the published one has 27")
    found = compare(parser.parse_args().layers)
    print(f"two eager runs differ by                               {found.two_eager:.1e}")
    print(f"upstream's graphs and eager differ by                  {found.graphs:.1e}")
    print(f"graphs and eager without positions and boundaries by   {found.graphs_changed:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
