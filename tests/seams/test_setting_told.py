"""What training says at its start: what is on graphs, what not and why, also with the plugin off or a word misspelt."""

import gc
import logging
import weakref
from dataclasses import dataclass

import pytest
import torch
import transformers
from megatron.bridge.training.utils.log_utils import setup_logging
from torch import nn

from bridge_cg_plugin.announce import Told, warn
from bridge_cg_plugin.upstream.hooks import any_loop
from bridge_cg_plugin.upstream.hooks.training_config import check_training_config
from tests.scripts import forked

from .loops import Policy, call
from .test_features import QWEN3_VL, config_of

GRAPHS = {"vision_cuda_graph_impl": "transformer_engine"}
BRIDGES = [
    ({}, "graphs: none, all eager (no option asks for any)"),
    ({"cuda_graphs": "off"}, "cuda_graphs: all: eager (cuda_graphs=off)"),
    (
        GRAPHS,
        "graphs: vision encoder: one graph per bucket over the whole encoder; "
        "language model: eager (cuda_graph_impl=none)",
    ),
]


@pytest.mark.parametrize(("fields", "line"), BRIDGES)
def test_bridges_validation_says_in_one_line_what_is_on_graphs(active, capsys, fields, line):
    config = config_of(QWEN3_VL, **fields)
    for _ in range(2):
        check_training_config(config)
    assert capsys.readouterr().out == f"[bridge-cg] {line}\n"


LOOPS = [
    ({"vision_cuda_graph_impl": "none"}, "graphs: none, all eager (no option asks for any)"),
    (GRAPHS, "graphs: vision encoder: one graph per bucket over the whole encoder"),
    (
        {"vision_cuda_graph_impl": "none", "cuda_graph_impl": "full_iteration"},
        "graphs: vision encoder: eager (vision_cuda_graph_impl=none); "
        "language model: eager (cuda_graph_impl=full_iteration: only train steps of Bridge's loop drive such graphs)",
    ),
]


@pytest.mark.parametrize(("fields", "line"), LOOPS)
def test_another_loops_first_step_says_it(loop, capsys, fields, line):
    model = Policy(**fields)
    for seed in range(2):
        call(model, 1, seed=seed)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"[bridge-cg] {line}" and not any("graphs:" in each for each in others if "eager" in each)


def test_bridges_evaluation_without_train_steps_names_these_as_what_is_missing(loop, capsys):
    """As `validation.skip_train` has it: what training has on graphs was told, and evaluation captures the encoder."""
    config = config_of(QWEN3_VL, **GRAPHS, cuda_graph_impl="full_iteration")
    check_training_config(config)
    model = Policy()
    model.config = config.model
    for seed in range(2):
        with torch.no_grad():
            call(model.eval(), 1, forward_only=True, seed=seed)
    before, now = (line for line in capsys.readouterr().out.splitlines() if line.startswith("[bridge-cg] graphs: "))
    assert "language model: eager" not in before
    assert "vision encoder: one graph" in now and "only train steps of Bridge's loop drive such graphs" in now


def misspelt_in_bridge():
    config = config_of(QWEN3_VL)
    config.model.cuda_grphs = "exact"
    check_training_config(config)


def misspelt_in_a_loop():
    call(Policy(vision_cuda_graph_impl="none", cuda_grphs="exact"), 1)


@pytest.mark.parametrize("start", [misspelt_in_bridge, misspelt_in_a_loop])
def test_a_misspelt_field_is_named_with_the_one_that_was_meant(loop, caplog, start):
    start()
    (said,) = (entry.getMessage() for entry in caplog.records if "cuda_grphs" in entry.getMessage())
    assert "Did you mean cuda_graphs?" in said


IN_BRIDGE = """
from types import SimpleNamespace
from megatron.bridge.training.config import ConfigContainer
for _ in range(2):
    try:
        ConfigContainer.validate(SimpleNamespace(model=model))
    except AttributeError:
        pass
"""
IN_A_LOOP = """
from types import SimpleNamespace
from torch import nn
from megatron.core.pipeline_parallel import schedules
chunk = nn.Module()
chunk.config = model
for _ in range(2):
    try:
        schedules.forward_backward_no_pipelining(
            forward_step_func=None, data_iterator=None, model=chunk, num_microbatches=1, seq_length=1,
            micro_batch_size=1,
        )
    except Exception:
        pass
"""


@pytest.mark.parametrize("route", [IN_BRIDGE, IN_A_LOOP], ids=["bridge", "loop"])
@pytest.mark.parametrize(
    ("fields", "words", "said"),
    [
        ("cuda_graphs='exact'", "", "Asked: cuda_graphs=exact"),
        ("", "cuda_graphs=exact", "Asked: BRIDGE_CG_OPTIONS=cuda_graphs=exact"),
        ("cuda_graph_impl='none', vision_cuda_graph_impl='none'", "", ""),
    ],
)
def test_with_the_plugin_off_a_model_that_asks_for_graphs_is_told(monkeypatch, route, fields, words, said):
    monkeypatch.setenv(any_loop.OPTIONS, words)
    monkeypatch.setenv("BRIDGE_CG_PLUGIN", "0")
    out = forked(f"from types import SimpleNamespace\nmodel = SimpleNamespace({fields}){route}")
    lines = [line for line in out.splitlines() if line.startswith("[bridge-cg]")]
    assert len(lines) == bool(said) and all("BRIDGE_CG_PLUGIN=0" in line and said in line for line in lines)


def test_with_the_plugin_off_the_status_names_what_is_wrapped():
    forked(
        "import bridge_cg_plugin\nfrom megatron.core.pipeline_parallel import schedules\n"
        "found = bridge_cg_plugin.status()\nassert not found['active']\n"
        "wrapped = [one for one in found['patches'].values() if one['state'] == 'active']\n"
        "assert len(wrapped) == 4 and all('is off' in one['purpose'] for one in wrapped)\n"
        "bridge_cg_plugin.activate()\nwrapped = bridge_cg_plugin.status()['patches']\n"
        "assert wrapped and not any('is off' in one['purpose'] for one in wrapped.values())\n"
    )


@dataclass(frozen=True, slots=True)
class Foreign:
    """The config of a model that has nothing of Megatron's."""

    hidden_size: int = 8


def test_a_model_that_asks_for_nothing_is_left_as_it_is(active):
    chunk = nn.Module()
    chunk.config = Foreign()
    assert any_loop.Loops().driver_of(chunk, 1) is None
    chunk.config = transformers.PretrainedConfig()
    before = chunk.config.to_dict()
    assert any_loop.Loops().driver_of(chunk, 1) is None and chunk.config.to_dict() == before


def test_what_was_said_keeps_no_config_alive():
    told, config = Told(), transformers.PretrainedConfig()
    assert told.is_new(config, "a") and not told.is_new(config, "a") and told.is_new(config, "b")
    gone = weakref.ref(config)
    del config
    gc.collect()
    assert gone() is None


@pytest.fixture
def bridges_logging():
    """Bridge's logging with its defaults, which drop what any logger reports as a warning."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    before = [(logger, list(logger.filters), logger.level) for logger in loggers]
    setup_logging()
    yield
    for logger, filters, level in before:
        logger.filters[:] = filters
        logger.setLevel(level)


def test_bridge_does_not_drop_warnings_of_the_plugin(bridges_logging, caplog):
    logging.getLogger("bridge_cg_plugin").warning("dropped")
    warn("the encoder runs eager")
    assert [record.getMessage() for record in caplog.records] == ["[rank 0] the encoder runs eager"]
