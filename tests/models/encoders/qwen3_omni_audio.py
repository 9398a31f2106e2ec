"""Qwen3-Omni's audio: Hugging Face's tower, clips of any length in chunks and windows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from scripts.performance.measure import on_gpu
from tests.models.encoder_case import Batch, Encoder, device, peaked, random
from tests.models.mixes import ClipMixes


def build_qwen3_omni_audio(layers: int) -> nn.Module:
    """Build the audio tower of Qwen3-Omni (32 layers); 8 s attend to each other."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": 1280,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "output_dim": 2048,
    }
    if not on_gpu():
        sizes = {"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 24}
        sizes |= {"downsample_hidden_size": 8, "num_mel_bins": 16}
    config = Qwen3OmniMoeAudioEncoderConfig(encoder_layers=layers, n_window=50, n_window_infer=800, **sizes)
    return peaked(Qwen3OmniMoeAudioEncoder._from_config(config), ("q_proj.weight", "k_proj.weight"))


def audio_batch(model: nn.Module, lengths: Sequence[int], seed: int) -> Batch:
    """Make random clips of so many frames; the lengths are announced to the plugin, which else reads them."""
    from bridge_cg_plugin.upstream.encoders.qwen3_omni import ROOM, chunks_of, tokens_of
    from bridge_cg_plugin.upstream.hooks.batches import GRIDS

    config: Any = model.config
    host = torch.tensor(lengths)
    lens = host.to(device(), copy=True)
    GRIDS.remember(lens, host)
    tokens = sum(map(tokens_of, lengths))
    # Bridge's model cuts frames out of padded clips, and turns the result.
    features = random((sum(lengths), config.num_mel_bins), seed).T
    gradient = random((tokens, config.output_dim), seed + 1)
    room = sum(map(chunks_of, lengths)) * ROOM
    return Batch({"input_features": features, "feature_lens": lens}, [gradient], room, len(lengths))


def room_of(model: nn.Module) -> int:
    """Return what a chunk counts."""
    from bridge_cg_plugin.upstream.encoders.qwen3_omni import ROOM

    return ROOM


ENCODER = Encoder(
    32,
    build_qwen3_omni_audio,
    audio_batch,
    lambda returned: [returned.last_hidden_state],
    {
        "8_s": [800],
        "30_s": [3000],
        "8_clips": [1230, 310, 2750, 480, 990, 150, 1800, 620],
        "5_clips": [3000] * 4 + [2400],  # 2304 tokens, as buckets count them
        "18_clips": [3000] * 17 + [200],  # 8192
    },
    modes=("plugin",),
    noise=("k_proj.bias",),  # softmax does not change with it
    mixes=ClipMixes(100, room_of),
)
