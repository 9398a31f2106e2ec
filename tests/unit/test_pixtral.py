"""Calls of Ministral 3's tower, Pixtral's, which takes images padded to one size and returns hidden states."""

import pytest
import torch
from transformers.models.pixtral import modeling_pixtral as upstream

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.vision.batch import BatchError

from .hugging_face_towers import TOLERANCE, assert_equal_results, draw_padded, new_pixtral, run_pixtral
from .test_encoders import PIXTRALS
from .towers import assert_close, graphs_on

PADDED = [[1, 4, 6], [1, 8, 2]]


def test_calls_of_pixtral_that_do_not_ask_for_hidden_states_run_eager():
    """They come before a replay, and leave hooks on the layers."""
    model = new_pixtral()
    pixels, sizes = draw_padded(PADDED)
    expected = PIXTRALS.results(model, PADDED)
    with graphs_on(model, **PIXTRALS.largest) as graphs:
        assert model(pixels, image_sizes=sizes).hidden_states is None
        assert isinstance(model(pixels, image_sizes=sizes, output_hidden_states=True, return_dict=False), tuple)
        assert graphs.statistics().fallbacks == {"call_arguments": 2}
        assert_equal_results(PIXTRALS.results(model, PADDED), expected)
        assert graphs.statistics().replays == 1


def test_of_a_replays_hidden_states_the_last_can_be_had():
    pixels, sizes = draw_padded(PADDED)
    with graphs_on(new_pixtral(), **PIXTRALS.largest) as graphs:
        returned = graphs.model(pixels, image_sizes=sizes, output_hidden_states=True, return_dict=True)
        assert returned.hidden_states[-1] is returned.last_hidden_state
        with pytest.raises(OptionError, match="vision_feature_layer=-2: it must be -1"):
            returned.hidden_states[-2]


def test_embedded_patches_have_the_type_that_autocast_computes_in():
    model = new_pixtral()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (expected,) = run_pixtral(model, PADDED)
        with graphs_on(model, kernels="exact", **PIXTRALS.largest) as graphs:
            (found,) = run_pixtral(model, PADDED)
            assert graphs.statistics().fallbacks == {}
    assert_close([found], [expected], 1e-4)


def test_what_lies_beside_smaller_images_is_not_read():
    model = new_pixtral()
    pixels, sizes = draw_padded(PADDED)
    expected = PIXTRALS.results(model, PADDED)
    for image, (height, width) in enumerate(sizes.tolist()):
        pixels[image, :, height:] = pixels[image, :, :, width:] = torch.nan
    with graphs_on(model, **PIXTRALS.largest) as graphs:
        outputs = graphs.model(pixels, image_sizes=sizes, output_hidden_states=True, return_dict=True)
        assert_close([outputs.hidden_states[-1]], expected[0], TOLERANCE)


@pytest.mark.skipif(not hasattr(upstream, "position_ids_in_meshgrid"), reason="a later release has no table")
def test_an_image_behind_the_table_of_positions_is_refused():
    rows = [[1, 20, 20]]
    with pytest.raises(IndexError):
        run_pixtral(new_pixtral(), rows)
    with graphs_on(new_pixtral(), **PIXTRALS.largest) as graphs, pytest.raises(BatchError, match="18 x 18"):
        run_pixtral(graphs.model, rows)
