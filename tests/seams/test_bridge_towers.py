"""Bridge's own models around Hugging Face's towers: found, trained on graphs, driven by the train loop's steps."""

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.encoders.glm45v import GLM45V
from bridge_cg_plugin.upstream.encoders.pixtral import PIXTRAL
from bridge_cg_plugin.upstream.encoders.qwen3_omni import QWEN3_OMNI
from bridge_cg_plugin.upstream.encoders.qwen25_vl import QWEN25_OMNI, QWEN25_VL
from bridge_cg_plugin.upstream.encoders.registry import find_encoders
from bridge_cg_plugin.upstream.encoders.siglip import SIGLIP
from bridge_cg_plugin.upstream.hooks.helpers import constructors as helpers
from bridge_cg_plugin.upstream.hooks.helpers import graph_helper
from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_helper
from bridge_cg_plugin.upstream.seams.registry.bridge import TRAIN
from examples.photographs.small_tower import start_single_process

from ..unit import bridge_towers as towers
from ..unit.towers import DEFAULTS, assert_close, bridges_step, new_helper

IMAGES = [[(8, 8)], [(4, 6), (10, 8)], [], [(2, 2)]]
QWEN = (towers.build_qwen25_vl, towers.qwen25_sample, IMAGES, QWEN25_VL, "visual")
GLM = (towers.build_glm45v, towers.glm45v_sample, IMAGES, GLM45V, "visual")
OMNI_25 = (towers.build_qwen25_omni, towers.qwen25_omni_sample, IMAGES, QWEN25_OMNI, "thinker.visual")
OMNI_3 = (towers.build_qwen3_omni, towers.qwen3_omni_sample, IMAGES, QWEN3_OMNI, "thinker.visual")
# Upstream cannot divide the features of a single embedding.
MINISTRAL = (towers.build_ministral3, towers.ministral3_sample, [*IMAGES[:3], [(2, 4)]], PIXTRAL, "vision_tower")
GEMMA = (towers.build_gemma3_vl, towers.gemma3_sample, [1, 2, 0, 3], SIGLIP, "vision_tower")
BUCKETS = (64, 128, 192)

MODELS = [
    pytest.param(*QWEN, id="qwen2.5-vl"),
    pytest.param(*GEMMA, id="gemma3-vl"),
    pytest.param(*GLM, id="glm-4.5v"),
    pytest.param(*MINISTRAL, id="ministral-3"),
    pytest.param(*OMNI_25, id="qwen2.5-omni"),
    pytest.param(*OMNI_3, id="qwen3-omni"),
]
# Fields of a model that the train loop drives.
DRIVEN = {
    "vision_cuda_graph_buckets": list(BUCKETS),
    "vision_cuda_graph_exact_below": 0,
    "vision_cuda_graph_strict": True,
    "cuda_graph_warmup_steps": 1,
}
every_model = pytest.mark.parametrize(("build", "sample", "sizes", "family", "attribute"), MODELS)


@pytest.fixture(autouse=True)
def process(active):
    start_single_process()


def graphs_on(model, **options):
    """Return a helper whose graphs are captured."""
    helper = new_helper(find_encoders(model)[0].model, [model], **{"buckets": BUCKETS, **options})
    helper.create_cudagraphs()
    return helper


def results(model, samples):
    """Return the losses of all samples and the sum of their gradients by parameter."""
    model.zero_grad(set_to_none=True)
    losses = [towers.loss_of(model, sample) for sample in samples]
    torch.stack(losses).sum().backward()
    return [loss.detach() for loss in losses], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@every_model
