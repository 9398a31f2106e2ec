"""Qwen3-Omni's audio tower: clips of any length in chunks and windows."""

from . import Declaration, Seams
from .qwen3_omni import MODEL, THINKER, TOWER


def _seams(feature: str) -> Seams:
    return *_tower(feature), *_chunks(feature), *_layers(feature)


def _tower(feature: str) -> Seams:
    from ..seam import read
    from ..tower_seams import region_seams

    return (
        read(
            "qwen3_omni_audio_model",
            f"{THINKER}:Qwen3OmniThinkerModel.get_audio_features",
            "the tower is found as `audio_model`, and its last hidden states are all that the model reads",
            feature,
            uses=("self.audio_model(", "feature_lens=audio_feature_lengths", "audio_outputs.last_hidden_state"),
        ),
        *region_seams(
            "qwen3_omni_audio",
            TOWER,
            "Qwen3OmniMoeAudioEncoder",
            feature,
            ("input_features", "feature_lens"),
            (
                *("num_mel_bins", "n_window", "n_window_infer", "conv_chunksize", "positional_embedding", "layers"),
                *("conv2d1", "conv2d2", "conv2d3", "conv_out", "ln_post", "proj1", "act", "proj2"),
            ),
            (
                *("chunk_and_pad_features(", "get_valid_indices(", "get_audio_cu_seqlens(", "self.conv_chunksize"),
                *("F.gelu(self.conv2d1(", "F.gelu(self.conv2d2(", "F.gelu(self.conv2d3(", "self.conv_out("),
                *("self.positional_embedding.positional_embedding[", "self.ln_post(", "self.proj1(", "self.act("),
                *("self.proj2(", "last_hidden_state=hidden_states"),
            ),
        ),
    )


def _chunks(feature: str) -> Seams:
    from ..seam import read

    return (
        read(
            "qwen3_omni_audio_chunks",
            f"{TOWER}:chunk_and_pad_features",
            "a clip is cut into full chunks and one for the rest",
            feature,
            uses=("torch.ceil(feature_lens / (n_window * 2))", "feature_lens % (n_window * 2)"),
        ),
        read(
            "qwen3_omni_audio_windows",
            f"{TOWER}:get_audio_cu_seqlens",
            "windows are so many full chunks of a clip and one for the rest",
            feature,
            uses=(
                *("n_window_infer // (n_window * 2)", "max_len_after_cnn * n_window_ratio"),
                *("cnn_len // window_aftercnn", "cnn_len % window_aftercnn"),
            ),
        ),
        read(
            "qwen3_omni_audio_lengths",
            f"{TOWER}:_get_feat_extract_output_lengths",
            "tokens are counted by chunks of 100 frames",
            feature,
            uses=("input_lengths % 100", "input_lengths // 100 * 13"),
        ),
    )


def _layers(feature: str) -> Seams:
    from ..seam import called, touched

    return (
        called(
            "qwen3_omni_audio_layer",
            f"{TOWER}:Qwen3OmniMoeAudioEncoderLayer.forward",
            "the layers, which hand `cu_seqlens` on to attention as they get it",
            feature,
            takes="hidden_states cu_seqlens",
            uses=("cu_seqlens=cu_seqlens", "outputs = (hidden_states,)"),
        ),
        touched(
            "instance",
            "qwen3_omni_audio_attention",
            f"{TOWER}:Qwen3OmniMoeAudioAttention.forward",
            "attention takes segments as a tensor while work is recorded; upstream reads them on the host",
            feature,
            undo="put back when the recording ends",
            takes="hidden_states cu_seqlens",
            uses=("self.q_proj(", "self.k_proj(", "self.v_proj(", "scaling=self.scaling", "self.out_proj("),
        ),
    )


ENCODER = Declaration(
    name="Qwen3-Omni", model=MODEL, region="qwen3_omni_audio:QWEN3_OMNI_AUDIO", seams=_seams, encodes="audio"
)
