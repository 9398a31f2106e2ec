from types import SimpleNamespace

import pytest
import torch
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

from bridge_cg_plugin.upstream.hooks.batches import GRIDS, PATCHES

GRID = torch.tensor([[[1, 4, 6], [3, 2, 8]]])
VIDEO = torch.tensor([[[5, 2, 2]]])


def batch(**visual):
    return {"tokens": torch.zeros(2, 4), "visual_inputs": GenericVisualInputs(**visual)}


def fake_step(device="meta"):
    """What Bridge's step does to a batch, with a device that this machine has."""

    def get_batch_from_iterator(data_iterator, use_mtp=False, *, is_first_pp_stage, is_last_pp_stage):
        """Get a batch."""
        found = next(data_iterator)
        visual = found["visual_inputs"]
        for name, value in (visual.__dict__ if visual is not None else {}).items():
            visual.__dict__[name] = value.to(device) if value is not None else None
        return {**found, "said": (use_mtp, is_first_pp_stage, is_last_pp_stage)}

    return get_batch_from_iterator


@pytest.mark.parametrize("patch", PATCHES[:-1], ids=lambda p: p.name)
def test_the_wrapped_step_remembers_what_it_moved(patch):
    step = patch.make(fake_step())
    found = step(
        iter([batch(image_grid_thw=GRID, video_grid_thw=VIDEO)]), True, is_first_pp_stage=1, is_last_pp_stage=2
    )
    assert found["said"] == (True, 1, 2)
    visual = found["visual_inputs"]
    assert visual.image_grid_thw.device.type == "meta"
    flat = visual.normalized_for_model()
    before = GRIDS.device_reads
    assert GRIDS.lookup(flat["image_grid_thw"]) == ((1, 4, 6), (3, 2, 8))
    assert GRIDS.lookup(flat["video_grid_thw"]) == ((5, 2, 2),)
    assert GRIDS.device_reads == before
    assert step.__doc__ == "Get a batch." and step.__name__ == "get_batch_from_iterator"


def test_sizes_of_padded_images_are_remembered():
    sizes = torch.tensor([[56, 84], [28, 56]])
    found = PATCHES[0].make(fake_step())(iter([batch(image_sizes=sizes)]), is_first_pp_stage=1, is_last_pp_stage=2)
    moved, before = found["visual_inputs"].normalized_for_model()["image_sizes"], GRIDS.device_reads
    assert moved.device.type == "meta"
    assert GRIDS.values(moved) == (56, 84, 28, 56) and GRIDS.device_reads == before


def test_other_kinds_of_visual_inputs_pass():
    step = PATCHES[0].make(lambda data_iterator: next(data_iterator))
    item = {"visual_inputs": SimpleNamespace(pixels=1)}
    assert step(iter([item])) is item
