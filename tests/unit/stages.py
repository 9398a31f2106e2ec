"""Bridge's Qwen3-VL as its provider builds it for a stage of a pipeline, on a CPU, with the schedule over it."""

import copy
import zlib
from functools import partial
from unittest import mock

import torch
from megatron.bridge.models import model_provider
from megatron.bridge.models.qwen_vl import qwen3_vl_provider, qwen3_vl_step
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn import functional

from examples.photographs.small_tower import vision_config

from .packs import CausalSegments
from .vlm import FIELDS, HEADS, HIDDEN, SEQUENCE, WIDTH, language_layers, on_cpu, sample, state

LAYERS = 8
IMAGES = ([(4, 4)], [(4, 8), (4, 4)], [(8, 8)], [(4, 4), (4, 4)])


def provider_of(stages: int, virtual: int | None = None, packs: bool = False):
    """Return the provider of a small model in fp32; stages exchange packs of any length, or rows of one."""
    made = qwen3_vl_provider.Qwen3VLModelProvider(
        num_layers=LAYERS,
        **FIELDS,
        num_query_groups=HEADS,
        make_vocab_size_divisible_by=1,
        seq_length=SEQUENCE,
        qk_layernorm=False,
        # One layer in each chunk of four interleaved stages must be enough for all features.
        vision_config=vision_config(layers=2, width=32, heads=2, out=HIDDEN, deepstack_visual_indexes=[1]),
        out_hidden_size=HIDDEN,
        share_embeddings_and_output_weights=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        batch_p2p_comm=False,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
    )
    made._enable_in_batch_packing = packs
    made.finalize()
    made._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return made


def build_stage(provider):
    """Return this rank's model chunks, with weights that depend on their place in the whole model alone."""
    layers = language_layers()
    if provider._enable_in_batch_packing:
        layers.submodules.self_attention.submodules.core_attention = CausalSegments
    spec = mock.patch.object(qwen3_vl_provider, "get_gpt_layer_with_transformer_engine_spec", lambda **_: layers)
    with on_cpu(), spec:
        chunks = model_provider._create_model(provider, ModelType.encoder_or_decoder, provider._pg_collection)
    for chunk in chunks:
        if chunk.vision_model is not None:
            quarter = torch.arange(0, WIDTH // 2, 2, dtype=torch.float) / (WIDTH // 2)
            chunk.vision_model.rotary_pos_emb.register_buffer("inv_freq", 1.0 / (10000.0**quarter), persistent=False)
        for name, parameter in placed(chunk):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            with torch.no_grad():
                drawn = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.copy_(drawn + ("norm" in name and name.endswith("weight")))
    return [chunk.train() for chunk in chunks]


def placed(chunk):
    """Yield a chunk's parameters by their names in the whole model."""
    numbers = {i: layer.layer_number - 1 for i, layer in enumerate(chunk.language_model.decoder.layers)}
    prefix = "language_model.decoder.layers."
    for name, parameter in chunk.named_parameters():
        if name.startswith(prefix):
            index, _, rest = name.removeprefix(prefix).partition(".")
            name = f"{prefix}{numbers[int(index)]}.{rest}"
        yield name, parameter


def pack_of(samples):
    """Return samples as rows of one batch, which Bridge's step packs."""
    most = max(each["tokens"].shape[1] for each in samples)
    batch = {
        name: torch.cat([functional.pad(each[name], (0, most - each[name].shape[1])) for each in samples])
        for name in ("tokens", "labels", "loss_mask")
    }
    visual = [each["visual_inputs"] for each in samples]
    pixels, grids = (torch.cat([getattr(each, name) for each in visual]) for name in ("pixel_values", "image_grid_thw"))
    return {**batch, "visual_inputs": type(visual[0])(pixels, grids)}


def train_step(chunks, microbatches: int, seed: int = 0):
    """Run a step of Bridge's forward step under megatron-core's schedule; return its losses and all gradients."""
    samples = [sample(IMAGES[i % len(IMAGES)], seed + i) for i in range(microbatches)]
    bridges = state(False)
    if packs := chunks[0].config._enable_in_batch_packing:
        bridges.cfg.dataset.enable_in_batch_packing = True
        samples = [pack_of([each, sample(IMAGES[0], seed - i)]) for i, each in enumerate(samples)]
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.grad = None
    schedule, groups = schedules.get_forward_backward_func(), {"pg_collection": chunks[0].pg_collection}
    with on_cpu(), mock.patch.object(torch.cuda, "synchronize", lambda: None):
        reports = schedule(
            forward_step_func=partial(qwen3_vl_step.forward_step, bridges),
            data_iterator=[iter(copy.deepcopy(samples)) for _ in chunks],
            model=chunks,
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=1 + packs,
            forward_only=False,
            **({} if parallel_state.get_pipeline_model_parallel_world_size() > 1 else groups),
        )
    gradients = {name: p.grad for chunk in chunks for name, p in placed(chunk) if p.grad is not None}
    return [[float(v) for v in report["lm loss"]] for report in reports], gradients
