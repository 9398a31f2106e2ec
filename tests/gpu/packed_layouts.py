"""Packed documents over several GPUs: the processes of each layout and what they find."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.photographs.processes import TrainingFailed, TrainingProcess

MODULE = "tests.gpu.packed_ranks"
# Of `packed_ranks`: two GPUs share layers, documents, or layers and the tokens between them.
LAYOUTS = ("TP2", "CP2", "TP2_sequence", "CP2_a2a", "CP2_images")
# Layouts of experts, and of hybrids, which need packages that are compiled.
EXPERTS = ("EP2",)
HYBRIDS = ("TP2_mamba", "CP2_mamba", "EP2_mamba")
GPUS = 2
REPEATS = 7
# Seconds that a layout's processes have; they wait for each other, and one that hangs must not keep the others. A
# hybrid's compile mamba-ssm's kernels, and experts are compared with fp32.
LIMIT_S, LONG_LIMIT_S = 90.0, 170.0
# How much farther from fp32 than eager a model may be whose experts are in the graph; as on one GPU.
FARTHER = 1.05
# What a rank counts where one of them cannot capture.
FAILED = {"capture_failed": 1}


def measured(layouts: Sequence[str], log: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Measure the layouts on the first GPUs, one after the other; yields what each found, or its error.

    Args:
        layouts: Their names.
        log: Folder for the processes' output.
    """
    with ExitStack() as stack:
        processes = {}
        for layout in dict.fromkeys(layouts):
            processes[layout] = TrainingProcess(log / f"{layout}.log", GPUS, range(GPUS), module=MODULE)
            stack.callback(processes[layout].close)
        for layout, process in processes.items():
            yield layout, measured_once(layout, process)


def measured_once(layout: str, process: TrainingProcess) -> dict[str, Any] | str:
    """Return what a layout's processes find, or their error."""
    limit = LONG_LIMIT_S if layout in (*HYBRIDS, *EXPERTS) else LIMIT_S
    try:
        process.wait_until_ready()
        return process.train("graphs", ["--layout", layout, "--repeats", str(REPEATS), "--fault"], limit)
    except TrainingFailed as error:
        return str(error)


def inexact(rank: dict[str, Any]) -> list[str]:
    """Return how a rank's graphs are farther from eager, or with experts inside them from fp32, than they may be."""
    if "from_fp32" not in rank:
        differ = {name: far for name, far in rank["far"].items() if far != [0.0, 0.0]}
        return [f"differs from eager (losses, worst gradient): {differ}"] if differ else []
    graphs, eager = rank["from_fp32"]["graphs"], rank["from_fp32"]["eager"]
    farther = any(not ours <= FARTHER * eagers for ours, eagers in zip(graphs, eager, strict=True))
    return [f"is from fp32 (losses, gradients): {graphs}, eager {eager}"] if farther else []
