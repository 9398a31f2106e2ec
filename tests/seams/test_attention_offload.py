"""Attention of Qwen3-VL's language model under megatron-core's offloading: the groups of its own attention."""

import pytest
import torch

import bridge_cg_plugin
from bridge_cg_plugin.upstream.decoder import core_offload as language_offload

MODULES = ["qkv_linear", "core_attn", "attn_proj"]


class Noting:
    """Notes what is offloaded, and when."""

    log: list = []
    inside: list = []

    def __init__(self, offload, tensor, name):
        self.offload, self.tensor, self.name = offload, tensor, name

    def __enter__(self):
        if self.offload:
            self.tensor = self.tensor.view_as(self.tensor)
            Noting.log.append(("begins", self.name, tuple(self.tensor.shape)))
            Noting.inside.append(self.name)
        return self.tensor

    def __exit__(self, *args):
        if self.offload:
            Noting.log.append(("ends", Noting.inside.pop()))

    @staticmethod
    def commit(made, name, released):
        Noting.log.append(("leaves", name, [tuple(tensor.shape) for tensor in released]))
        return made


class Groups(Noting):
    """Stands in for megatron-core's interface."""

    def group_offload(self, made, forced_released_tensors=None, delay_offload=False):
        return self.commit(made, self.name, forced_released_tensors) if self.offload else made


class OlderGroups(Noting):
    """Stands in for it before megatron-core 0.19."""

    @staticmethod
    def group_commit(made, name, forced_released_tensors=None, delay_offload=False):
        return Noting.commit(made, name, forced_released_tensors)


@pytest.fixture
def groups(active, monkeypatch):
    """Put the stand-in of the installed generation in; returns its log."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading
    from megatron.core.transformer import attention

    own = offloading.FineGrainedActivationOffloadingInterface
    kind = Groups if hasattr(own, "group_offload") else OlderGroups
    monkeypatch.setattr(offloading, own.__name__, kind)
    monkeypatch.setattr(attention, "off_interface", kind)
    monkeypatch.setattr(Noting, "log", [])
    monkeypatch.setattr(Noting, "inside", [])
    return Noting


def built(make, modules, **config):
    """Return a model of one layer that offloads modules of its attention."""
    told = {"fine_grained_activation_offloading": True, "offload_modules": modules}
    model = make(layers=1, **told, **config)
    model.preprocess_for_fine_grained_offloading = lambda: None
    return model


def run(model, groups, **changes):
    """Return what a microbatch gives and what it told offloading."""
    from tests.unit.packs import losses_and_gradients, pack, with_images

    del groups.log[:]
    arguments = {**pack((10, 6)), **changes}
    found = losses_and_gradients(model, with_images(arguments, features=0) if is_qwen(model) else arguments)
    return found, list(groups.log)


def is_qwen(model) -> bool:
    return model.position_embedding_type == "mrope"


@pytest.mark.parametrize("modules", [MODULES, ["qkv_linear"], ["core_attn", "attn_proj"], ["core_attn"]], ids=",".join)
def test_groups_are_those_of_megatron_cores_own_attention(groups, modules):
    from tests.unit.packs import new_model, new_qwen

    _, expected = run(built(new_model, modules), groups)
    model = built(new_qwen, modules)
    found, told = run(model, groups)
    assert told == expected and [name for what, name, *_ in told if what == "begins"] == modules
    bridge_cg_plugin.deactivate()
    released, nothing = run(model, groups)
    assert not nothing
    assert torch.equal(found[0], released[0]) and all(map(torch.equal, found[1], released[1]))


def test_in_evaluation_core_attention_stays(groups):
    from tests.unit.packs import new_model, new_qwen

    models = [built(make, MODULES) for make in (new_model, new_qwen)]
    expected, told = (run(model.eval(), groups)[1] for model in models)
    assert told == expected and "core_attn" not in str(told)


def test_attention_outside_of_a_language_model_is_left_alone(groups):
    """An encoder has the same class, and nothing that notifies offloading of its microbatches."""
    from tests.unit.packs import new_qwen

    attention = built(new_qwen, MODULES).decoder.layers[0].self_attention
    attention(torch.randn(4, 1, 32), None)
    assert not groups.log


def test_after_a_microbatch_nothing_is_left_on_the_modules(groups):
    from tests.unit.packs import new_qwen

    model = built(new_qwen, MODULES)
    run(model, groups)
    attention = model.decoder.layers[0].self_attention
    assert not {"forward", "get_query_key_value_tensors"} & set(vars(attention))
    assert not any("forward" in vars(module) for module in (attention.core_attention, attention.linear_proj))


def test_a_release_that_has_the_groups_is_left_alone():
    def own(self, hidden_states):
        return off_interface(True, hidden_states, "qkv_linear")  # noqa: F821

    assert not language_offload._groups_nothing(own)
    assert language_offload._groups_nothing(run)
