"""Parts of megatron-core's transformer layers over packed documents: attention, MLP, and the router of experts."""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...announce import warn
from ...graphs.errors import CaptureError
from ...graphs.instance import every_module, modules_where
from ...graphs.program import FIRST_OUTPUT, PartCall
from ...language.packed.batch import (
    OFFSETS,
    PADDED_OFFSETS,
    chunk_indices,
    chunk_offsets,
    document_indices,
    with_padding,
)
from ...language.packed.program import DecoderPart, RecordedPack
from ...options import OptionError
from ...options.facts import ROUTERS
from ...options.language_model import MODULES
from ...options.packed import MAX_PACKED_SEQS
from ...upstream_types import UpstreamModule
from ..seams.registry import seam
from ..seams.registry.bridge import GEMMA3
from ..wrappers import overridden, pack_params

NORM = "_forward_pre_mlp_layernorm"
# A layer's submodules that a piece uses.
ATTENTION = ("input_layernorm", "self_attention")
ROUTER = ("pre_mlp_layernorm", "mlp.router")
# A router with one of these, or with other values than those of `options.facts.ROUTERS`, adds to statistics or losses
# that outlive the step, draws random numbers, or counts tokens: only its matrix product is recorded, the rest runs on
# real tokens, eager.
ROUTER_EFFECTS = (
    *("moe_z_loss_coeff", "moe_router_enable_expert_bias", "moe_expert_capacity_factor"),
    "moe_n_hash_layers",  # goes by the tokens' numbers
)
STATEFUL_BALANCING = ("sinkhorn", "quantile_balancing")


def packed_params(pack: RecordedPack, indexed: int = 0) -> Any:
    """Return megatron-core's metadata of a pack.

    Args:
        pack: The pack.
        indexed: Its tokens where Mamba layers want every token's document, which upstream finds by reading the
            device; 0 is none.
    """
    offsets = pack.offsets
    indices = document_indices(offsets.get(PADDED_OFFSETS[0], offsets[OFFSETS[0]]), indexed) if indexed else None
    made = pack_params(offsets, pack.longest, seq_idx=indices)
    # Transformer Engine before 2.18 reads offsets to find padding; megatron-core before 0.19 cannot tell it.
    if PADDED_OFFSETS[0] in offsets and hasattr(made, "pad_between_seqs"):
        made.pad_between_seqs = True
    return made


def mlp_part(layer: UpstreamModule) -> DecoderPart:
    """Return a dense layer's MLP with its norm and residual as a piece."""
    forward, name = layer._forward_mlp, f"packed_mlp_{layer.layer_number}"
    call = layer, "_forward_mlp", FIRST_OUTPUT
    return DecoderPart(name, layer, ("pre_mlp_layernorm", "mlp"), lambda pack: (forward(pack.hidden),), (call,))


def attention_part(layer: UpstreamModule, attends: bool, routes: bool) -> DecoderPart:
    """Return a layer's attention with its norm and residual, the norm and router of experts, or both as one piece.

    Raises:
        OptionError: The router is of a kind that was not looked at, or changes its input at random.
    """
    forward, calls = layer._forward_attention, list[PartCall]()
    if attends:
        calls.append((layer, "_forward_attention", lambda outputs: (outputs[0], None)))
    if routes:
        norm, (route, follower) = getattr(layer, NORM), _routing(layer, len(calls))
        calls += [(layer, NORM, itemgetter(len(calls))), follower]

    def run(pack: RecordedPack) -> tuple[Tensor, ...]:
        hidden = pack.hidden
        if attends:
            params = packed_params(pack) if pack.offsets else None
            given = {"rotary_pos_emb": pack.angles, "packed_seq_params": params}
            hidden = forward(hidden_states=hidden, attention_mask=None, **given)[0]
        return (*([hidden] if attends else []), *(route(norm(hidden)) if routes else ()))

    name = "_and_".join(["attention"] * attends + ["router"] * routes)
    uses = ATTENTION * attends + ROUTER * routes
    return DecoderPart(f"packed_{name}_{layer.layer_number}", layer, uses, run, tuple(calls), routes=routes)


