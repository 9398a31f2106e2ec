"""Bridge's Qwen3-VL model on a CPU: small, fp32, its step and megatron-core's schedule with it."""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.bridge.models.qwen_vl import qwen3_vl_step
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model as modelling
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import Qwen3VLTransformerConfig
from megatron.core.enums import ModelType
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from torch.nn import functional

from bridge_cg_plugin.upstream.hooks import train_loop
from examples.photographs.small_tower import SegmentAttention, start_single_process, vision_config
from tests.models.language_model import DENSE

from .test_gradients import DataParallel

HIDDEN, LAYERS, HEADS, WIDTH, VOCABULARY = 32, 3, 2, 16, 64
SEQUENCE = 48
IMAGE, VIDEO, START = 60, 61, 62
PATCH = 3 * 2 * 16 * 16
# Of the language model's configuration and of its provider.
FIELDS = {
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "kv_channels": WIDTH,
    "vocab_size": VOCABULARY,
    "language_max_sequence_length": SEQUENCE,
    **DENSE,
    "mrope_section": [4, 2, 2],
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "use_cpu_initialization": True,
    "deallocate_pipeline_outputs": True,
    "pipeline_dtype": torch.float32,
}


class CausalAttention(nn.Module):
    """Causal attention of `[sequence, batch, heads, width]`."""

    def __init__(self, config, *unused, **unused_too) -> None:
        super().__init__()

    def forward(self, query, key, value, attention_mask=None, attention_bias=None, **unused):
        sequence, batch = query.shape[:2]
        heads = [t.permute(1, 2, 0, 3) for t in (query, key, value)]
        if heads[1].shape[1] != heads[0].shape[1]:
            repeat = heads[0].shape[1] // heads[1].shape[1]
            heads[1:] = [t.repeat_interleave(repeat, dim=1) for t in heads[1:]]
        keep = torch.ones(sequence, sequence, dtype=torch.bool).tril()
        if attention_mask is not None:
            keep = keep & ~attention_mask
        if attention_bias is not None:  # says all that a token may see
            keep = attention_bias
        context = functional.scaled_dot_product_attention(*heads, attn_mask=keep)
        return context.permute(2, 0, 1, 3).reshape(sequence, batch, -1)


class Norm:
    """PyTorch's norms, under sequence parallelism too, where a weight's gradient is what the ranks have together."""

    def __new__(cls, config, *args, **kwargs):
        whole = copy.copy(config)
        whole.sequence_parallel = False
        made = WrappedTorchNorm(whole, *args, **kwargs)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made


def vision_layers():
    spec = copy.deepcopy(get_vit_layer_with_local_spec())
    spec.submodules.self_attention.submodules.core_attention = SegmentAttention
    return spec


def language_layers(experts=None):
    spec = copy.deepcopy(get_gpt_layer_local_spec(num_experts=experts))
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    return spec


