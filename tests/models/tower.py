"""The full-size Qwen3-VL vision tower on a GPU, with Megatron's gradient accumulation, and the benchmark's batches.

Without a GPU the tower is `small_tower`'s: the same code runs, for tests.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from scripts.performance.measure import on_gpu
from tests.models.workloads import Grid, frames_of

# Tensors whose differences are there at the same time: few launches, and little memory beside that of large models.
SUBTRACTED = 16


def start_process() -> None:
    """Start one process's distributed state with graph-safe random number trackers."""
    if not on_gpu():
        from examples.photographs.small_tower import start_single_process

        return start_single_process()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(0)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
        parallel_state.initialize_model_parallel()
    initialize_rng_tracker(use_te_rng_tracker=True)
    model_parallel_cuda_manual_seed(1234)


def build_tower(
    seed: int = 0, layers: int = 27, impl: str = "none", dtype: torch.dtype = torch.bfloat16, deepstack: bool = True
) -> nn.Module:
    """Build Qwen3-VL-8B's tower (576 M parameters) with random weights on the current GPU.

    Query-key-value weights get std 0.05, which makes attention as peaked as in a trained model. Without a GPU it is a
    small fp32 tower, and only the seed counts.

    Args:
        seed: Of the weights.
        layers: Transformer layers.
        impl: `vision_cuda_graph_impl` as upstream would see it.
        dtype: Of the weights.
        deepstack: Whether layers give further features, as Qwen3-VL's do; without it the configuration is Qwen3.5-VL's.
    """
    if not on_gpu():
        from examples.photographs.small_tower import build_tower as build_small

        small: nn.Module = build_small(seed, layers=3, width=32, heads=2, out=24, deepstack=deepstack)
        return small
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import get_vision_model_config
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import PatchMergerSubmodules
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    torch.manual_seed(seed)
    base = TransformerConfig(num_layers=1, hidden_size=1152, num_attention_heads=16)
    base.vision_cuda_graph_impl, base.vision_cuda_graph_scope = impl, []
    hf: Qwen3VLVisionConfig | Qwen3_5VisionConfig = Qwen3_5VisionConfig(depth=layers, out_hidden_size=4096)
    if deepstack:
        indexes = [8, 16, 24] if layers >= 25 else [0, layers // 2]
        hf = Qwen3VLVisionConfig(depth=layers, out_hidden_size=4096, deepstack_visual_indexes=indexes)
    config = get_vision_model_config(hf, megatron_config=base)
    config.params_dtype, config.bf16, config.gradient_accumulation_fusion = dtype, dtype is torch.bfloat16, False
    spec = get_vit_layer_with_transformer_engine_spec()
    spec.submodules.self_attention.module = Qwen3VLSelfAttention
    merger = PatchMergerSubmodules(TENorm, TEColumnParallelLinear, TERowParallelLinear)
    built = Qwen3VLVisionModel(config, spec, merger, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    model: nn.Module = built.cuda().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_qkv.weight" in name:
                parameter.normal_(std=0.05)
    return model.train()


class MegatronParameter(nn.Parameter):
    """What Megatron's data parallelism makes of a parameter.

    Attributes:
        main_grad: Where gradients are added up, in fp32.
        grad_added_to_main_grad: Whether the backward has added this one.
    """

    main_grad: Tensor
    grad_added_to_main_grad: bool


class MainGrads:
    """Accumulates gradients into fp32 `main_grad` in a hook on each parameter, as Megatron's data parallelism does.

    It is a `Reduction` for the plugin, too, as data parallelism is; in graphs of the model by `reduce_gradients`.
    """

    _awaited = True
    _of: ClassVar[WeakValueDictionary[int, "MainGrads"]] = WeakValueDictionary()

    def __init__(self, model: nn.Module) -> None:
        self.parameters = cast("list[MegatronParameter]", [p for p in model.parameters() if p.requires_grad])
        self._accumulators: list[Any] = []
        MainGrads._of[id(model)] = self
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.grad_added_to_main_grad = False
        self.attach()

    def attach(self) -> None:
        """Put the hooks on the parameters."""
        for parameter in self.parameters:
            expanded: Any = parameter.expand_as(parameter)  # lives as long as its node is looked at
            node = expanded.grad_fn.next_functions[0][0]
            node.register_hook(self._hook(parameter))
            self._accumulators.append(node)

    def release(self) -> None:
        """Drop the hooks with their nodes, which remember the stream that they were made on, until `attach`."""
        self._accumulators = []

    @staticmethod
    def _hook(parameter: MegatronParameter) -> Callable[..., None]:
        def accumulate(*unused: object) -> None:
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        return accumulate

    def waits(self) -> bool:
        """See `graphs.replays.gradients.Reduction`."""
        return self._awaited

    def arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `graphs.replays.gradients.Reduction`."""

    @staticmethod
    def reduce_gradients(model: nn.Module, graphs: Any) -> None:
        """Let the next recordings of a model's graphs, or of a part's, add to its `main_grad`, if it has them."""
        reduction = MainGrads._of.get(id(model))
        graphs.surroundings = replace(graphs.surroundings, reduction=reduction)

    def zero(self) -> None:
        """Zero all gradients."""
        torch._foreach_zero_([p.main_grad for p in self.parameters])

    def copy(self) -> list[Tensor]:
        """Return copies of all gradients."""
        return [p.main_grad.clone() for p in self.parameters]


@dataclass(slots=True)
class Batch:
    """Inputs of one case on the GPU, with random gradients for the outputs."""

    pixels: Tensor
    grid: Tensor
    gradients: list[Tensor]
    rows: Grid

    @property
    def tokens(self) -> int:
        """Patches."""
        return self.pixels.shape[0]

    @property
    def frames(self) -> int:
        """Images and video frames."""
        return frames_of(self.rows)


def make_batch(grid: Grid, model: nn.Module, seed: int = 1) -> Batch:
    """Make random pixels for a grid; the grid is announced to the plugin as Bridge's batch step does."""
    from bridge_cg_plugin.upstream.hooks.batches import GRIDS

    parameter = next(model.parameters())
    where, dtype = parameter.device, parameter.dtype
    generator = torch.Generator(where).manual_seed(seed)
    host = torch.tensor(grid)
    tokens = int(host.prod(1).sum())
    pixels = torch.randn(tokens, 1536, device=where, generator=generator).to(dtype)
    decoder: Any = model.decoder
    config: Any = model.config
    outputs = 1 + len(decoder.deepstack_merger_list)
    shape = (tokens // 4, config.out_hidden_size)
    gradients = [torch.randn(shape, device=where, generator=generator).to(dtype) for _ in range(outputs)]
    device = host.to(where, copy=True)
    GRIDS.remember(device, host)
    return Batch(pixels, device, gradients, grid)


def forward(model: Callable[..., tuple[Any, ...]], batch: Batch) -> list[Tensor]:
    """Return all outputs of the tower, or of what stands in for it."""
    hidden, deepstack = model(batch.pixels, batch.grid)
    return [hidden, *deepstack]


def step(
    model: Callable[..., tuple[Any, ...]], batch: Batch, between: Callable[[], object] | None = None
) -> list[Tensor]:
    """Run forward and backward; returns the outputs. `between` is called when the forward was submitted."""
    outputs = forward(model, batch)
    if between is not None:
        between()
    pairs = [(o, g) for o, g in zip(outputs, batch.gradients, strict=True) if o.requires_grad]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return [o.detach() for o in outputs]


def new_helper(model: nn.Module, options: Any) -> Any:
    """Capture the tower with the options and return its helper."""
    from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_helper

    helper = encoder_helper(model, model.config, options=options)
    MainGrads.reduce_gradients(model, helper.graphs)
    try:
        helper.create_cudagraphs()
    except BaseException:
        if helper.graphs is not None:
            helper.graphs.detach()
        helper.graphs = None
        raise
    return helper


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 difference in fp32."""
    distance = (actual.float() - expected.float()).norm()
    return float(distance / expected.float().norm().clamp(min=1e-30))


def relatives(actual: Sequence[Tensor], expected: Sequence[Tensor], least: float = 0.0) -> Tensor:
    """Return the relative L2 differences of matching fp32 tensors, `[tensors]`, without waiting for the device.

    Args:
        actual: Tensors.
        expected: What they should be.
        least: A norm counts as at least this share of the largest.
    """
    distances: list[Tensor] = []
    for pairs in batched(zip(actual, expected, strict=True), SUBTRACTED):
        ones, others = map(list, zip(*pairs, strict=True))
        distances += torch._foreach_norm(torch._foreach_sub(ones, others))
    norms = torch.stack(torch._foreach_norm(list(expected)))
    return torch.stack(distances) / torch.maximum(norms, least * norms.max()).clamp(min=1e-30)


def largest_relative(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative L2 difference of matching tensors; NaN if one of them is."""
    return float(relatives([a.float() for a in actual], [e.float() for e in expected]).max())
