"""megatron-core's transformer block and hybrid stack over packs or padded rows: calls, pieces, rotation per token."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...announce import warn
from ...graphs.errors import CaptureError
from ...graphs.fallback import Fallback
from ...graphs.parts import RunsLater
from ...graphs.replays.replay import want_gradients
from ...language.experts.device import Tables
from ...language.experts.exchange import ExpertExchange
from ...language.packed.batch import OFFSETS, PADDED_OFFSETS, PackedBatch, pack_batch, row_batch, row_lengths, spread
from ...language.packed.program import DecoderPart, RecordedPack
from ...options import OptionError
from ...options.facts import MOST_EXPERT_RANKS
from ...options.language_model import IMPL, MODULES
from ...options.packed import MAX_PACKED_SEQS
from ...switches import EXPERT_BOUNDS, switched_on
from ...upstream_types import UpstreamModule
from ..kernels.layers import core_kernels, fused_head_norms
from ..kernels.recompute import computing_inside, refuse_draws, running_later
from ..kernels.rotary import fused_rotary
from ..kernels.transformer_engine import accumulating, fused_accumulation, known_activations, warn_of_gradients
from ..parallel.process_groups import expert_group, expert_shards, shared_group
from ..seams.contract import PACKED_ROTARY
from ..seams.own_code import foreign, foreign_function, refuse_own_code
from ..seams.registry import seam
from ..seams.registry.bridge import ATTENTION as QWEN_ATTENTION
from ..wrappers import MAX_SEQLENS, overridden
from .experts import CapturedExperts, needs_noted, statistics_kept, statistics_of
from .fp8 import (
    ROWS,
    DelayedScales,
    QuantizedWeights,
    complete_weights,
    computes_in_fp8,
    delayed_state,
    fp8_recorded,
    in_fp8,
    is_delayed,
    is_on_around,
)
from .layers import (
    BIASES_EACH,
    PackChunks,
    attention_part,
    check_exchange,
    current_parameters,
    delta_net_refusal,
    is_delta_net,
    is_gemma3,
    is_mamba,
    is_mixer,
    mamba_part,
    mlp_part,
    packed_params,
    refuse_statistics,
    two_tables,
    with_one_table,
)

# Which in a dense model are the whole layer.
DENSE_PARTS = ("attn", "mlp")
ROTARY, POSITIONS = seam("packed_rotary"), seam("packed_rotary_positions")
VISUAL = ("visual_pos_masks", "deepstack_visual_embeds")
BIASES = "attention_bias"
READ = ("hidden_states", "rotary_pos_emb", "packed_seq_params", BIASES, *VISUAL)
DEEPSTACK = seam("packed_deepstack").target.rpartition(".")[2]
# A packed call carries none or a stand-in; attention goes by the offsets.
WITHOUT_EFFECT = ("attention_mask",)
# Fields of PackedSeqParams that change how a pack is computed and that no graph was captured with.
UNKNOWN = ("local_cp_size", "cp_group", "tokens_per_sample", "pad_between_seqs")


class TransformerBlockFamily:
    """What a decoder's graphs must know of its upstream code.

    Args:
        decoder: A `TransformerBlock`, or a `HybridStack`.
        packs: Whether microbatches are packs; padded rows otherwise.

    Attributes:
        per_position: Whether rotary angles of packs come with a row per position.
        shards: Tensor-parallel ranks that hold a part of the tokens each.
        ranks: Context-parallel ranks that hold two chunks of every document each.
        rank: Which of them this is.
        rows: What a rank's tokens in a bucket are a multiple of.
        biases: How many of attention a call has.
        exchange: Ranks of expert parallelism whose exchanges are in what is recorded; None without any.

    Raises:
        OptionError: A layer is of a kind that was not looked at, or context-parallel ranks exchange keys and values in
            a way that needs the host.
    """

    def __init__(self, decoder: UpstreamModule, packs: bool = True) -> None:
        self._decoder, self._packs = decoder, packs
        self._forward = decoder.forward
        config = decoder.config
        check_exchange(config)
        if packs:
            warn_of_gradients(config.kv_channels)
        self.shards: int = config.tensor_model_parallel_size if config.sequence_parallel else 1
        context = decoder.pg_collection.cp
        self.ranks, self.rank = context.size(), context.rank()
        self.rows = ROWS if computes_in_fp8(config) else 1
        self._quantized: list[QuantizedWeights] = []
        self._told = False
        self._inside: list[UpstreamModule] = []  # layers with experts inside the graph
        self._tables = Tables()
        self.exchange: ExpertExchange | None = None
        self._mamba = [layer for layer in decoder.layers if is_mamba(layer)]
        self._transformer = [layer for layer in decoder.layers if not is_mamba(layer)]
        for layer in decoder.layers:
            _check_layer(layer, packs)
        self.per_position = not any(_is_qwen(layer) for layer in self._transformer)
        self.biases = BIASES_EACH if any(map(is_gemma3, self._transformer)) else 0
        self._delta_nets = any(is_delta_net(layer.self_attention) for layer in self._transformer)
        self._chunks = PackChunks()

    def standing_in(self, part: DecoderPart) -> AbstractContextManager[None]:
        """Be around eager passes over stand-ins for a part's parameters, wherever its modules hold parameters."""
        return current_parameters(part.roots())

    def by_place(self, rows: int, tokens: int, max_seqlens: Mapping[str, int]) -> bool:
        """Return whether a table of angles is taken by the place in a pack.

        Upstream's function decides so; its fused kernel never takes it so.

        Args:
            rows: Of the table.
            tokens: Of the pack.
            max_seqlens: Tokens of the longest document by name, as given in the batch.
        """
        if self._decoder.config.apply_rope_fusion or not self.per_position:
            return False
        told = takes_longest() and len(max_seqlens) == len(MAX_SEQLENS)
        return rows > max(max_seqlens.values()) if told else rows == tokens

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], host: Callable[[Tensor], Sequence[int]], adds: bool
    ) -> PackedBatch | Fallback:
        """Return a call's microbatch, or why a graph cannot serve it.

        Args:
            args, kwargs: Of the call.
            host: Returns a small tensor's elements.
            adds: Whether what is recorded adds something behind the first layers.

        Raises:
            PackedBatchError: The offsets of the pack do not fit each other or its tokens.
        """
        if is_on_around():
            return Fallback.AUTOCAST_CHANGED
        if any(weights.replaced for weights in self._quantized):
            self._say_replaced()
            return Fallback.MODEL_CHANGED
        params: Any = kwargs.get("packed_seq_params")
        if (params is not None and params.qkv_format == "thd") is not self._packs:
            return Fallback.UNPACKED_BATCH if self._packs else Fallback.CALL_ARGUMENTS
        hidden = kwargs.get("hidden_states") if self._decoder.pre_process else self._decoder.input_tensor
        if args or not isinstance(hidden, Tensor):
            return Fallback.CALL_ARGUMENTS
        if self.biases:
            kwargs = with_one_table(kwargs, hidden.shape[1])
        if not self._is_usual(hidden, kwargs):
            return Fallback.CALL_ARGUMENTS
        # Those of tokens that other ranks hold are among them.
        tokens = hidden.shape[0] * self.shards * self.ranks
        if self._packs and self._mamba and (params.seq_idx is None or params.seq_idx.shape[-1] != tokens):
            return Fallback.NO_SEQ_IDX
        angles, visual = kwargs.get("rotary_pos_emb"), self._visual(kwargs)
        if want_gradients((angles,)):
            return Fallback.INPUT_GRADIENTS
        if self._packs:
            batch = self._pack(hidden, angles, params, host)
        else:
            batch = row_batch(hidden, angles, self._room(hidden.shape[0]), kwargs.get(BIASES) or ())
        if angles is not None and batch.by_place and angles.shape[0] < sum(batch.lengths):
            return Fallback.CALL_ARGUMENTS  # upstream repeats the last angles
        # Upstream's gated delta nets refuse others in words of their own.
        if self._packs and self._delta_nets and not batch.filled:
            return Fallback.CALL_ARGUMENTS
        if visual is None or not adds:
            return batch
        mask, embeddings = visual
        return replace(batch, additions=tuple(spread(mask, rows) for rows in embeddings))

    def _is_usual(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call's arguments are of the kind that recordings are made with."""
        known = (*READ, *WITHOUT_EFFECT) if self._packs else READ
        others = [v for name, v in kwargs.items() if name not in known]
        params = kwargs.get("packed_seq_params")
        if any(v is not None and v != set() for v in others) or any(getattr(params, n, None) for n in UNKNOWN):
            return False
        if hidden.dim() != 3 or (self._packs and hidden.shape[1] != 1):
            return False
        if not self._rotates(kwargs.get("rotary_pos_emb"), hidden):
            return False
        if not self._has_biases(kwargs.get(BIASES), hidden):
            return False
        visual = self._visual(kwargs)
        if visual is not None and self._packs and self.shards > 1:  # not compared with eager
            return False
        return visual is None or visual[0].shape == (hidden.shape[1], hidden.shape[0])

    def _has_biases(self, biases: Any, hidden: Tensor) -> bool:
        """Whether a call has the biases of attention that recordings have buffers for."""
        if biases is None or not self.biases:
            return biases is None and not self.biases
        length = hidden.shape[0] * self.shards
        return len(biases) == self.biases and all(b.shape == (hidden.shape[1], 1, length, length) for b in biases)

    def _pack(
        self, hidden: Tensor, angles: Tensor | None, params: Any, host: Callable[[Tensor], Sequence[int]]
    ) -> PackedBatch:
        longest = {n: getattr(params, n) for n in MAX_SEQLENS if getattr(params, n) is not None}
        batch = pack_batch(hidden, angles, _offsets(params), longest, host, self.shards, self.ranks)
        if angles is None:
            return batch
        return replace(batch, by_place=self.by_place(angles.shape[0], sum(batch.lengths), longest))

    def _room(self, tokens: int) -> int:
        """Return how many tokens padded rows have in a recording, from those of them that a rank holds.

        Models that put embeddings of images into the text make rows of any length from text that was padded to one.
        """
        longest = getattr(self._decoder.config, "seq_length", None)
        if longest is None or self.shards * self.ranks > 1 or self.biases:
            return tokens * self.shards
        return next((length for length in row_lengths(longest) if length >= tokens), tokens)

    def _say_replaced(self) -> None:
        """Say once for a capture why microbatches run eager."""
        if not self._told:
            self._told = True
            warn(
                "packed_decoder: quantized weights, parameters in fp8 or their scales were replaced or moved since "
                "capture; microbatches run eager until they are back or graphs are captured again"
            )

    def _rotates(self, angles: Any, hidden: Tensor) -> bool:
        """Whether angles are of the kind that recordings have buffers for; a hybrid may have none."""
        if not isinstance(angles, Tensor):
            return angles is None
        by_token = not (self._packs and self.per_position)
        rows_fit = not by_token or angles.shape[0] == hidden.shape[0] * self.shards
        fits = angles.dim() == 4 and angles.shape[1:3] == (hidden.shape[1], 1) and rows_fit
        return angles.dtype == torch.float32 and fits

    def _visual(self, kwargs: Mapping[str, Any]) -> tuple[Tensor, Sequence[Tensor]] | None:
        mask, embeddings = (kwargs.get(name) for name in VISUAL)
        if not self._decoder.pre_process or mask is None or embeddings is None or not len(embeddings):
            return None
        return mask, embeddings

    def parts(self, modules: Sequence[str]) -> list[DecoderPart]:
        """Return the pieces to record; no modules are all layers as one piece.

        Raises:
            OptionError: All layers were asked for and one of them has experts of a kind that cannot be recorded.
        """
        self._quantized, self._told = [], False
        experts = [layer for layer in self._transformer if layer.is_moe_layer]
        every = {*DENSE_PARTS, "mamba"} if self._mamba else {*DENSE_PARTS}
        if not modules or (set(modules) == every and not experts):
            self.exchange = self.exchange or (self._new_exchange() if experts else None)
            for layer in experts:
                CapturedExperts(layer, self._tables, self.exchange)  # refuses what cannot be recorded
            self._inside = experts
            name = "packed_decoder" if self._packs else "decoder"
            part = DecoderPart(name, self._decoder, (), self._run_block, counted=bool(experts))
            return [self._quantizing(part)]
        return self.layer_parts(modules)

    def _new_exchange(self) -> ExpertExchange | None:
        """Return what experts of several ranks exchange tokens by; above `MOST_EXPERT_RANKS` with bounds, if wanted."""
        group = expert_group(self._decoder)
        if group is None:
            return None
        bounded = group.size() > MOST_EXPERT_RANKS and bool(switched_on(EXPERT_BOUNDS, False))
        shards = expert_shards(self._decoder)
        return ExpertExchange(group, shared_group(self._decoder, group), bounded, shards)

    def needs_noted(self) -> AbstractContextManager[None]:
        """Be around eager passes; notes how much room experts need."""
        exchange = self.exchange
        if exchange is None or exchange.needs is None:
            return nullcontext()
        return needs_noted(self._routers(), exchange.holders, exchange.needs)

    @property
    def runs_later(self) -> RunsLater | None:
        """What lets layers run again inside a context; None where upstream runs them once."""
        return running_later if self._decoder.config.recompute_granularity == "full" else None

    def weights_per_token(self) -> float:
        """Return how many weights of this rank a token is multiplied with; of experts, those that it is sent to."""
        experts = [layer.mlp for layer in self._transformer if layer.is_moe_layer]
        idle = [_weights(mlp.experts) * (1 - mlp.config.moe_router_topk / mlp.num_local_experts) for mlp in experts]
        return float(_weights(self._decoder) - sum(idle))

    def statistics_kept(self) -> AbstractContextManager[None]:
        """Be around captures, whose passes leave no trace in what layers count and log."""
        complete_weights((self._decoder,))
        return statistics_kept(self._routers(), delayed_state((self._decoder,)))

    def statistics(self) -> list[Tensor]:
        """Return what passes count and log, of which one that is given up must leave no trace."""
        return statistics_of(self._routers())

    def _routers(self) -> list[UpstreamModule]:
        return [layer.mlp.router for layer in self._transformer if layer.is_moe_layer]

    def scales(self) -> DelayedScales | None:
        """Return what is told of replays; None where no scales outlive a microbatch."""
        return DelayedScales() if is_delayed(self._decoder.config) else None

    def layer_parts(self, modules: Sequence[str]) -> list[DecoderPart]:
        """Return these parts of every layer, each a piece of its own; attention and the router behind it are one.

        Raises:
            OptionError: No layer has such a part, or a router is of a kind that was not looked at.
        """
        each = [(layer, part) for layer in self._decoder.layers for part in self._parts_of(layer, modules)]
        parts = [self._quantizing(replace(part, run=in_fp8(part, layer))) for layer, part in each]
        if not parts:
            raise OptionError(
                MODULES,
                ",".join(modules),
                "parts that this model's layers have",
                "Name attn, mlp on a dense model, or mamba on one with Mamba layers.",
            )
        return parts

    def _quantizing(self, part: DecoderPart) -> DecoderPart:
        """Return a part that quantizes its weights as eager does, where layers compute in fp8."""
        if not computes_in_fp8(self._decoder.config):
            return part
        weights = QuantizedWeights(part.roots, self._decoder.config)
        self._quantized.append(weights)

        def run(pack: RecordedPack) -> tuple[Tensor, ...]:
            assert pack.unchanged is not None  # the part says whether they changed
            with weights.recorded(pack.unchanged):
                return part.run(pack)

        return replace(part, run=run, changed=weights.changed)

    def _parts_of(self, layer: UpstreamModule, modules: Sequence[str]) -> Iterator[DecoderPart]:
        if is_mamba(layer):
            if "mamba" in modules:
                yield mamba_part(layer, self.shards * self.ranks)
            return
        attends = "attn" in modules and not _is_identity(layer.self_attention)
        routes = layer.is_moe_layer and "moe_router" in modules
        if attends or routes:
            yield attention_part(layer, attends, routes)
        if "mlp" in modules and not layer.is_moe_layer and not _is_identity(layer.mlp):
            yield mlp_part(layer)

    def _run_block(self, pack: RecordedPack) -> tuple[Tensor]:
        more: dict[str, Any] = dict(zip(VISUAL, (None, pack.additions), strict=True)) if pack.additions else {}
        angles = pack.angles
        if pack.biases:
            assert angles is not None  # which the layers assert, too
            more[BIASES], angles = tuple(pack.biases), two_tables(angles)
        indexed = pack.hidden.shape[0] * self.shards * self.ranks if self._mamba else 0
        params = packed_params(pack, indexed) if pack.offsets else None
        with computing_inside(partial(self._computing, pack)):
            output = self._forward(
                hidden_states=pack.hidden,
                attention_mask=None,
                rotary_pos_emb=angles,
                packed_seq_params=params,
                **more,
            )
        if pack.overflow is not None and self.exchange is not None:
            self.exchange.agree(pack.overflow)
        return (output,)

    @contextmanager
    def _computing(self, pack: RecordedPack) -> Iterator[None]:
        """Let layers compute a recorded pack."""
        with ExitStack() as stack:
            for layer in self._inside:  # looked up each time: the model may have changed since the last recording
                experts = CapturedExperts(layer, self._tables, self.exchange)
                assert pack.used is not None  # the part is counted
                stack.enter_context(experts.recorded(pack.used, pack.overflow))
            if pack.additions:
                refuse_own_code([foreign(self._decoder, DEEPSTACK)])
                stack.enter_context(overridden(self._decoder, DEEPSTACK, _add))
            if not self._decoder.pre_process:
                stack.enter_context(overridden(self._decoder, "input_tensor", pack.hidden))
            yield

    fused_accumulation = staticmethod(fused_accumulation)
    known_activations = staticmethod(known_activations)
    refuse_draws = staticmethod(refuse_draws)

    @contextmanager
    def kernels(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Be around recorded work, which rotates by angles per token and accumulates as a later microbatch does.

        Raises:
            CaptureError: Somebody reads statistics that a replay does not leave, dropout draws from random states that
                a graph cannot use, fp8 was switched on after capture, or other code rotates queries and keys.
        """
        if computes_in_fp8(self._decoder.config) and not self._quantized:
            raise CaptureError("fp8 was switched on after capture")
        refuse_statistics(modules)
        if self._packs and self.per_position:  # Qwen3-VL's attention rotates by a function of its own
            fused = self._decoder.config.apply_rope_fusion  # megatron-core calls its own kernel
            homes = (ROTARY.module,) if fused else PACKED_ROTARY
            refuse_own_code(foreign_function(home, PACKED_ROTARY) for home in homes)
        with core_kernels(modules, fused_rotary, fused_head_norms), ExitStack() as stack:
            stack.enter_context(accumulating(modules))
            stack.enter_context(fp8_recorded(modules, self._decoder.config))
            stack.enter_context(current_parameters(modules))
            if self.per_position:
                core = importlib.import_module(ROTARY.module)
                stack.enter_context(overridden(core, ROTARY.target, _per_token(getattr(core, ROTARY.target))))
            if self._packs and self._delta_nets:
                stack.enter_context(self._chunks.recorded(modules))
            yield


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _add(hidden: Tensor, mask: None, addition: Tensor) -> Tensor:
    """Add deepstack features that are zero wherever there are none."""
    return hidden + addition


def _offsets(params: Any) -> dict[str, Tensor | None]:
    """Return a pack's offsets; padded ones that are the others themselves, as attention sees them, are left out."""
    found = {name: getattr(params, name) for name in (*OFFSETS, *PADDED_OFFSETS)}
    if all(found[padded] is found[name] for name, padded in zip(OFFSETS, PADDED_OFFSETS, strict=True)):
        found.update(dict.fromkeys(PADDED_OFFSETS))
    return found


@functools.cache
def takes_longest() -> bool:
    """Whether upstream's rotation of packs is told how long documents are; if not, it reads where the last one ends.

    Such releases, after 0.19, also leave the fused kernel where it lacks an option.
    """
    rotate = getattr(importlib.import_module(POSITIONS.module), POSITIONS.target)
    return "max_seqlen" in inspect.signature(rotate).parameters


def _per_token(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Rotate packed tokens by angles of their own: an unpacked sequence of as many tokens, through upstream's code."""

    @functools.wraps(original)
    def apply_rotary_pos_emb(
        t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0, **kwargs: Any
    ) -> Tensor:
        if cu_seqlens is None:
            return original(t, freqs, config, cu_seqlens, mscale, **kwargs)
        if config.apply_rope_fusion and not takes_longest():  # the packed kernel supports neither
            mscale = 1.0
            kwargs.pop("mla_rotary_interleaved", None)
        return original(t[:, None], freqs, config, None, mscale, **kwargs)[:, 0]

    return apply_rotary_pos_emb


def _is_qwen(layer: UpstreamModule) -> bool:
    return isinstance(layer.self_attention, getattr(sys.modules.get(QWEN_ATTENTION), "Qwen3VLSelfAttention", ()))


def _is_identity(module: nn.Module) -> bool:
    """Whether a layer lacks this part: a hybrid's layers have attention or an MLP, not both."""
    from megatron.core.transformer.identity_op import IdentityOp

    return isinstance(module, IdentityOp)


def _check_layer(layer: nn.Module, packs: bool) -> None:
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.transformer_layer import TransformerLayer

    attention: UpstreamModule = getattr(layer, "mixer" if is_mamba(layer) else "self_attention", layer)
    if is_mixer(attention):
        return
    core = isinstance(layer, TransformerLayer)
    known = core and (_is_qwen(layer) or type(attention) is SelfAttention or (is_gemma3(layer) and not packs))
    if known or _is_identity(attention):
        return
    delta_net = core and is_delta_net(attention)
    refusal = delta_net_refusal(attention.config, packs) if delta_net else None
    if delta_net and refusal is None:
        return
    if packs:
        named = "megatron-core's SelfAttention or GatedDeltaNet, Qwen3-VL's or a MambaMixer"
        why = refusal or f"its layers must have {named}, and one has {type(attention).__name__}"
        raise OptionError.because(
            MAX_PACKED_SEQS, f"Cannot use {MAX_PACKED_SEQS} on this model: {why}. Remove the option."
        )
    why = refusal or f"no graphs of such layers were tried: {type(attention).__name__}"
    raise OptionError.because(IMPL, f"Cannot use {IMPL}=full_iteration on this model: {why}. Set {IMPL}=none.")
