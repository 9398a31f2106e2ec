"""megatron-core's GPT model on a CPU with packed documents, and its graphs through the reference executor."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.text_model import Qwen3VLGPTModel
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import Qwen3VLTransformerConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gather
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

import bridge_cg_plugin
from bridge_cg_plugin.language.packed import workload
from bridge_cg_plugin.upstream.decoder.experts import statistics_of
from bridge_cg_plugin.upstream.hooks.helpers.constructors import checked_options, decoder_helpers
from examples.photographs.small_tower import start_single_process
from tests.models.language_model import DENSE, arguments_at, held

from ..executors import new_executor
from ..main_grads import hook_main_grads, reduced
from ..routers import take_statistics
from .towers import assert_close, loss_of, poison

bridge_cg_plugin.activate()

VOCABULARY = 64
ON_CPU = partial(mock.patch.object, torch.cuda, "current_device", lambda: "cpu")
DEFAULTS = {"cuda_graph_max_packed_seqs": 6, "cuda_graph_packed_buckets": [320, 512], "cuda_graph_packed_strict": True}

WARMUP = (100, 150, 50)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_dtype": "fp64",  # other products of a router are Transformer Engine's, on a GPU
    "moe_router_load_balancing_type": "none",
}


def heads_of_rank(tensor, group):
    """Return all tokens of a group's ranks, rank by rank, and this rank's part of the heads."""
    tokens, heads, width = tensor.shape
    parts = tensor.view(tokens, group.size(), heads // group.size(), width).transpose(0, 1)
    return all_to_all(group, parts.contiguous()).flatten(0, 1)


def tokens_of_rank(tensor, group):
    """Return this rank's tokens and all heads, `[tokens, heads x width]`, of what `heads_of_rank` gave each rank."""
    parts = all_to_all(group, tensor.contiguous())
    by_rank = parts.view(group.size(), -1, parts.shape[-1])  # heads of one rank, then of the next
    return by_rank.transpose(0, 1).flatten(1)


class CausalSegments(torch.nn.Module):
    """Causal attention inside the documents of a pack, as attention kernels do it: by dense masks from `cu_seqlens`.

    Documents lie where the padded offsets say; tokens outside every document give zero. Context-parallel ranks gather
    the whole pack, or give tokens for heads; a token behind the last offset is an error there, as it is for Transformer
    Engine's kernels.
    """

    def __init__(self, config, pg_collection=None, cp_comm_type=None, **unused):
        super().__init__()
        self.config = config
        self._group = pg_collection.cp if pg_collection is not None and pg_collection.cp.size() > 1 else None
        levels = {"a2a": [self._group, None], "a2a+p2p": getattr(pg_collection, "hcp", None)}
        self._heads, self._tokens = levels.get(cp_comm_type if self._group else None) or (None, self._group)

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params=None, **unused):
        if self._group is None:
            return self._attend(query, key, value, packed_seq_params)
        params, size, rank = packed_seq_params, self._group.size(), self._group.rank()
        padded = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        lengths = padded.diff().tolist()
        places = torch.tensor([p for each in range(size) for p in held(lengths, size, each)])
        order = torch.empty_like(places)
        order[places] = torch.arange(len(places))
        if self._heads is None:
            whole = (gather(t, group=self._group)[order] for t in (query, key, value))
            return self._attend(*whole, params)[held(lengths, size, rank)]
        taken = (heads_of_rank(t, self._heads) for t in (query, key, value))
        whole = (t if self._tokens is None else gather(t, group=self._tokens) for t in taken)
        attended = self._attend(*(t[order] for t in whole), params)[places]
        if self._tokens is not None:
            attended = attended.chunk(self._tokens.size())[self._tokens.rank()]
        return tokens_of_rank(attended, self._heads)

    def _attend(self, query, key, value, packed_seq_params):
        alone = packed_seq_params is None
        if alone:
            ends = torch.tensor([0, query.shape[0]], dtype=torch.int32)
            packed_seq_params = PackedSeqParams(cu_seqlens_q=ends, cu_seqlens_kv=ends)
            query, key, value = (t[:, 0] for t in (query, key, value))
        params, tokens = packed_seq_params, query.shape[0]
        padded = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        token = torch.arange(tokens)
        document = torch.searchsorted(padded[1:].contiguous(), token.int(), right=True)
        place = token - padded.long()[document]
        lengths = torch.cat((params.cu_seqlens_q.diff(), torch.zeros(1, dtype=torch.int32)))
        inside = place < lengths[document]
        mask = (document[:, None] == document[None]) & (token[:, None] >= token[None]) & inside[:, None] & inside[None]
        mask = mask | torch.eye(tokens, dtype=torch.bool)
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        heads = (t.transpose(0, 1)[None] for t in (query, key, value))
        out = functional.scaled_dot_product_attention(*heads, attn_mask=mask)[0].transpose(0, 1)
        out = torch.where(inside[:, None], out.reshape(tokens, -1), 0)
        return out[:, None] if alone else out


