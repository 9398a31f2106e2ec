"""Qwen3-Omni's audio tower: clips of any length in chunks and windows."""

from . import Declaration, Seams
from .qwen3_omni import MODEL, THINKER, TOWER


def _seams(feature: str) -> Seams:
    return *_tower(feature), *_chunks(feature), *_layers(feature)


def _tower(feature: str) -> Seams:
    from ..seam import Seam
    from ..tower_seams import region_seams

    return (
        Seam(
            name="qwen3_omni_audio_model",
            module=THINKER,
            target="Qwen3OmniThinkerModel.get_audio_features",
            kind="function",
            touch="read",
            purpose="the tower is found as `audio_model`, and its last hidden states are all that the model reads",
            features=(feature,),
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
    from ..seam import Seam

    return (
        Seam(
            name="qwen3_omni_audio_chunks",
            module=TOWER,
            target="chunk_and_pad_features",
            kind="function",
            touch="read",
            purpose="a clip is cut into full chunks and one for the rest",
            features=(feature,),
            uses=("torch.ceil(feature_lens / (n_window * 2))", "feature_lens % (n_window * 2)"),
        ),
        Seam(
            name="qwen3_omni_audio_windows",
            module=TOWER,
            target="get_audio_cu_seqlens",
            kind="function",
            touch="read",
            purpose="windows are so many full chunks of a clip and one for the rest",
            features=(feature,),
            uses=(
                *("n_window_infer // (n_window * 2)", "max_len_after_cnn * n_window_ratio"),
                *("cnn_len // window_aftercnn", "cnn_len % window_aftercnn"),
            ),
        ),
        Seam(
            name="qwen3_omni_audio_lengths",
            module=TOWER,
            target="_get_feat_extract_output_lengths",
            kind="function",
            touch="read",
            purpose="tokens are counted by chunks of 100 frames",
            features=(feature,),
            uses=("input_lengths % 100", "input_lengths // 100 * 13"),
        ),
    )


def _layers(feature: str) -> Seams:
    from ..seam import Seam

    return (
        Seam(
            name="qwen3_omni_audio_layer",
            module=TOWER,
            target="Qwen3OmniMoeAudioEncoderLayer.forward",
            kind="function",
            touch="called",
            purpose="the layers, which hand `cu_seqlens` on to attention as they get it",
            features=(feature,),
            parameters=("hidden_states", "cu_seqlens"),
            uses=("cu_seqlens=cu_seqlens", "outputs = (hidden_states,)"),
        ),
        Seam(
            name="qwen3_omni_audio_attention",
            module=TOWER,
            target="Qwen3OmniMoeAudioAttention.forward",
            kind="function",
            touch="instance",
            purpose="attention takes segments as a tensor while work is recorded; upstream reads them on the host",
            features=(feature,),
            undo="put back when the recording ends",
            parameters=("hidden_states", "cu_seqlens"),
            uses=("self.q_proj(", "self.k_proj(", "self.v_proj(", "scaling=self.scaling", "self.out_proj("),
        ),
    )


ENCODER = Declaration(
    name="Qwen3-Omni", model=MODEL, region="qwen3_omni_audio:QWEN3_OMNI_AUDIO", seams=_seams, encodes="audio"
)
