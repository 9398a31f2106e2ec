"""What puts a model of any loop on graphs: `enable` and the environment, each with the options that it says."""

import pytest
import torch
from torch import nn

import bridge_cg_plugin
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks import any_loop
from bridge_cg_plugin.upstream.hooks.any_loop import LOOPS
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs

from ..unit import packs
from .loops import FIELDS, Policy, assert_equal, call

pytestmark = pytest.mark.usefixtures("loop")


def plain(**fields):
    """Return a model whose config knows nothing of the plugin."""
    model = Policy()
    for name in FIELDS:
        vars(model.config).pop(name, None)
    vars(model.config).update(cuda_graph_warmup_steps=1, **fields)
    return model


def test_options_are_keywords_too():
    model = plain()
    bridge_cg_plugin.enable(model, "vision_cuda_graph_strict=true", vision_cuda_graph_buckets=[64])
    assert (model.config.vision_cuda_graph_strict, list(model.config.vision_cuda_graph_buckets)) == (True, [64])
    bridge_cg_plugin.enable(model, cuda_graphs="exact")
    assert model.config.vision_cuda_graph_impl == "transformer_engine"
    with pytest.raises(OptionError, match="Did you mean cuda_graphs"):
        bridge_cg_plugin.enable(model, cuda_graph="exact")


def test_other_options_for_a_model_on_graphs_hold_from_its_next_call():
    model, eager, found = Policy(), Policy(vision_cuda_graph_impl="none"), []
    wrapper = nn.Module()
    wrapper.module = model  # as DDP holds it
    for option in ("buckets=32,128", "buckets=64,128", "buckets=64,128", "impl=none", "impl=transformer_engine"):
        bridge_cg_plugin.enable(wrapper, f"vision_cuda_graph_{option}")
        for seed in range(3):
            assert_equal(call(model, 2, seed=seed), call(eager, 2, seed=seed))
        found.append([(graphs.workload.options.buckets, graphs.step_number) for graphs in active_graphs()])
    assert found == [[((32, 128), 3)], [((64, 128), 3)], [((64, 128), 6)], [], [((64, 128), 3)]]


def test_what_a_model_was_told_wins_over_the_environment(monkeypatch, capsys):
    variable = "vision_cuda_graph_impl=transformer_engine vision_cuda_graph_buckets=32,64 cuda_graph_warmup_steps=2"
    monkeypatch.setenv("BRIDGE_CG_OPTIONS", variable)
    held, told, off = plain(vision_cuda_graph_buckets=[64, 128]), plain(), plain(vision_cuda_graph_buckets=[16])
    for model, option in ((told, "buckets=128"), (off, "impl=none")):
        wrapper = nn.Module()
        wrapper.module = model  # as DDP holds it
        bridge_cg_plugin.enable(wrapper, f"vision_cuda_graph_{option}")
    for model in (held, told, off):
        call(model, 1)
    assert [graphs.workload.options.buckets for graphs in active_graphs()] == [(64, 128), (128,)]
    assert capsys.readouterr().out.count("set already: vision_cuda_graph_buckets") == 2


class Other(Policy):
    """A model whose encoder is of another kind."""

    def __init__(self):
        super().__init__()
        self.vision_model = nn.Linear(2, 2)

    def forward(self, rows, seed):
        return self.vision_model(torch.ones(1, 2)).sum()


@pytest.mark.parametrize("options", ["", " cuda_graph_max_packed_seqs=4 cuda_graph_impl=transformer_engine"])
def test_a_model_without_what_graphs_know_runs_eager_and_says_so_once(monkeypatch, caplog, options):
    monkeypatch.setenv("BRIDGE_CG_OPTIONS", "vision_cuda_graph_impl=transformer_engine" + options)
    model = Other()
    for seed in range(3):
        losses, _ = call(model, 1, seed=seed)
        assert losses[0].isfinite()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "Other has no vision encoder" in said and ("and no decoder" in said) == bool(options)
    assert not active_graphs()


@pytest.mark.parametrize(
    "fields, encoder",
    [
        ({}, "the whole encoder"),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "the whole encoder"),
        ({"recompute_granularity": "full", "vision_cuda_graph_offload": ["attention"]}, "eager (model.recompute_gran"),
    ],
)
def test_the_one_setting_is_what_this_loop_can_have_in_one_line(capsys, fields, encoder):
    model, eager = plain(**fields), plain(**fields)
    bridge_cg_plugin.enable(model, "cuda_graphs=exact")
    found = [call(model, 2, seed=seed) for seed in range(3)]
    graphs = [graphs.captured and graphs.workload.options.kernels for graphs in active_graphs()]
    assert graphs == (["exact"] if encoder == "the whole encoder" else [])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "cuda_graphs=exact: " in line]
    assert f"vision encoder: {encoder}" in line
    assert "language model: eager (the model has no language model that graphs support)" in line
    for seed, each in enumerate(found):
        assert_equal(each, call(eager, 2, seed=seed))


@pytest.mark.parametrize("refused", [False, True])
def test_of_a_language_model_packs_are_what_a_loop_can_have(monkeypatch, capsys, caplog, refused):
    def refuse(*args, **kwargs):
        raise OptionError.because("layers", "Cannot use layers of this kind.")

    model = packs.new_model()
    bridge_cg_plugin.enable(model, "cuda_graphs=exact")
    said = capsys.readouterr().out
    assert "vision encoder: eager (the model has no vision encoder that graphs support)" in said
    assert "language model: all layers as one region over packed sequences" in said
    if refused:
        monkeypatch.setattr(any_loop, "decoder_helpers", refuse)
    driver = LOOPS.driver_of(model, 1)
    assert [graphs.model for graphs in driver.graphs] == ([] if refused else [model.decoder])
    expected = "[rank 0] cuda_graphs=exact: the language model runs eager. Cannot use layers of this kind."
    assert [record.getMessage() for record in caplog.records if "eager" in record.getMessage()] == [expected] * refused


@pytest.mark.parametrize("enabled", [True, False])
def test_a_model_that_was_built_without_graphs_is_called_as_one_built_with_them(enabled):
    model, arguments = packs.new_model(cuda_graph_impl="none"), packs.pack((5, 20, 4))
    if enabled:
        bridge_cg_plugin.enable(model, cuda_graphs="exact")
    else:
        vars(model.config).update(cuda_graph_impl="transformer_engine", cuda_graph_max_packed_seqs=4)
        assert LOOPS.driver_of(model, 1).graphs
    assert_equal(packs.losses_and_gradients(model, arguments), packs.losses_and_gradients(packs.new_model(), arguments))


@pytest.mark.parametrize("impl", ["full_iteration", "transformer_engine"])
def test_enable_refuses_graphs_that_bridges_loop_alone_drives(impl):
    model = plain()
    with pytest.raises(OptionError, match="in a loop other than Bridge's"):
        bridge_cg_plugin.enable(model, f"vision_cuda_graph_impl=transformer_engine cuda_graph_impl={impl}")
    bridge_cg_plugin.enable(model, "cuda_graph_impl=transformer_engine cuda_graph_max_packed_seqs=4")
