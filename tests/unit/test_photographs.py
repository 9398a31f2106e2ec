import pytest
import torch

from bridge_cg_plugin.cli.report.runs import how_eager_fares
from examples.photographs.images import (
    IMAGE_TOKEN,
    SMALL_SIZES,
    PhotographDataset,
)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[[2.0], [2.1], [2.2]]], "0 of 3 eager runs are outside."),
        ([[[2.0], [2.1], [2.9]]], "1 of 3 eager runs are outside as well: give more."),
        ([[[2.0, 2.0], [2.1, 2.0], [2.2, 2.0]], [[1.0], [1.1], [1.9]]], "1 of 3"),
        ([[[2.0], [2.0], [float("nan")]]], "1 of 3"),
    ],
)
def test_eager_runs_are_judged_by_the_others(values, said):
    assert said in how_eager_fares(*values)


def dataset(text_only_every=0):
    return PhotographDataset(8, 512, 2, SMALL_SIZES, 1, text_only_every)


def test_a_sample_has_a_placeholder_for_every_merged_patch():
    item = dataset()[0]
    assert (item["tokens"] == IMAGE_TOKEN).sum() == int(item["images"].grid.prod(1).sum()) // 4
    assert torch.equal(item["tokens"][1:], item["labels"][:-1])
    assert item["loss_mask"].sum() == 32 * len(item["images"].names)
    assert not (item["loss_mask"].bool() & (item["labels"] == IMAGE_TOKEN)).any()


def test_a_collated_microbatch():
    data = dataset()
    items = [data[0], data[1]]
    batch = data.collate_fn(items)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert batch[name].shape == (2, 512)
    visual = batch["visual_inputs"]
    assert visual.image_grid_thw.shape == (sum(len(i["images"].grid) for i in items), 3)
    assert visual.pixel_values.shape[0] == int(visual.image_grid_thw.prod(-1).sum())
    assert batch["attention_mask"] is None
    flat = visual.normalized_for_model()
    assert torch.equal(flat["image_grid_thw"], visual.image_grid_thw)  # releases before 0.5 flatten nothing