@pytest.mark.parametrize("frozen", ["", "vision_model"])
def test_losses_and_gradients_are_eagers(build, sample, sizes, family, attribute, frozen):
    """Text-only microbatches among them never call the tower."""
    model = build(**({f"freeze_{frozen}": True} if frozen else {}))
    samples = [sample(size, seed) for seed, size in enumerate(sizes)]
    expected = results(model, samples)
    helper = graphs_on(model, buckets=BUCKETS[-1:], slots=4)
    found = results(model, samples)
    assert helper.graphs.statistics().replays == 3 and helper.graphs.statistics().fallbacks == {}
    helper.delete_cuda_graphs()
    assert_close(found[0], expected[0], 1e-6)
    # A pooling head, which Bridge 0.4's model has and does not use, gets zeros from a graph and nothing from eager.
    unused = found[1].keys() - expected[1].keys()
    assert all("head" in name and not found[1][name].any() for name in unused)
    # The gradient of a key's bias is zero but for rounding.
    names = [name for name, gradient in expected[1].items() if gradient.norm() > 1e-5]
    assert names
    assert_close([found[1][name] for name in names], [expected[1][name] for name in names], 2e-5)


@every_model
def test_steps_of_the_train_loop_drive_the_graphs(build, sample, sizes, family, attribute, monkeypatch):
    """Also on releases whose own loop drives Qwen3-VL's encoder: it does not know these."""
    monkeypatch.setattr(helpers, "default_executor", lambda *_, **__: ReferenceExecutor())
    model = build(**DRIVEN)
    chunks = [nn.Module()]
    chunks[0].module = model
    for _ in range(3):
        bridges_step(chunks, model.config, lambda: towers.loss_of(model, sample(sizes[0])).backward())
    (helper,) = (h for h in graph_helper.active_helpers() if h.graphs.model is model.get_submodule(attribute))
    statistics = helper.graphs.statistics()
    assert (statistics.warmup_microbatches, statistics.replays, statistics.fallbacks) == (1, 2, {})
    assert find_encoders([nn.Sequential(), model])[0].family is family
    for each in graph_helper.active_helpers():
        each.delete_cuda_graphs()


def test_bridges_train_loop_passes_a_model_without_a_vision_model(active):
    """Upstream's function says that it allows None and raises."""
    train = active[TRAIN]
    model, inner = nn.Module(), nn.Linear(1, 1)
    model.module = inner
    arguments = {"allow_none": True, "return_model_obj": True}
    assert train.get_attr_wrapped_model(model, "vision_model", **arguments) is None
    assert train.get_attr_wrapped_model(model, "weight") is inner.weight
    with pytest.raises(RuntimeError, match="nothing"):
        train.get_attr_wrapped_model(model, "nothing")
    inner.vision_model = None
    assert train.get_attr_wrapped_model(model, "vision_model", **arguments) is inner


# Frames of the audio clip and images of every microbatch.
HEARD = [(100, [(8, 8)]), (730, []), (None, [(4, 6)]), (411, [(2, 2)])]


def heard_samples():
    return [
        towers.qwen3_omni_sample(images, seed) if frames is None else towers.qwen3_omni_heard(frames, images, seed)
        for seed, (frames, images) in enumerate(HEARD)
    ]


@pytest.mark.parametrize("frozen", [False, True])
def test_losses_and_gradients_with_both_encoders_on_graphs_are_eagers(frozen):
    model, samples = towers.build_qwen3_omni(freeze_audio_model=frozen), heard_samples()
    expected = results(model, samples)
    vision = graphs_on(model, buckets=BUCKETS[-1:], slots=4)
    settings = {**DEFAULTS, "buckets": (16, 128), "slots": 4}
    audio = encoder_helper(
        [model],
        model.thinker.audio_model.config,
        options=VisionGraphOptions(**settings),
        executor=ReferenceExecutor(),
        found=find_encoders(model)[1],
    )
    audio.create_cudagraphs()
    found = results(model, samples)
    for helper in (vision, audio):
        statistics = helper.graphs.statistics()
        assert (statistics.replays, statistics.fallbacks) == (3, {})
        helper.delete_cuda_graphs()
    assert_close(found[0], expected[0], 1e-6)
    names = [name for name, gradient in expected[1].items() if gradient.norm() > 1e-5]
    assert frozen or any("audio_model.conv2d1" in name for name in names)
    assert_close([found[1][name] for name in names], [expected[1][name] for name in names], 2e-5)
