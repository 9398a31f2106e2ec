import pytest

import bridge_cg_plugin
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks import train_loop, training_config
from bridge_cg_plugin.upstream.hooks.training_config import check_training_config
from bridge_cg_plugin.upstream.seams.patches import DriftError
from bridge_cg_plugin.upstream.seams.registry.bridge import TRAIN


@pytest.fixture
def config(active):
    from examples.photographs import training

    return training.training_config(training.Run(impl="transformer_engine"))


def refused(config, field):
    with pytest.raises(OptionError) as caught:
        check_training_config(config)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_a_missing_random_state_tracker(config):
    config.model.use_te_rng_tracker = config.rng.te_rng_tracker = False
    refused(config, "rng.te_rng_tracker")


@pytest.mark.parametrize("section", ["ddp", "dist"])
def test_megatron_fsdp_wherever_bridge_reads_it(config, section):
    getattr(config, section).use_megatron_fsdp = True
    refused(config, "ddp.use_megatron_fsdp")


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: true"])
def test_expandable_segments_while_nccl_registers_graphs(config, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    refused(config, "NCCL_GRAPH_REGISTER")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    refused(config, "NCCL_GRAPH_REGISTER")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    check_training_config(config)


def test_nothing_is_checked_while_graphs_are_off(config, monkeypatch):
    config.model.vision_cuda_graph_impl = "none"
    config.model.use_te_rng_tracker = config.rng.te_rng_tracker = False
    config.ddp.use_megatron_fsdp = True
    config.model.recompute_granularity = "full"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    check_training_config(config)


def test_a_patch_that_failed_stops_training_with_vision_graphs_only(active, config, monkeypatch, caplog):
    patch = next(p for p in train_loop.PATCHES if p.name == "train_end")
    bridge_cg_plugin.deactivate()
    with monkeypatch.context() as changed:
        changed.setattr(patch, "make", lambda old: 1 / 0)
        bridge_cg_plugin.activate()
        assert f"could not patch {TRAIN}" in caplog.text
        with pytest.raises(DriftError, match="train_end: the plugin failed to replace"):
            check_training_config(config)
    config.model.vision_cuda_graph_impl = "none"
    check_training_config(config)


def language_model_graphs(config, impl="transformer_engine", **fields):
    config.model.vision_cuda_graph_impl = "none"
    for name, value in {"cuda_graph_impl": impl, **fields}.items():
        setattr(config.model, name, value)
    return config


def test_upstream_is_not_asked_about_what_the_plugin_refuses(config):
    language_model_graphs(config, variable_seq_lengths=True)
    with pytest.raises(OptionError):
        training_config._checked(lambda self: pytest.fail("upstream was called"))(config)


def test_parts_of_layers_stay_named_while_bridge_looks_at_recompute(config):
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    language_model_graphs(config, cuda_graph_max_packed_seqs=8, cuda_graph_modules=["attn"], **again)
    seen = []

    def validate(config):
        seen.append(config.model.cuda_graph_impl)
        config.model.cuda_graph_modules = []  # as Bridge does where graphs are off

    training_config._checked(validate)(config)
    assert seen == ["none"]
    assert (config.model.cuda_graph_impl, config.model.cuda_graph_modules) == ("transformer_engine", ["attn"])


def test_full_iteration_of_a_model_that_takes_images_in_fp8(config):
    config.rerun_state_machine.check_for_nan_in_loss = False
    language_model_graphs(config, "full_iteration", cuda_graph_modules=[])
    config.mixed_precision = "bf16_with_fp8_delayed_scaling_mixed"
    refused(config, "model.fp8")
    config.mixed_precision = "bf16_mixed"  # which Bridge sets on the model in place of its own
    config.model.fp8 = "hybrid"
    check_training_config(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"impl": "none", "cuda_graph_scope": ["mlp"]},
        {"impl": "none", "cuda_graph_scope": ["full_iteration"]},
        {"impl": "none", "cuda_graph_scope": "full"},
        {"cuda_graph_modules": ["attn", "mamba"]},
    ],
)
def test_what_upstream_runs_is_left_alone(config, fields):
    language_model_graphs(config, **fields)
    check_training_config(config)
    assert all(getattr(config.model, name) == value for name, value in fields.items() if name != "impl")
