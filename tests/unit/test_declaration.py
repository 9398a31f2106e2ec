"""A new option touches two files: its declaration, and the code that uses it."""

from types import SimpleNamespace

import pytest

from bridge_cg_plugin.options import OptionError, VisionGraphOptions, normalize


@pytest.mark.parametrize(
    "written",
    [
        "vision_cuda_graph_tuning.kernels=exact vision_cuda_graph_tuning.slots=2",
        "model.vision_cuda_graph_tuning.kernels=exact vision_cuda_graph_tuning=slots=2",
        "model.vision_cuda_graph_tuning={kernels:exact,slots:2}",
        "--vision-cuda-graph-tuning kernels=exact,slots=2",
        "model:\n  vision_cuda_graph_tuning:\n    kernels: exact\n    slots: 2\n",
        {"model": {"vision_cuda_graph_tuning": {"kernels": "exact", "slots": 2}}},
        {"vision_cuda_graph_tuning.kernels": "exact", "model.vision_cuda_graph_tuning.slots": 2},
        SimpleNamespace(vision_cuda_graph_tuning={"kernels": "exact", "slots": 2}),
    ],
    ids=str,
)
def test_spellings_of_tuning_values(written):
    vision = normalize(written)[0].vision
    assert (vision.kernels, vision.slots) == ("exact", 2)


def test_later_tuning_values_win_one_by_one():
    recipe = SimpleNamespace(vision_cuda_graph_tuning={"kernels": "exact", "slots": 2})
    vision = normalize(recipe, "vision_cuda_graph_tuning.slots=4")[0].vision
    assert (vision.kernels, vision.slots) == ("exact", 4)
    assert normalize(recipe, "vision_cuda_graph_tuning=null")[0].vision == VisionGraphOptions()
    assert normalize(recipe, "vision_cuda_graph_tuning.slots=null")[0].vision.kernels == "exact"


@pytest.mark.parametrize(
    "written, says",
    [
        (
            "vision_cuda_graph_tuning.kernls=fast",
            r"kernls': there is no such tuning value. Did you mean vision_cuda_graph_tuning.kernels\?",
        ),
        ("vision_cuda_graph_tuning.zzz=2", "there are slots, max_frames"),
        ("vision_cuda_graph_tuning=fast", "vision_cuda_graph_tuning='fast': it must be name=value,name=value"),
        (
            "vision_cuda_graph_tuning.slots=0",
            "tuning.slots='0': it must be a whole number of at least 1",
        ),
        (
            SimpleNamespace(vision_cuda_graph_tuning={"slts": 2}),
            "vision_cuda_graph_tuning.slts'.*vision_cuda_graph_tuning.slots",
        ),
        (SimpleNamespace(vision_cuda_graph_tuning=3), "vision_cuda_graph_tuning=3"),
        ("vision_cuda_graph_kernels=fast", "there is no such option"),
    ],
    ids=str,
)
def test_refused_tuning_values(written, says):
    with pytest.raises(OptionError, match=says):
        normalize(written)
