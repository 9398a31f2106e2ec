"""Sizes of language models by their names on Hugging Face's hub, as their configurations there have them."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Sizes(NamedTuple):
    """Sizes of a language model.

    Attributes:
        layers, hidden, heads: Its layers, their width, heads of queries.
        groups: Heads of keys and values.
        channels: Width of a head.
        mlp: Width of the MLP; of experts' layers, of one that is dense.
        vocabulary: Tokens.
        top, expert, shared: Experts that a token goes through, the width of one, and of the shared one.
        fused: Whether Bridge fuses activations and rotation.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    channels: int
    mlp: int
    vocabulary: int = 151_936
    top: int = 0
    expert: int = 0
    shared: int = 0
    fused: bool = False

    def fields(self) -> dict[str, int | bool]:
        """Return them as fields of a Bridge provider."""
        named = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.channels,
            "ffn_hidden_size": self.mlp,
            "vocab_size": self.vocabulary,
            "moe_router_topk": self.top,
            "moe_ffn_hidden_size": self.expert,
            "moe_shared_expert_intermediate_size": self.shared,
        }
        fused = dict.fromkeys(("bias_activation_fusion", "apply_rope_fusion"), True) if self.fused else {}
        return {name: size for name, size in named.items() if size} | fused


_LLAMA = 128_256
# The first that matches counts. Qwen3-VL's language models are Qwen3's.
SIZES: Mapping[str, Sizes] = {
    r"Qwen/Qwen3(-VL)?-30B-A3B": Sizes(48, 2048, 32, 4, 128, 6144, top=8, expert=768),
    r"Qwen/Qwen3(-VL)?-235B-A22B": Sizes(94, 4096, 64, 4, 128, 12288, top=8, expert=1536),
    r"Qwen/Qwen3-0\.6B": Sizes(28, 1024, 16, 8, 128, 3072),
    r"Qwen/Qwen3-1\.7B|Qwen/Qwen3-VL-2B": Sizes(28, 2048, 16, 8, 128, 6144),
    r"Qwen/Qwen3(-VL)?-4B": Sizes(36, 2560, 32, 8, 128, 9728),
    r"Qwen/Qwen3(-VL)?-8B": Sizes(36, 4096, 32, 8, 128, 12288),
    r"Qwen/Qwen3-14B": Sizes(40, 5120, 40, 8, 128, 17408),
    r"Qwen/Qwen3(-VL)?-32B": Sizes(64, 5120, 64, 8, 128, 25600),
    r"meta-llama/(Meta-)?Llama-3(\.1)?-8B": Sizes(32, 4096, 32, 8, 128, 14336, _LLAMA, fused=True),
    r"meta-llama/(Meta-)?Llama-3(\.1)?-70B": Sizes(80, 8192, 64, 8, 128, 28672, _LLAMA, fused=True),
    r"meta-llama/Llama-3\.2-1B": Sizes(16, 2048, 32, 8, 64, 8192, _LLAMA, fused=True),
    r"meta-llama/Llama-3\.2-3B": Sizes(28, 3072, 24, 8, 128, 8192, _LLAMA, fused=True),
}

# Tokens of tokenizers, for models whose recipes name nothing else of the hub.
VOCABULARIES = {r"nvidia/(NVIDIA-)?Nemotron-": 131_072, r"google/gemma-3-": 262_144}


def tokens_of(name: str) -> int | None:
    """Return the tokens of a tokenizer on the hub; None where they are not known here."""
    return next((count for names, count in VOCABULARIES.items() if re.match(names, name)), None)


def sizes_of(name: str) -> dict[str, int | bool]:
    """Return the sizes of a model on the hub as fields of a Bridge provider; none where they are not known here."""
    return next((sizes.fields() for sizes in _matching(name)), {})


def _matching(name: str) -> Iterator[Sizes]:
    return (sizes for names, sizes in SIZES.items() if re.match(names, name))
