"""Qwen3-Omni's audio encoder on graphs: clips of any length, beside upstream's own chunks, windows and outputs."""

import inspect

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn.functional import pad
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as upstream

from bridge_cg_plugin.upstream.encoders.qwen3_omni import (
    ROOM,
    chunk_frames,
    chunks_of,
    token_places,
    tokens_of,
    window_ends,
)
from bridge_cg_plugin.vision.layout import most_windows

from .hugging_face_towers import TOLERANCE, change_behind_the_hosts_back, draw_clips, new_qwen3_omni_audio
from .towers import assert_close, graphs_on

CHUNK = 13
# Releases after 5.12 count tokens by the encoder's own chunks.
WINDOW = (50,) if "n_window" in inspect.signature(upstream.get_valid_indices).parameters else ()
BUCKETS = tuple(ROOM * chunks for chunks in (2, 5, 12, 40))
clip = st.one_of(st.integers(1, 120), st.integers(1, 900), st.integers(1, 9).map(lambda chunks: 100 * chunks))
clips = st.lists(clip, min_size=1, max_size=5)


@given(lengths=clips, unused=st.integers(0, 3), spare=st.integers(0, 4), window=st.integers(1, 8))
def test_places_are_upstreams(lengths, unused, spare, window):
    assume(max(lengths) >= 100)
    given_lengths = torch.tensor(lengths)
    numbers = torch.arange(1.0, 1 + sum(lengths))[None]
    padded, of_chunks = upstream.chunk_and_pad_features(numbers, given_lengths, 50)
    kept = upstream.get_valid_indices(of_chunks, *WINDOW)
    ends = upstream.get_audio_cu_seqlens(of_chunks, given_lengths, 100 * window, 50)
    chunks, device = len(of_chunks) + spare, pad(given_lengths, (0, unused))

    frame, exists = chunk_frames(device, chunks)
    assert torch.equal(torch.where(exists, frame + 1, 0)[: len(of_chunks)].float(), padded[:, 0])
    assert not exists[len(of_chunks) :].any()

    order, place = token_places(device, chunks)
    every = torch.arange(chunks * CHUNK)
    assert torch.equal(order[: len(kept)], kept)
    assert torch.equal(order[place], every) and torch.equal(place[order], every)

    found = window_ends(device, most_windows(chunks, len(lengths), window), window)
    assert torch.equal(found[: len(ends)], ends) and bool((found[len(ends) :] == ends[-1]).all())

    assert sum(map(chunks_of, lengths)) == len(of_chunks)
    assert sum(map(tokens_of, lengths)) == len(kept)


def test_clips_without_a_full_chunk_run_eager():
    """Upstream pads chunks to the longest of the batch, which its convolutions see."""
    model = new_qwen3_omni_audio()
    features, lengths = draw_clips([50, 99])
    longer = torch.cat((features, features.new_ones(len(features), 100)), 1)
    alone = model(features[:, :50], feature_lens=lengths[:1]).last_hidden_state
    beside = model(features, feature_lens=lengths).last_hidden_state
    assert (alone - beside[: len(alone)]).norm() > 1e-3 * alone.norm()
    expected = model(longer, feature_lens=torch.tensor([50, 99, 100])).last_hidden_state
    with graphs_on(model, buckets=BUCKETS) as graphs:
        assert_close([model(features, feature_lens=lengths).last_hidden_state], [beside], 0.0)
        assert graphs.statistics().fallbacks == {"other_batch": 1}
        assert_close([model(longer, feature_lens=torch.tensor([50, 99, 100])).last_hidden_state], [expected], TOLERANCE)
        assert graphs.statistics().replays == 1


def test_lengths_that_changed_behind_the_hosts_back_give_nan():
    model = new_qwen3_omni_audio()
    with graphs_on(model, buckets=BUCKETS) as graphs:
        features, lengths = draw_clips([230, 100])
        change_behind_the_hosts_back(graphs, lambda: lengths.copy_(torch.tensor([130, 200])))
        assert model(features, feature_lens=lengths).last_hidden_state.isnan().all()