def _routing(layer: UpstreamModule, place: int) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], PartCall]:
    """Return what of a router is recorded, and the call that it answers.

    Args:
        layer: A layer with experts.
        place: Where the normed hidden states are among the piece's outputs.
    """
    router = layer.mlp.router
    check_router(router)
    pure = is_pure(router)
    compute = router.forward if pure else router.gating

    def route(normed: Tensor) -> tuple[Tensor, ...]:
        if layer.mlp.router is not router or is_pure(router) != pure:
            raise CaptureError("the router was replaced after capture, or its options now give it side effects")
        computed = compute(normed)
        return (normed, *computed) if pure else (normed, computed)

    if pure:
        return route, (router, "forward", lambda outputs: (outputs[place + 1], outputs[place + 2]))
    return route, (router, "gating", lambda outputs: outputs[place + 1])


def is_pure(router: UpstreamModule) -> bool:
    """Whether routing is a function of a token alone, without a trace."""
    config = router.config
    return not (
        router.is_aux_loss_enabled()
        or router.routing_type in STATEFUL_BALANCING
        or any(getattr(config, name, None) for name in ROUTER_EFFECTS)
        or next(unmet(config, ROUTERS), None)
    )


def unmet(config: Any, needed: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield fields of a model's configuration that are not what they must be where a release has them.

    Args:
        config: The model's.
        needed: Field -> what it must be.

    Yields:
        The field, its value, and what it must be.
    """
    for field, value in needed.items():
        found = getattr(config, field, value)
        if found != value and not (value is False and found is None):
            yield field, found, value


def check_router(router: UpstreamModule) -> None:
    """Refuse a router that cannot be recorded.

    Raises:
        OptionError: It is of a kind that was not looked at, or changes its input at random.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    if type(router) is not TopKRouter:
        why = f"routers must be megatron-core's TopKRouter, and one is {type(router).__name__}"
        raise OptionError.because(MODULES, f"Cannot use {MODULES} with moe_router on this model: {why}. Remove it.")
    if router.config.moe_input_jitter_eps:
        raise OptionError(
            "model.moe_input_jitter_eps",
            router.config.moe_input_jitter_eps,
            f"None with routers on graphs in {MODULES}",
            f"The router's input would be changed at random after it was recorded. Set {MODULES}=attn.",
        )


# Fields of a transformer config that ask for them. Releases without a field do not have the statistics.
FIELDS = ("qk_clip", "log_max_attention_logit")
# Megatron-core's attention modules have this child, which has the statistics.
ATTENDS = "core_attention"


def refuse_statistics(modules: Sequence[nn.Module]) -> None:
    """Refuse to record attention whose largest logits somebody reads after each forward: a replay sets no attribute.

    Other modules' configs say nothing: attention around them runs eager.

    Args:
        modules: Roots of what is recorded.

    Raises:
        CaptureError: A config of attention asks for them.
    """
    attentions = [module for module in every_module(modules) if hasattr(module, ATTENDS)]
    configs = {id(module.config): module.config for module in attentions}
    for config in configs.values():
        for field in FIELDS:
            if getattr(config, field, False):
                raise CaptureError(
                    f"{field}=true reads the largest attention logits that every forward leaves in an attribute, which "
                    f"a graph does not set; write {field}=false to have graphs"
                )


LAYER = seam("mamba_layer")
MIXER = seam("mamba_mixer")
# The mixer's helper keeps its parameters under their own name with this behind it.
HELD = "_cp1"


def is_mamba(layer: nn.Module) -> bool:
    """Whether this is one of megatron-core's Mamba layers."""
    return isinstance(layer, getattr(sys.modules.get(LAYER.module), "MambaLayer", ()))


def mamba_part(layer: nn.Module, parts: int) -> DecoderPart:
    """Return a whole Mamba layer as a piece.

    Args:
        layer: The layer.
        parts: Ranks that hold a part of the tokens each; the mixer has all of them, and a part of the heads.
    """
    forward: Callable[..., Any] = layer.forward

    def run(pack: RecordedPack) -> tuple[Tensor]:
        params = packed_params(pack, pack.hidden.shape[0] * parts) if pack.offsets else None
        return (forward(hidden_states=pack.hidden, packed_seq_params=params),)

    return DecoderPart(f"packed_mamba_{layer.layer_number}", layer, (), run, ((layer, "forward", FIRST_OUTPUT),))


@contextmanager
def current_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let the Mamba mixers below `modules` compute with the parameters that they have now.

    A mixer hands its parameters over once, to a helper that is no module: what stands in for a parameter while work is
    recorded would not reach it, and gradients would go past the graph.
    """
    with ExitStack() as stack:
        for mixer in modules_where(is_mixer, modules):
            for held in [name for name, value in vars(mixer.cp).items() if isinstance(value, nn.Parameter)]:
                stack.enter_context(overridden(mixer.cp, held, getattr(mixer, held.removesuffix(HELD))))
        yield


def is_mixer(module: nn.Module) -> bool:
    """Whether this is megatron-core's Mamba mixer, and no class derived from it."""
    return type(module) is getattr(sys.modules.get(MIXER.module), "MambaMixer", None)


# Gemma 3's local one and global one.
BIASES_EACH = 2


def is_gemma3(layer: UpstreamModule) -> bool:
    """Whether a layer has Gemma 3's attention: each takes one of two tables of angles and one of two biases."""
    return isinstance(layer.self_attention, getattr(sys.modules.get(GEMMA3), "Gemma3SelfAttention", ()))


def with_one_table(kwargs: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
    """Return arguments whose two tables of angles are one of twice the width, for each of so many rows."""
    angles = kwargs.get("rotary_pos_emb")
    if not isinstance(angles, Tensor) or angles.dim() != 5:
        return kwargs
    return {**kwargs, "rotary_pos_emb": torch.cat((*angles,), -1).expand(-1, rows, -1, -1)}


def two_tables(angles: Tensor) -> Tensor:
    """Return what `with_one_table` put together."""
    return torch.stack(angles[:, :1].chunk(2, -1))


DELTA_NET = seam("delta_net_layers")
# What tells a gated delta net where documents lie, and what divides tensors there before megatron-core 0.19.
RESOLVE, UNPACK = "_resolve_cu_seqlens", "_unpack_sequence"
FLA, FLA_INDEX = "fla.", "fla.ops.utils.index"


def is_delta_net(module: nn.Module) -> bool:
    """Whether this is megatron-core's gated delta net, which takes the place of a layer's attention."""
    return type(module) is getattr(sys.modules.get(DELTA_NET.module), DELTA_NET.target, None)


def delta_net_refusal(config: Any, packs: bool) -> str | None:
    """Return why gated delta nets cannot be recorded; None where they can.

    Args:
        config: The decoder's transformer config.
        packs: Whether they are over packs; padded rows otherwise.
    """
    if config.deterministic_mode:
        takes = "take no packs" if packs else "copy from the host"
        return f"its gated delta nets {takes} with model.deterministic_mode=true"
    if packs and config.context_parallel_size > 1:
        return "its gated delta nets over packs were not compared with eager under context parallelism"
    if packs and hasattr(sys.modules[DELTA_NET.module], UNPACK):
        return "its gated delta nets over packs need megatron-core 0.19"
    return None


class PackChunks:
    """Documents of packs and their chunks, found on the device for gated delta nets that are recorded.

    Upstream reads offsets on the host. flash-linear-attention makes as many chunks as a pack has, and keeps what it
    made of a tensor of offsets for that tensor, whatever it holds later.
    """

    def __init__(self) -> None:
        # `cu_seqlens` of a pass -> what was made of them, by function and size of chunks. An entry lives as long as
        # what autograd saves of the pass.
        self._known: MutableMapping[Tensor, dict[tuple[str, int], Tensor]] = WeakTensorKeyDictionary()
        self._tokens = 0  # of the pack that was recorded last, with its padding

    @contextmanager
    def recorded(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Be around a forward or backward of these modules that is recorded."""
        of_pass: list[Tensor] = []

        def documents(padded: Tensor | None, offsets: Tensor, tokens: int, *_: Any, **__: Any) -> Tensor:
            if not of_pass:
                of_pass.append(with_padding(offsets if padded is None else padded, tokens))
                self._known[of_pass[0]], self._tokens = {}, tokens
            return of_pass[0]  # one tensor for queries and keys, which upstream need not compare

        with ExitStack() as stack:
            for net in modules_where(is_delta_net, modules):
                stack.enter_context(overridden(net, RESOLVE, documents))
            for module, name, function in _remembering():
                stack.enter_context(overridden(module, name, self._in_place_of(function)))
            yield

    def _in_place_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for one of flash-linear-attention's functions and keeps nothing for another pass."""
        name = function.__name__
        if name not in ON_DEVICE_CHUNKS:
            forgetful: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]
            return forgetful

        def made(cu_seqlens: Tensor, chunk_size: int, **_: Any) -> Tensor:
            found = self._of(cu_seqlens)
            if (name, chunk_size) not in found:
                found[name, chunk_size] = ON_DEVICE_CHUNKS[name](cu_seqlens, chunk_size, self._tokens)
            return found[name, chunk_size]

        return made

    def _of(self, offsets: Tensor) -> dict[tuple[str, int], Tensor]:
        """Return what is known of offsets, by their memory; nothing where autograd has them from elsewhere again."""
        return next((found for known, found in self._known.items() if known.data_ptr() == offsets.data_ptr()), {})


# By the functions of flash-linear-attention that they stand in for.
ON_DEVICE_CHUNKS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "prepare_chunk_indices": chunk_indices,
    "prepare_chunk_offsets": chunk_offsets,
}


def _remembering() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Return where flash-linear-attention's modules hold functions that keep results, their names and these."""
    index = sys.modules.get(FLA_INDEX)
    cached = {id(value) for value in vars(index or object).values() if hasattr(value, "__wrapped__")}
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(FLA)]
    return [(module, *item) for module in modules for item in vars(module).items() if id(item[1]) in cached]


