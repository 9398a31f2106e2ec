"""A configuration is refused for broken seams of the features that it asks for, and for no others."""

import dataclasses
import functools
import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

import bridge_cg_plugin
from bridge_cg_plugin import plugin
from bridge_cg_plugin.announce import SAID
from bridge_cg_plugin.cli import doctor
from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.upstream.hooks import training_config
from bridge_cg_plugin.upstream.hooks.training_config import check_training_config
from bridge_cg_plugin.upstream.seams import states
from bridge_cg_plugin.upstream.seams.patches import DriftError, arguments_of, bridge_release, core_release
from bridge_cg_plugin.upstream.seams.registry import SEAMS, seam
from bridge_cg_plugin.upstream.seams.registry.bridge import LANGUAGE_MODELS, PROVIDERS, TRAIN
from bridge_cg_plugin.upstream.seams.seam import Feature as F
from bridge_cg_plugin.upstream.seams.source_reader import SourceReader
from bridge_cg_plugin.upstream.seams.states import FEATURES, broken_seams, seam_states

from .conftest import is_importable

MODULES = {provider: module for module, provider, *_ in (*PROVIDERS, *LANGUAGE_MODELS)}
QWEN3_VL, QWEN35_VL, QWEN25_VL = "Qwen3VLModelProvider", "Qwen35VLModelProvider", "Qwen25VLModelProvider"
GEMMA3, GLM45V, MINISTRAL3 = "Gemma3VLModelProvider", "GLM45VModelProvider", "Ministral3ModelProvider"
QWEN25_OMNI, QWEN3_OMNI = "Qwen25OmniModelProvider", "Qwen3OmniModelProvider"
NEMOTRON_VL, NEMOTRON_OMNI = "NemotronVLModelProvider", "NemotronOmniModelProvider"
GPT, MAMBA = "GPTModelProvider", "MambaModelProvider"
VISION = {"vision_cuda_graph_impl": "transformer_engine"}
EXACT = {**VISION, "vision_cuda_graph_kernels": "exact"}
PACKED = {"cuda_graph_impl": "transformer_engine", "cuda_graph_max_packed_seqs": 16}
LANGUAGE_MODEL = {"cuda_graph_impl": "transformer_engine"}
SUMS = {"vision_deepstack_gradient_allreduce": True, "tensor_model_parallel_size": 2, "sequence_parallel": True}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
QWEN3_VISION = {F.OPTIONS, F.VISION, F.VISION_QWEN3_VL}
ANY_PACKED = {F.OPTIONS, F.PACKED}
# Configuration -> provider, its fields, the features that these ask for.
CONFIGURATIONS = {
    "vision graphs of Qwen3-VL": (QWEN3_VL, VISION, QWEN3_VISION),
    "with exact kernels": (QWEN3_VL, EXACT, QWEN3_VISION),
    "that offload": (QWEN3_VL, {**EXACT, "vision_cuda_graph_offload": ["mlp"]}, {*QWEN3_VISION, F.OFFLOAD_IN_GRAPHS}),
    "in an interleaved pipeline": (QWEN3_VL, {**EXACT, **INTERLEAVED}, {*QWEN3_VISION, F.PIPELINES}),
    "beside graphs of the language model": (
        QWEN3_VL,
        {**EXACT, **LANGUAGE_MODEL},
        {*QWEN3_VISION, F.LANGUAGE_MODEL, F.MULTIMODAL_ROTARY},
    ),
    "sums of deepstack gradients alone": (QWEN3_VL, SUMS, {F.DEEPSTACK_GRADIENTS}),
    "such sums without sequence parallelism": (QWEN3_VL, {**SUMS, "sequence_parallel": False}, set()),
    "such sums in an interleaved pipeline": (QWEN3_VL, {**SUMS, **INTERLEAVED}, {F.DEEPSTACK_GRADIENTS}),
    "vision graphs of Qwen3.5-VL": (QWEN35_VL, EXACT, QWEN3_VISION),
    **{
        f"vision graphs of {name}": (provider, VISION, {F.OPTIONS, F.VISION, f"vision graphs of {name}"})
        for name, provider in (
            *(("Qwen2.5-VL", QWEN25_VL), ("Gemma 3", GEMMA3), ("GLM-4.5V", GLM45V), ("Qwen2.5-Omni", QWEN25_OMNI)),
            *(("Ministral 3", MINISTRAL3), ("Nemotron VL", NEMOTRON_VL), ("Nemotron Omni", NEMOTRON_OMNI)),
        )
    },
    "vision graphs of Qwen3-Omni": (
        QWEN3_OMNI,
        VISION,
        {F.OPTIONS, F.VISION, "vision graphs of Qwen3-Omni", "audio graphs of Qwen3-Omni"},
    ),
    "language-model graphs of Qwen3-VL": (QWEN3_VL, LANGUAGE_MODEL, {F.LANGUAGE_MODEL, F.MULTIMODAL_ROTARY}),
    "language-model graphs of MLPs": (QWEN3_VL, {**LANGUAGE_MODEL, "cuda_graph_modules": ["mlp"]}, {F.LANGUAGE_MODEL}),
    "language-model graphs of a GPT model": (GPT, LANGUAGE_MODEL, {F.LANGUAGE_MODEL}),
    "full iteration": (QWEN3_VL, {"cuda_graph_impl": "full_iteration"}, {F.FULL_ITERATION}),
    "full iteration of a GPT model": (GPT, {"cuda_graph_impl": "full_iteration"}, set()),
    "packs of a GPT model": (GPT, PACKED, {*ANY_PACKED, F.PACKED_ATTENTION}),
    "packs with experts": (
        GPT,
        {**PACKED, "cuda_graph_modules": ["attn", "moe_router"], "num_moe_experts": 8},
        {*ANY_PACKED, F.PACKED_ATTENTION, F.PACKED_EXPERTS},
    ),
    "packs with experts inside": (
        GPT,
        {**PACKED, "num_moe_experts": 8, "add_bias_linear": False},
        {*ANY_PACKED, F.PACKED_ATTENTION, F.PACKED_EXPERTS, F.EXPERTS_INSIDE},
    ),
    "packs in fp8": (
        GPT,
        {
            **{**PACKED, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
            **{"normalization": "RMSNorm", "add_bias_linear": False},
        },
        {*ANY_PACKED, F.PACKED_ATTENTION, F.PACKED_FP8},
    ),
    "packs of Qwen3-VL": (QWEN3_VL, PACKED, {*ANY_PACKED, F.PACKED_QWEN3_VL}),
    "packs of a hybrid": (
        MAMBA,
        {**PACKED, "hybrid_layer_pattern": "M*-M", "num_layers": 4},
        {*ANY_PACKED, F.PACKED_HYBRIDS},
    ),
    "no graphs": (QWEN3_VL, {}, set()),
}
OLDER_NAMES = {"cuda_graph_modules": "cuda_graph_scope", "hybrid_layer_pattern": "hybrid_override_pattern"}
SIZES = {"num_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
ASKED_BY_NONE = {F.BETWEEN, F.CHECKS, F.COPIES, F.LOOPS, F.REPORTS, F.RECIPES, F.PERFORMANCE}


@functools.cache
def provider(name):
    return getattr(importlib.import_module(MODULES[name]), name)


def config_of(name, **fields):
    """Return as much of a configuration as the check reads, for a provider of the installed release."""
    known = {field.name for field in dataclasses.fields(provider(name))}
    for new, old in OLDER_NAMES.items():
        if new in fields and new not in known:
            fields[old] = fields.pop(new)
    settings = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_te_rng_tracker": True, **SIZES, **fields}
    model = provider(name)(**settings)
    packed = "cuda_graph_max_packed_seqs" in fields
    return SimpleNamespace(
        model=model,
        dataset=SimpleNamespace(enable_in_batch_packing=packed),
        rng=SimpleNamespace(te_rng_tracker=True),
        rerun_state_machine=SimpleNamespace(check_for_nan_in_loss=False),
        ddp=None,
    )


@pytest.fixture
def configs(active, monkeypatch):
    release = bridge_release()
    return {
        label: config_of(name, **fields)
        for label, (name, fields, _) in CONFIGURATIONS.items()
        if seam(f"{name}.init").expected_in(release)
    }


def refused(config):
    try:
        check_training_config(config)
    except DriftError as error:
        return str(error)
    return ""


def test_the_configurations_ask_for_every_feature(configs):
    assert {f for _, _, asked in CONFIGURATIONS.values() for f in asked} == set(FEATURES) - ASKED_BY_NONE
    assert [label for label, config in configs.items() if refused(config)] == []


# One seam of each kind of thing, and of what the plugin does with it.
SORTS = {(s.kind, s.touch, bool(s.formerly), s.since, s.packaged): s for s in SEAMS}


@pytest.mark.parametrize("broken", SORTS.values(), ids=lambda s: s.name)
def test_a_broken_seam_is_found(active, broken, break_seam):
    if is_importable(broken) and broken.expected_in(bridge_release()):
        break_seam(broken)
    if broken.name not in broken_seams():  # not in this release, or it needs nothing there
        there, reason = broken.expected_in(bridge_release()) and broken.packaged, seam_states()[broken.name].reason
        assert not there or "came with" in reason or "needs no patch" in reason


# One seam of each kind that configurations can tell apart.
KINDS = {(frozenset(s.features), frozenset(s.models), bool(s.instead)): s for s in SEAMS}


@pytest.mark.parametrize("broken", KINDS.values(), ids=lambda s: s.name)
def test_a_broken_seam_refuses_those_that_use_its_features(configs, broken, monkeypatch):
    monkeypatch.setattr(training_config, "broken_seams", lambda: {broken.name: "it is gone"})
    for label in configs:
        model, _, asked = CONFIGURATIONS[label]
        uses = set(broken.features) & asked and (not broken.models or model in broken.models) and not broken.instead
        reason = refused(configs[label])
        assert bool(reason) == bool(uses), (label, reason)
        if uses:
            assert f"{broken.name}: " in reason and f"megatron-bridge {bridge_release()}" in reason
            assert any(f"needs {feature}" in reason for feature in set(broken.features) & asked)
            assert "Set " in reason and "version table" in reason


@pytest.mark.parametrize("name", ["recipe_names", "Gemma3VLModelProvider.init"])
def test_seams_of_other_features_leave_vision_graphs_alone(configs, monkeypatch, caplog, name):
    SAID.clear()
    monkeypatch.setattr(training_config, "broken_seams", lambda: {name: "it moved"})
    for _ in range(2):
        check_training_config(configs["vision graphs of Qwen3-VL"])
    (said,) = [r.getMessage() for r in caplog.records if name in r.getMessage()]
    assert f"megatron-bridge {bridge_release()} with megatron-core {core_release()} is used as far as it fits" in said
    assert f"without: seam {name} (" in said and "`bridge-cg audit`" in said
    assert all(feature in said for feature in seam(name).features)


@pytest.mark.parametrize("release", ["bridge_release", "core_release"])
def test_a_release_that_nobody_tested_is_said_once(configs, monkeypatch, caplog, release):
    SAID.clear()
    monkeypatch.setattr(training_config, "broken_seams", dict)
    monkeypatch.setattr(training_config, release, lambda: "0.77.0")
    for _ in range(2):
        check_training_config(configs["vision graphs of Qwen3-VL"])
    (said,) = [r.getMessage() for r in caplog.records if "0.77.0" in r.getMessage()]
    assert "not in the version table" in said and "without: nothing" in said and "`bridge-cg audit`" in said


@pytest.mark.parametrize("name", ["config_sections", "config_check"])
def test_upstreams_own_graphs_train_where_the_plugins_check_does_not_fit(configs, monkeypatch, name):
    """Expected by labels: what the registry says of these seams is not asked."""
    monkeypatch.setattr(training_config, "broken_seams", lambda: {name: "it moved"})
    for label, config in configs.items():
        if label.startswith("language-model graphs"):
            assert refused(config) == "", label
        if label.startswith(("vision graphs", "packs", "offloading")) or label == "full iteration":
            assert f"{name}: it moved" in refused(config), label


# Replacements


def arguments_of_step(**given):
    """Return the arguments of Bridge's `train_step` as the train loop passes them: by their places."""
    return [given.get(name, name) for name in SourceReader().find(seam("train_step")).parameters]


@pytest.fixture
def wrapped(active, monkeypatch):
    """Return a function that wraps Bridge's `train_step` as somebody else does, without saying what is below."""
    module, calls = active[TRAIN], []

    def wrap():
        before = module.train_step

        def theirs(*args, **kwargs):
            calls.append(args)
            return before(*args, **kwargs)

        monkeypatch.setattr(module, "train_step", theirs)
        return calls

    yield wrap
    bridge_cg_plugin.deactivate()
    monkeypatch.undo()
    bridge_cg_plugin.activate()


def test_a_wrapper_put_in_place_after_the_plugin_is_wrapped_before_training(active, wrapped):
    """Not even `activate()` is called: checking the configuration does it."""
    calls = wrapped()
    assert plugin.status()["patches"]["train_step"]["state"] == "broken"
    check_training_config(config_of(QWEN3_VL, **VISION))
    assert plugin.status()["patches"]["train_step"]["state"] == "active" and calls == []


def test_a_replacement_that_drops_an_argument_is_drift(active, monkeypatch):
    monkeypatch.setattr(active[TRAIN], "train_step", lambda step, data, model: None)
    with pytest.raises(DriftError, match="train_step: .*no longer takes global_state"):
        check_training_config(config_of(QWEN3_VL, **VISION))


def test_code_that_a_patched_function_must_contain_is_compared_too(configs, monkeypatch):
    """A patch looks at the signature of the live function alone."""
    lost = replace(seam("full_iteration"), uses=("self.something_of_old(",))
    real = states.installed_state
    found = states.compare(lost, SourceReader(), bridge_release())
    monkeypatch.setattr(states, "installed_state", lambda name, _: found if name == lost.name else real(name, _))
    assert "no longer contains self.something_of_old(" in refused(configs["full iteration"])
    assert refused(configs["vision graphs of Qwen3-VL"]) == ""


def test_arguments_are_found_by_place_and_name():
    entry = seam("train_step")

    def named(model, *, global_state):
        pass

    def partly(step, *rest, **named):
        pass

    assert arguments_of(entry, named)("global_state", ("m",), {"global_state": 3}) == 3
    assert arguments_of(entry, named)("global_state", ("m", 4), {}) is None
    find, taken = arguments_of(entry, partly), arguments_of_step()
    assert find("global_state", tuple(taken), {}) == "global_state" and find("model", tuple(taken), {}) == "model"
    assert find("global_state", tuple(taken[:2]), {"global_state": 5}) == 5 and find("model", (), {}) is None


# What `bridge-cg doctor` and warnings say of features whose seams are broken

quick = pytest.mark.usefixtures("libraries_that_import")


@quick
def test_doctor_shows_each_feature(active, break_seam, capsys):
    found = doctor.diagnose(wants_gpu=False)
    assert {name: f["state"] for name, f in found.features.items()} == dict.fromkeys(map(str, FEATURES), "ready")
    break_seam(seam("siglip_forward"))
    assert main(["doctor", "--no-gpu", "--details"]) == 1
    out = capsys.readouterr().out
    assert "not available vision graphs of Gemma 3: seam siglip_forward" in out
    assert "ready         vision graphs of Qwen2.5-VL" in out
    assert out.index("features\n") < out.index("seams\n")
    assert (
        "not available: vision graphs of Gemma 3. Runs that ask for one of these are refused, others train"
        in " ".join(out.split())
    )


@quick
def test_messages_name_the_models_that_a_seam_concerns(active, break_seam, caplog):
    """A run of another model does ask for the feature."""
    SAID.clear()
    break_seam(seam("Gemma3VLModelProvider.init"))
    check_training_config(config_of("Qwen3VLModelProvider", vision_cuda_graph_impl="transformer_engine"))
    concerned = "options of a model's provider (for Gemma3VLModelProvider)"
    assert f"seam Gemma3VLModelProvider.init ({concerned})" in caplog.text
    (problem,) = doctor.diagnose(wants_gpu=False).problems
    assert problem.remedy.startswith(f"not available: {concerned}. Runs that ask for one of these are refused")
