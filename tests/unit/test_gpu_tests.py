"""What CI can know of the tests that need a GPU: that they import what is there, and which GPU takes which of them."""

import importlib
from pathlib import Path

import pytest
import torch

from bridge_cg_plugin.upstream.seams.seam import Feature as F
from bridge_cg_plugin.upstream.seams.states import FEATURES

from ..schedule import LONGEST, module_of
from ..tape import Tape

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "gpu").glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_module_imports(name):
    importlib.import_module(f"tests.gpu.{name}")


def seconds(items):
    """Return what a process does for its tests, each module and each training run once."""
    from tests.gpu.parts import needs_of

    return sum({name: took for each in items for name, took in needs_of(each).items()}.values())


class Collected:
    """A pytest plugin that keeps what was collected."""

    def pytest_collection_finish(self, session):
        self.items = list(session.items)


@pytest.fixture(scope="module")
def collected():
    """Return the tests of `./run gpu-test`."""
    found = Collected()
    folder = str(Path(__file__).parents[1] / "gpu")
    words = ["--collect-only", "-m", "gpu and not scripts and not parallel", "-s", "-qq"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GPU_TESTS_PART", raising=False)
        code = pytest.main([folder, *words, "-p", "no:faulthandler", "-p", "no:cacheprovider"], plugins=[found])
    assert code == 0
    return found.items


@pytest.mark.parametrize("count", range(1, 9))
def test_the_gpu_tests_are_given_out_evenly(collected, count):
    from tests.gpu.parts import part_of
    from tests.gpu.trainings import trainings_of

    parts = [part_of(collected, f"{number}/{count}") for number in range(count)]
    assert all(parts) and sum(map(len, parts)) == len(collected)
    times = [seconds(part) for part in parts]
    if count <= 4:
        assert max(times) <= 1.2 * sum(times) / count
        assert all(any(map(trainings_of, part)) for part in parts)
    # A training run that tests of several parts wait for is done in each.
    assert sum(times) <= 1.1 * seconds(collected)


# Feature -> one of the tests of `./run gpu-first` that fails without it.
FIRST = {
    F.OPTIONS: "test_pretrain.py::test_first_losses_equal_eager[offloaded]",
    F.VISION: "test_parity.py::test_mixes_replayed_from_one_capture",
    F.VISION_QWEN3_VL: "test_parity.py::test_mixes_replayed_from_one_capture",
    **{
        feature: f"test_encoders.py::test_replays_{test}[{name}]"
        for feature, test, name in (
            ("vision graphs of Qwen2.5-VL", "are_as_near_to_fp32_as_eager", "qwen25_vl-fast"),
            ("vision graphs of GLM-4.5V", "are_as_near_to_fp32_as_eager", "glm45v-fast"),
            ("vision graphs of Qwen2.5-Omni", "are_as_near_to_fp32_as_eager", "qwen25_omni-fast"),
            ("vision graphs of Qwen3-Omni", "are_as_near_to_fp32_as_eager", "qwen3_omni-fast"),
            ("vision graphs of Ministral 3", "are_as_near_to_fp32_as_eager", "ministral3-fast"),
            ("audio graphs of Qwen3-Omni", "are_as_near_to_fp32_as_eager", "qwen3_omni_audio-fast"),
            ("vision graphs of Gemma 3", "equal_eager_to_the_bit", "siglip"),
            ("vision graphs of Nemotron VL", "equal_eager_to_the_bit", "nemotron_vl"),
            ("vision graphs of Nemotron Omni", "equal_eager_to_the_bit", "nemotron_omni"),
        )
    },
    F.OFFLOAD_IN_GRAPHS: "test_offload.py::test_outputs_and_gradients_are_equal_to_the_bit[fast-both]",
    F.LANGUAGE_MODEL: "test_pretrain.py::test_language_model_graphs_beside_vision_graphs[attn-mlp]",
    F.MULTIMODAL_ROTARY: "test_pretrain.py::test_language_model_graphs_beside_vision_graphs[attn-mlp]",
    F.FULL_ITERATION: "test_pretrain.py::test_the_whole_language_model_on_a_graph[text-only and evaluation]",
    F.PACKED: "test_packed.py::test_thirty_packs_replayed_from_one_capture[rope]",
    F.PACKED_ATTENTION: "test_packed.py::test_thirty_packs_replayed_from_one_capture[rope]",
    F.PACKED_QWEN3_VL: "test_between.py::test_up_to_its_loss_a_step_does_not_wait_and_equals_upstreams[packed]",
    F.BETWEEN: "test_between.py::test_up_to_its_loss_a_step_does_not_wait_and_equals_upstreams[padded]",
    F.CHECKS: "test_host_waits.py::test_verdicts_are_read_while_later_work_still_runs",
    F.COPIES: "test_batch_copies.py::test_batches_arrive_whole_while_the_gpu_computes[page-locked]",
    F.PACKED_HYBRIDS: "test_packed_mamba.py::test_thirty_packs_replayed_from_one_capture",
    **dict.fromkeys((F.PACKED_EXPERTS, F.EXPERTS_INSIDE), "test_captured_experts.py::test_replays_repeat_to_the_bit"),
    F.PACKED_FP8: "test_packed_fp8.py::test_steps_equal_eager[tensorwise-hybrid]",
}
SEVERAL_GPUS = {F.DEEPSTACK_GRADIENTS, F.PIPELINES}
# What a GPU adds nothing to.
ON_THE_CPU = {F.LOOPS, F.REPORTS, F.RECIPES, F.PERFORMANCE}


def test_the_first_gpu_tests_touch_every_feature(collected):
    assert FIRST.keys() | SEVERAL_GPUS | ON_THE_CPU == set(FEATURES)
    first = {each.nodeid.rpartition("/")[2] for each in collected if each.get_closest_marker("first")}
    assert set(FIRST.values()) <= first


TESTED = {module_of(path): path for path in Path(__file__).parents[1].glob("*/test_*.py")}


def test_listed_modules_are_there_once():
    from tests.gpu.parts import SECONDS

    assert set(SECONDS) <= set(MODULES)
    assert set(LONGEST) <= TESTED.keys() and len(set(LONGEST)) == len(LONGEST)


def test_what_nothing_wrote_is_nan_after_a_replay():
    with Tape() as tape:
        out = torch.empty(4)
        out[:2].fill_(1.0)
        like = torch.empty_like(out).copy_(torch.zeros(4))
    tape.replay()
    assert out[:2].tolist() == [1.0, 1.0] and out[2:].isnan().all()
    assert like.tolist() == [0.0] * 4