class _OnCpu:
    """The torch module for code that says device="cuda"."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *args, device=None, **kwargs):
        return torch.zeros(*args, **kwargs)


def _vision_config_on_cpu(get_vision_model_config):
    def make(*args, **kwargs):
        config = get_vision_model_config(*args, **kwargs)
        config.use_cpu_initialization = True
        config.gradient_accumulation_fusion = False
        return config

    return make


@contextmanager
def on_cpu():
    """Let Bridge's Qwen3-VL model, its step and megatron-core's schedule run without a GPU."""
    local = {
        "get_vision_model_config": _vision_config_on_cpu(modelling.get_vision_model_config),
        "get_vit_layer_with_transformer_engine_spec": vision_layers,
        "TENorm": WrappedTorchNorm,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
    }
    with ExitStack() as stack:
        for name, value in local.items():
            stack.enter_context(mock.patch.object(modelling, name, value))
        stack.enter_context(mock.patch.object(transformer_block, "LayerNormImpl", Norm))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: "cpu"))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, **_: self))
        for name in ("range_push", "range_pop"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, lambda *_: None))
        stack.enter_context(mock.patch.object(schedules, "torch", _OnCpu()))
        yield


def build(seed: int = 0, *, tied: bool = False, graphs: bool = True, **changes):
    """Build Bridge's model, in training mode, as a recipe's provider would, with vision layers that need no kernels.

    `changes` are fields of the language model's configuration.
    """
    start_single_process()
    torch.manual_seed(seed)
    config = Qwen3VLTransformerConfig(
        num_layers=LAYERS,
        **FIELDS,
        share_embeddings_and_output_weights=tied,
        calculate_per_token_loss=False,
        **({"cuda_graph_impl": "full_iteration"} if graphs else {}),
        **changes,
    )
    config.seq_length = SEQUENCE
    config.vision_cuda_graph_impl = "none"
    layers = language_layers(config.num_moe_experts)
    model = modelling.Qwen3VLModel(
        config,
        layers,
        vision_config(layers=2, width=32, heads=2, out=HIDDEN),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, False) if config.mtp_num_layers else None,
    )
    model.model_type = ModelType.encoder_or_decoder  # as Bridge's provider sets it
    half = WIDTH // 2
    model.vision_model.rotary_pos_emb.register_buffer(
        "inv_freq", 1.0 / (10000.0 ** (torch.arange(0, half, 2, dtype=torch.float) / half)), persistent=False
    )
    return model.train()


def sample(images, seed: int, text: int = 12):
    """Return one sequence as a dataset gives it: images as (height, width) in patches, then text, of any length."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 60, (5,), generator=generator)]
    for height, width in images:
        tokens += [torch.tensor([START]), torch.full((height * width // 4,), IMAGE)]
    tokens = torch.cat([*tokens, torch.randint(0, 60, (text,), generator=generator)])[None]
    visual = None
    if images:
        grid = torch.tensor([[1, h, w] for h, w in images])
        pixels = torch.randn(int(grid.prod(1).sum()), PATCH, generator=generator)
        visual = _Visual(pixels, grid)
    mask = torch.ones(tokens.shape)
    mask[:, :5] = 0
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": mask, "visual_inputs": visual}


@dataclass
class _Visual:
    """What Bridge's collation makes of a sample's images."""

    pixel_values: Tensor
    image_grid_thw: Tensor

    def normalized_for_model(self):
        return {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}


def state(graphs: bool):
    """Return as much of Bridge's global state as the step reads."""
    fields = {"cuda_graph_impl": "full_iteration" if graphs else "none"}
    timer = mock.MagicMock()
    return SimpleNamespace(
        timers=timer,
        straggler_timer=mock.MagicMock(),
        cfg=SimpleNamespace(
            model=SimpleNamespace(seq_length=SEQUENCE, **fields),
            dataset=SimpleNamespace(skip_getting_attention_mask_from_dataset=True, enable_in_batch_packing=False),
            rerun_state_machine=SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False),
        ),
        _flops_seqlen_sum=0,
        _flops_seqlen_sq_sum=0,
        _flops_vision_patches=0,
        _flops_cross_seqlen_sum=0,
    )


class Trainer:
    """Trains a model with Bridge's step and megatron-core's schedule, plain or under the full-iteration wrapper.

    Args:
        model: The model; its parameters get a `main_grad`, which every step overwrites.
        graphs: Whether the configuration says full_iteration, and the schedule is in the wrapper as Bridge's train loop
            then has it, with the plugin's part of a step around it; without, the step pads no sequence.
        warmup_steps: Those before graphs are captured.
    """

    def __init__(self, model, graphs: bool, warmup_steps: int = 1) -> None:
        self.model, self.graphs = model, graphs
        model.config.cuda_graph_warmup_steps = warmup_steps
        self.parallel = DataParallel(model)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.schedule = schedules.forward_backward_no_pipelining
        if graphs:
            self.schedule = wrapper(self.schedule, warmup_steps)
        config = SimpleNamespace(model=model.config, dist=SimpleNamespace(distributed_timeout_minutes=10))
        self._state = SimpleNamespace(cfg=config, train_state=SimpleNamespace(step=0))
        # As Bridge's train loop calls it, which evaluates without it.
        self.train_step = next(p.make for p in train_loop.PATCHES if p.name == "train_step")(self._run)

    def step(self, samples, training: bool = True):
        """Run a step; returns what the schedule reports of every microbatch, and every `main_grad`."""
        for parameter in self.trained:
            parameter.main_grad.zero_()
        self.model.train(training)
        step = self.train_step if training and self.graphs else self._run
        with on_cpu(), torch.set_grad_enabled(training):
            reports = step([self.model], self._state, samples, training)
        self.model.train()
        return [r["lm loss"] for r in reports], [p.main_grad.clone() for p in self.trained]

    def _run(self, model, global_state, samples, training):
        return self.schedule(
            forward_step_func=partial(qwen3_vl_step.forward_step, state(self.graphs)),
            data_iterator=[iter(copy.deepcopy(samples))],
            model=model,
            num_microbatches=len(samples),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=not training,
            pg_collection=self.model.pg_collection,
        )


def wrapper(schedule, warmup_steps):
    """Return megatron-core's wrapper without the CUDA stream of its own loader of static buffers."""
    with mock.patch.object(torch.cuda, "Stream", mock.MagicMock()):
        return FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=warmup_steps)
