"""Nemotron's RADIO: its layers on graphs, what embeds patches eager, outputs and gradients equal to eager's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.attention_bounds import frame_limits, scanned_limits
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.encoders.radio import PACKED_RADIO, RADIO
from bridge_cg_plugin.upstream.encoders.registry import find_encoders

from .hugging_face_towers import assert_equal_results, change_behind_the_hosts_back, results
from .radio_towers import PATCH, TOKENS, new_radio, run_images, run_tiles, segments_of
from .towers import graphs_on, poison

ROOM = 64
TILES = {"buckets": tuple(ROOM * count for count in (1, 2, 5))}
PACKED = {"buckets": (32, 64, 128, 256)}
sides = st.integers(1, 6).map(lambda n: n * PATCH)
images = st.lists(st.tuples(sides, sides), min_size=1, max_size=5)


def test_each_kind_is_found_in_a_model_of_megatron_core():
    for packed, family in ((False, RADIO), (True, PACKED_RADIO)):
        tower = new_radio(packed=packed)
        for holder in (tower, torch.nn.Module(), torch.nn.Module()):
            if holder is not tower:
                holder.vision_model = tower
            (found,) = find_encoders(holder)
            assert found.family is family and found.model is tower.decoder
        bridges = torch.nn.Module()
        bridges.llava_model = torch.nn.Module()
        bridges.llava_model.vision_model = tower
        assert find_encoders(bridges)[0].model is tower.decoder


def assert_replays_are_eagers(model, run, sizes, options):
    """Compare microbatches of some sizes with eager, each over memory that holds NaN; returns what was counted."""
    expected = [results(run, model, size, seed) for seed, size in enumerate(sizes)]
    with graphs_on(model, **options) as graphs:
        for seed, size in enumerate(sizes):
            poison(graphs, float("nan"))
            assert_equal_results(results(run, model, size, seed), expected[seed])
        return graphs.statistics()


@pytest.mark.parametrize("frozen", [(), "decoder.layers.0", "embedder"], ids=str)
@settings(max_examples=10)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_tiles_equal_eager_with_the_same_draws(frozen, counts, cropped):
    """Positions are cropped at random for every image: the same seed draws the same crops, on graphs and eager.

    Frozen layers hand gradients on to what embeds patches.
    """
    model = new_radio(has_cpe=cropped)
    for name, parameter in model.named_parameters():
        parameter.requires_grad &= not name.startswith(frozen)
    statistics = assert_replays_are_eagers(model, run_tiles, counts, TILES)
    assert statistics.replays == len(counts) and not statistics.fallbacks


@settings(max_examples=10)
@given(st.lists(images, min_size=1, max_size=3))
def test_images_of_any_size_equal_eager(sequence):
    model = new_radio(packed=True, interpolate_only_cpe=True)
    statistics = assert_replays_are_eagers(model, run_images, sequence, PACKED)
    assert statistics.replays + statistics.fallbacks["too_many_tokens"] == len(sequence)


@pytest.mark.parametrize("packed", [False, True])
def test_a_tower_that_stays_in_evaluation_is_trained(packed):
    """As Nemotron Omni's: layers with gradients, in evaluation mode."""
    model = new_radio(packed=packed, force_eval_mode=True, interpolate_only_cpe=True)
    assert not model.training
    run, size, options = (run_images, [(64, 48), (32, 32)], PACKED) if packed else (run_tiles, 3, TILES)
    assert assert_replays_are_eagers(model, run, [size] * 4, options).replays >= 2


def test_calls_that_no_graph_takes_run_eager():
    model = new_radio()
    hidden = torch.randn(TOKENS, 2, 32)
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    with graphs_on(model, **TILES) as graphs:
        model.decoder(hidden, attention_mask=mask)
        model.decoder(hidden[:5], attention_mask=None)
        model.decoder(hidden.repeat(1, 3, 1), attention_mask=None)
        assert graphs.statistics().fallbacks == {"call_arguments": 1, "other_batch": 1, "too_many_tokens": 1}


def test_segments_of_other_images_run_eager():
    model = new_radio(packed=True)
    segments = segments_of([(32, 32), (16, 32)])
    with graphs_on(model, **PACKED) as graphs:
        model.decoder(torch.randn(9, 1, 32), attention_mask=None, packed_seq_params=segments)
        assert graphs.statistics().fallbacks == {"other_batch": 1}
        segments.cu_seqlens_q_padded = segments.cu_seqlens_q
        model.decoder(torch.randn(6, 1, 32), attention_mask=None, packed_seq_params=segments)
        assert graphs.statistics().fallbacks == {"other_batch": 1, "call_arguments": 1}


def test_offsets_that_changed_behind_the_hosts_back_give_nan():
    model = new_radio(packed=True)
    segments, hidden = segments_of([(32, 32), (16, 32)]), torch.randn(6, 1, 32)
    with graphs_on(model, **PACKED) as graphs:
        change_behind_the_hosts_back(graphs, lambda: segments.cu_seqlens_q.copy_(torch.tensor([0, 2, 6])))
        assert model.decoder(hidden, attention_mask=None, packed_seq_params=segments).isnan().all()


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("recompute_granularity", "full", "model.recompute_vision=True: it must be false with vision graphs of RADIO"),
        ("cpu_offloading", True, "model.cpu_offloading=True: it must be false with vision graphs of RADIO"),
        ("fp4", "e2m1", "model.fp4='e2m1': it must be null with vision graphs of RADIO"),
    ],
)
def test_layers_that_no_graph_takes_are_refused(setting, value, said):
    model = new_radio()
    setattr(model.decoder.config, setting, value)
    with pytest.raises(OptionError, match=said), graphs_on(model, **TILES):
        pass


def test_images_of_any_size_attend_as_cudnn_is_called_directly():
    """Interleaved, inside packed segments and without anything else."""
    pytest.importorskip("triton")
    from bridge_cg_plugin.vision.kernels.cudnn_attention import lie_interleaved

    model, calls = new_radio(packed=True), []
    for layer in model.decoder.layers:
        attention = layer.self_attention.core_attention

        def note(*args, original=attention.forward, **kwargs):
            packed = kwargs["packed_seq_params"]
            calls.append(
                {
                    "interleaved": lie_interleaved(*args[:3]),
                    "others": [other for other in args[3:] if other is not None],
                    "given": {name for name, value in kwargs.items() if value is not None},
                    "mask": kwargs["attn_mask_type"].name,
                    "one_segmentation": packed.cu_seqlens_q is packed.cu_seqlens_kv,
                }
            )
            return original(*args, **kwargs)

        attention.forward = note
    with graphs_on(model, **PACKED):
        pass
    assert calls
    given = {"packed_seq_params", "attn_mask_type"}
    expected = {"interleaved": True, "others": [], "given": given, "mask": "no_mask", "one_segmentation": True}
    assert all(call == expected for call in calls)


def test_limits_of_images_of_any_size_follow_what_attention_scans():
    encoder = PACKED_RADIO.encoder(new_radio(packed=True).decoder)
    assert encoder.bounds(8192, 64, False) == frame_limits(8192, 64)
    assert encoder.bounds(8192, 64, True) == scanned_limits(8192, 64) != frame_limits(8192, 64)