HEADS, HEADS_AND_RING = "a2a", "a2a+p2p"
TE_CONTEXT = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
# Came with Transformer Engine 2.20. Earlier releases order a pack's tokens by offsets that the host reads.
ON_DEVICE = "thd_cp_rank_order_to_sequence_order"
FIRST = "2.20"
# The first release that always computes by the real lengths of padded documents (NVIDIA/TransformerEngine issue 3331).
RIGHT_PADDING = (2, 18)


def check_exchange(config: Any) -> None:
    """Refuse an exchange for which the installed Transformer Engine reads offsets on the host; warn of its errors.

    Args:
        config: The decoder's transformer config.

    Raises:
        OptionError: Names the exchange.
    """
    if config.context_parallel_size == 1:
        return
    version = importlib.metadata.version("transformer-engine")
    if tuple(map(int, version.split(".")[:2])) < RIGHT_PADDING:
        warn(
            f"Transformer Engine {version} computes wrong attention under context parallelism, eager too, where only "
            "the last document of a pack is padded. Install 2.18 or newer, or give every document padding"
        )
    named = config.cp_comm_type or ()  # of each layer, or of all
    wanted = {HEADS, HEADS_AND_RING}.intersection({named} if isinstance(named, str) else named)
    if not wanted or orders_on_device():
        return
    raise OptionError(
        "model.cp_comm_type",
        ",".join(sorted(wanted)),
        f"p2p with {MAX_PACKED_SEQS} and Transformer Engine {version}",
        f"This release reads a pack's offsets on the host. Set it to p2p, or install Transformer Engine {FIRST}.",
    )


def orders_on_device() -> bool:
    """Whether the installed Transformer Engine orders a pack's tokens without the host."""
    try:
        return hasattr(importlib.import_module(TE_CONTEXT), ON_DEVICE)
    except ImportError:
        return False


def levels(decoder: nn.Module) -> tuple[distributed.ProcessGroup, ...]:
    """Return the groups of a hierarchical exchange, by level; none where there is none."""
    groups = getattr(getattr(decoder, "pg_collection", None), "hcp", None)
    return tuple(group for group in groups or () if group.size() > 1)
