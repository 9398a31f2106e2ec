"""Packed documents over several ranks: tensor, context and expert parallelism, against eager on the same ranks."""

from contextlib import ExitStack

import pytest
import torch

from examples.photographs.processes import TrainingFailed, TrainingProcess

from .test_delta_nets import ROUNDED
from .test_packed_mamba import MISSING

# Of `packed_ranks`: ranks share layers, documents, layers and the tokens between them, or experts.
LAYOUTS = ("TP2", "CP2", "TP2_sequence", "CP2_a2a", "CP2_images", "EP2", "EP4", "TP2_delta_nets")
FAULTS = ("TP2_fault", "EP2_fault")
HYBRIDS = () if MISSING else ("TP2_mamba", "CP2_mamba")
# Seconds that a layout's processes have; they wait for each other, and one that hangs must not keep the others. A
# hybrid's compile mamba-ssm's kernels, as do gated delta nets', and experts are compared with fp32.
LIMIT_S, LONG_LIMIT_S = 60.0, 140.0
LONG = (*HYBRIDS, "EP2", "EP4", "TP2_delta_nets")
# How much farther from fp32 than eager a model may be whose experts are in the graph; as on one GPU.
FARTHER = 1.05
FAULTY_STEPS = 4


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Return what each layout's processes found, or their error: all import at once, then run one after the other."""
    log, found = tmp_path_factory.mktemp("layouts"), {}
    with ExitStack() as stack:
        processes = {}
        for name in (*LAYOUTS, *HYBRIDS, *FAULTS):
            ranks, gpus = 4 if name == "EP4" else 2, range(min(2, torch.cuda.device_count()))
            processes[name] = TrainingProcess(log / f"{name}.log", ranks, gpus, module="tests.gpu.packed_ranks")
            stack.callback(processes[name].close)
        for name, process in processes.items():
            try:
                process.wait_until_ready()
                limit = LONG_LIMIT_S if name in LONG else LIMIT_S
                found[name] = process.train("graphs", ["--layout", name], limit)
            except TrainingFailed as error:
                found[name] = error
    return found


@pytest.mark.parametrize("name", [*LAYOUTS, *HYBRIDS])
def test_ranks_replay_together_and_equal_eager(layouts, name):
    found = layouts[name]
    if isinstance(found, TrainingFailed):
        raise found
    first, *others = found["ranks"]
    # With bounds a pack may find too little room, on all ranks together.
    overflows = first["fallbacks"].pop("experts_overflow", 0) if name == "EP4" else 0
    assert overflows <= len(first["far"]) / 2
    assert first["fallbacks"] == dict.fromkeys(first["beyond"], 1)
    assert first["replays"] == len(first["far"]) + 1 - overflows
    for other in others:
        assert other["replays"] == first["replays"]
        assert other["fallbacks"] == first["fallbacks"] | ({"experts_overflow": overflows} if overflows else {})
    for rank in (first, *others):
        if name == "TP2_delta_nets":  # but for the sum of a convolution's weight gradient
            assert all(losses == 0 and worst <= ROUNDED for losses, worst in rank["far"].values()), rank["far"]
        elif name not in ("EP2", "EP4"):  # losses and the worst gradient, to the bit
            assert all(far == [0.0, 0.0] for far in rank["far"].values()), rank["far"]
        else:
            print(f"from fp32, losses and gradients: {rank['from_fp32']}; {overflows} overflows")
            pairs = zip(rank["from_fp32"]["graphs"], rank["from_fp32"]["eager"], strict=True)
            assert len(rank["far"]) == 30 and all(graphs <= FARTHER * eager for graphs, eager in pairs)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_makes_all_eager(layouts, name):
    found = layouts[name]
    if isinstance(found, TrainingFailed):
        raise found
    eager = {"disproved": ["packed_decoder"], "fallbacks": {"differs_from_eager": FAULTY_STEPS}}
    assert found["ranks"] == [eager] * 2