class OnCpu(GPTModel):
    """A GPT model whose rotary embedding asks for the current GPU and gets the CPU."""

    def forward(self, *args, **kwargs):
        with ON_CPU():
            return super().forward(*args, **kwargs)


class QwenOnCpu(Qwen3VLGPTModel):
    """Qwen3-VL's language model, in the same way."""

    def forward(self, *args, **kwargs):
        with ON_CPU():
            return super().forward(*args, **kwargs)


def settings_of(layers=2):
    """Return the configuration of a small model."""
    return {
        "num_layers": layers,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        **DENSE,
        "qk_layernorm": True,
        "cuda_graph_impl": "transformer_engine",
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
    }


def new_model(seed=0, layers=2, **config):
    """Build a GPT model of a few layers with random weights, in training mode."""
    start_single_process()
    torch.manual_seed(seed)
    made = TransformerConfig(**{**settings_of(layers), **config})
    spec = get_gpt_layer_local_spec(num_experts=made.num_moe_experts, qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = CausalSegments
    return built(OnCpu, made, TransformerBlockSubmodules([spec] * made.num_layers, WrappedTorchNorm))


def new_qwen(seed=0, layers=3, **config):
    """Build Qwen3-VL's language model: multimodal rotary embedding, image features added behind the first layers."""
    start_single_process()
    torch.manual_seed(seed)
    made = Qwen3VLTransformerConfig(**{**settings_of(layers), **config}, mrope_section=[2, 1, 1])
    spec = get_gpt_layer_local_spec(num_experts=made.num_moe_experts, qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.module = Qwen3VLSelfAttention
    spec.submodules.self_attention.submodules.core_attention = CausalSegments
    return built(QwenOnCpu, made, TransformerBlockSubmodules([spec] * layers, WrappedTorchNorm))


def built(kind, config, layers):
    """Build `OnCpu` or `QwenOnCpu` of these layers, in training mode and `peaked`."""
    rotary, groups = "mrope" if kind is QwenOnCpu else "rope", ProcessGroupCollection.use_mpu_process_groups()
    with ON_CPU():
        return peaked(kind(config, layers, VOCABULARY, 1024, position_embedding_type=rotary, pg_collection=groups))


def peaked(model):
    """Return the model in training mode, with weights that make attention peaked as in a trained one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.train()


def with_images(arguments, every=5, features=2, seed=0):
    """Return the arguments of Qwen3-VL's language model: positions on three axes, features at every so manyth token."""
    tokens = arguments["input_ids"].shape[1]
    mask = torch.arange(tokens)[None] % every == 1
    generator = torch.Generator().manual_seed(seed)
    embeddings = [torch.randn(int(mask.sum()), 32, generator=generator).requires_grad_() for _ in range(features)]
    axes = torch.stack([arguments["position_ids"] + axis * (torch.arange(tokens) % 7) for axis in range(3)])
    visual = {"visual_pos_masks": mask, "deepstack_visual_embeds": embeddings} if features else {}
    return {**arguments, "position_ids": axes, **visual}


def pack(lengths, seed=0, room=None, repeats=0, max_seqlen=None):
    """Return the arguments of a model for documents of these lengths, each with `room[i]` tokens if given.

    Args:
        lengths: Tokens of every document.
        seed: Of the tokens.
        room: Tokens of every document with its padding.
        repeats: How often the last offset is repeated.
        max_seqlen: What the batch says of its longest document; None is the truth.
    """
    places = room or lengths
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (1, sum(places)), generator=generator)
    longest = max(places) if max_seqlen is None else max_seqlen
    offsets = {"cu_seqlens_q": ends(lengths, repeats), "cu_seqlens_kv": ends(lengths, repeats)}
    if room is not None:
        offsets |= {"cu_seqlens_q_padded": ends(room, repeats), "cu_seqlens_kv_padded": ends(room, repeats)}
    params = PackedSeqParams(qkv_format="thd", **offsets, max_seqlen_q=longest, max_seqlen_kv=longest)
    return {
        "input_ids": tokens,
        "position_ids": torch.cat([torch.arange(n) for n in places])[None],
        "attention_mask": None,
        "labels": tokens.roll(-1, 1),
        "packed_seq_params": params,
    }


def ends(lengths, repeats=0):
    """Return `cu_seqlens` of these lengths."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.cat((offsets, offsets[-1:].expand(repeats)))


def part_of(arguments, ranks, rank):
    """Return what of a pack one context-parallel rank is given."""
    params = arguments["packed_seq_params"]
    padded = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    return arguments_at(arguments, held(padded.diff().tolist(), ranks, rank))


def unpacked(tokens=16):
    """Return the arguments of a model for one sequence that is not packed."""
    ids = torch.arange(tokens)[None] % VOCABULARY
    return {"input_ids": ids, "position_ids": ids, "attention_mask": None, "labels": ids}


def losses_and_gradients(model, arguments):
    """Return per-token losses, and the gradients of all trainable parameters and of image features, from zero."""
    losses = model(**arguments)
    wanted = [p for p in model.parameters() if p.requires_grad]
    wanted += arguments.get("deepstack_visual_embeds", [])
    return losses.detach(), torch.autograd.grad(loss_of([losses]), wanted)


@contextmanager
def graphs_on(model, *warmup, capture=True, executor=None, num_microbatches=1, grows=False, **options):
    """Put packed-sequence graphs on a model for the duration, after eager passes over `warmup`; yields its graphs."""
    values = {**DEFAULTS, **options}
    before = {name: vars(model.config).get(name) for name in values}
    for name, value in values.items():
        setattr(model.config, name, value)
    wanted = checked_options(model.config)
    (helper,) = decoder_helpers(
        [model],
        model.config,
        num_microbatches=num_microbatches,
        options=replace(wanted, packed=replace(wanted.packed, grows=grows)),
        executor=executor or new_executor(),
    )
    graphs = helper.graphs
    try:
        for arguments in warmup:
            model(**arguments)
        if capture:
            helper.create_cudagraphs()
        yield graphs
    finally:
        graphs.detach()
        vars(model.config).update(before)


@contextmanager
def replaying(model, batches, warmup=None, before_capture=None, counts=None, **options):
    """Compare replays of batches, over memory that holds NaN, with what eager gave before; yields the graphs.

    So with routers' statistics; a capture counts nothing. Of the model's functions none is replaced afterwards.

    Args:
        model: The model.
        batches: Arguments of the model.
        warmup: Those of the pass before the capture; the first batch unless given.
        before_capture: Called with the model then.
        counts: Whether routers count or log anything; None does not ask.
        options: See `graphs_on`.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    take_statistics(routers)
    expected = [(losses_and_gradients(model, batch), take_statistics(routers)) for batch in batches]
    assert all(counts in (None, any(value.any() for value in statistics)) for _, statistics in expected)
    before = shadowed(model)
    with graphs_on(model, warmup or batches[0], capture=False, **options) as graphs:
        if before_capture is not None:
            before_capture(model)
        counted = [tensor.clone() for tensor in statistics_of(routers)]
        assert graphs.capture() and all(map(torch.equal, statistics_of(routers), counted))
        take_statistics(routers)
        for batch, (wanted, statistics) in zip(batches, expected, strict=True):
            poison(graphs, float("nan"))
            assert_same(losses_and_gradients(model, batch), wanted)
            torch.testing.assert_close(take_statistics(routers), statistics)
        assert replayed(graphs) == len(batches) * len(graphs._regions) and not graphs.statistics().fallbacks
        yield graphs
    assert shadowed(model) == before


def shadowed(model):
    """Return the names of each module's attributes that hide those of its class, as what stands in for a forward."""
    return [{name for name in vars(module) if hasattr(type(module), name)} for module in model.modules()]


@contextmanager
def small_packs():
    """Let buckets take packs of more than 64 tokens of a rank with padding, so that tests need no larger ones."""
    with mock.patch.object(workload, "EXACT_BELOW", 64):
        yield


def assert_same(found, expected):
    """Compare losses and gradients."""
    assert_close([found[0], *found[1]], [expected[0], *expected[1]])


def assert_adds_to_main_grads(model, batches, put_on_graphs):
    """Compare `main_grad` in the decoder, and `grad` elsewhere, after replays of batches with eager's gradients."""
    expected = [losses_and_gradients(model, batch)[1] for batch in batches]
    model.nodes = hook_main_grads(model.decoder.parameters())
    with reduced(), put_on_graphs() as graphs:
        for batch in batches:
            loss_of([model(**batch)]).backward()
        assert replayed(graphs) == len(batches)
    inside = set(model.decoder.parameters())
    for parameter, *parts in zip(model.parameters(), *expected, strict=True):
        assert_close([parameter.main_grad if parameter in inside else parameter.grad], [sum(parts)])


def eager(model, graphs, arguments):
    with graphs.paused():
        return losses_and_gradients(model, arguments)


def replayed(graphs):
    return graphs.statistics().replays
