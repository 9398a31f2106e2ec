"""What graphs are recorded by: streams of their own for those that offload, memory that all sizes share."""

import pytest
import torch

from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream import environment
from bridge_cg_plugin.upstream.hooks import graph_helper, helpers
from bridge_cg_plugin.upstream.hooks.helpers import PackedCudaGraphHelper, VisionTECudaGraphHelper

from ..executors import new_executor
from .packs import DEFAULTS as PACKED
from .packs import new_model
from .towers import DEFAULTS, new_tower


def keeping(asked):
    return lambda *args, replays_aside, **kwargs: asked.append(replays_aside) or new_executor()


CASES = {
    "with offloading": ({"offload": ("mlp",)}, True),
    "with a target": ({"offload_above_gb": 1.0}, True),
    "without either": ({}, False),
}


@pytest.mark.parametrize("options, aside", CASES.values(), ids=CASES)
def test_replays_of_what_offloads_are_aside(monkeypatch, options, aside):
    asked, model, packs = [], new_tower(), new_model()
    for helper in (helpers, helpers):
        monkeypatch.setattr(helper, "default_executor", keeping(asked))
    VisionTECudaGraphHelper(model, model.config, options=VisionGraphOptions(**DEFAULTS, **options)).delete_cuda_graphs()
    for name, value in {**PACKED, **{f"cuda_graph_packed_{name}": value for name, value in options.items()}}.items():
        setattr(packs.config, name, value)
    PackedCudaGraphHelper([packs], packs.config, num_microbatches=1).delete_cuda_graphs()
    assert asked == [aside] * 2


@pytest.mark.parametrize(
    "shared, register, arenas",
    [(False, None, True), (True, None, False), (True, "1", False), (True, "0", True)],
    ids=["one rank", "unset", "registered", "not registered"],
)
def test_graphs_with_exchanges_share_memory_where_nccl_registers_none(monkeypatch, capsys, shared, register, arenas):
    given = {}
    environment._say_once.cache_clear()
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if register is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(graph_helper, "CudaGraphExecutor", lambda **kwargs: given.update(kwargs))
    for _ in range(2):
        graph_helper.default_executor(shared=shared)
    assert given["arenas"] == arenas
    assert capsys.readouterr().out.count("NCCL_GRAPH_REGISTER=0") == (not arenas)
