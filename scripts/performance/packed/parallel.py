"""Packed documents over several GPUs: the processes of each layout, their records and what they miss."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from scripts.performance.measuring.machine import divide, keep_to
from scripts.performance.processes import TrainingFailed, TrainingProcess

MODULE = "scripts.performance.packed.ranks"
# Of `ranks`: two GPUs share layers, documents, or layers and the tokens between them.
LAYOUTS = ("TP2", "CP2", "TP2_sequence", "CP2_a2a", "CP2_images")
# Layouts of experts; of hybrids, which need packages that are compiled; and of four GPUs.
EXPERTS = ("EP2",)
HYBRIDS = ("TP2_mamba", "CP2_mamba", "EP2_mamba")
FOUR_GPUS = ("CP4_a2a_p2p",)
GPUS = 2
REPEATS = 7
# Seconds that a layout's processes have; they wait for each other, and one that hangs must not keep the others. A
# hybrid's compile mamba-ssm's kernels, and experts are compared with fp32.
LIMIT_S, LONG_LIMIT_S = 90.0, 170.0
# How much farther from fp32 than eager a model may be whose experts are in the graph; as on one GPU.
FARTHER = 1.05
# What a rank counts where one of them cannot capture.
FAILED = {"capture_failed": 1}


class Place(NamedTuple):
    """GPUs and what is measured on them in turn.

    Attributes:
        processes: Of each layout, by its name.
        cores: Of each rank while it is measured.
    """

    processes: dict[str, TrainingProcess]
    cores: Sequence[Sequence[int]]


@contextmanager
def started(layouts: Sequence[str], gpus: int, log: Path | None = None) -> Iterator[list[Place]]:
    """Start the processes of layouts, spread over as many GPUs as each needs; they import, and end with this context.

    Args:
        layouts: Their names.
        gpus: GPUs to use.
        log: Folder for the processes' output; without it, it goes to this process's.

    Raises:
        ValueError: There are fewer GPUs than a layout needs.
    """
    each = max(2 * GPUS if layout in FOUR_GPUS else GPUS for layout in layouts)
    if gpus < each:
        raise ValueError(
            f"Cannot use --gpus {gpus}: it must be {each} or more. Run it on a machine with that many NVIDIA GPUs."
        )
    groups = [tuple(range(first, first + each)) for first in range(0, gpus - gpus % each, each)]
    cores = divide(os.sched_getaffinity(0), gpus)
    places = [Place({}, cores.of_ranks(each, group)) for group in groups]
    with ExitStack() as stack:
        for number, layout in enumerate(dict.fromkeys(layouts)):
            file = None if log is None else log / f"{layout}.log"
            turn, ranks = number % len(groups), 2 * GPUS if layout in FOUR_GPUS else GPUS
            process = TrainingProcess(file, ranks, groups[turn][:ranks], module=MODULE)
            stack.callback(process.close)
            places[turn].processes[layout] = process
        yield places


def measured(places: Sequence[Place], words: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Measure the layouts, those of each place in turn; yields what each found, or its error, as it ends.

    Args:
        places: Where they are measured, side by side.
        words: Further words of the processes' command lines.
    """
    with ExitStack() as stack:
        turns: dict[Future[dict[str, Any] | str], str] = {}
        for place in places:
            in_turn = stack.enter_context(ThreadPoolExecutor(1))
            for layout, process in place.processes.items():
                turns[in_turn.submit(measured_once, layout, process, place.cores, words)] = layout
        for ended in as_completed(turns):
            yield turns[ended], ended.result()


def measured_once(
    layout: str, process: TrainingProcess, cores: Sequence[Sequence[int]], words: Sequence[str]
) -> dict[str, Any] | str:
    """Return what a layout's processes find, on cores of their own, or their error."""
    try:
        process.wait_until_ready()
        keep_to(process, cores)
        limit = LONG_LIMIT_S if layout in (*HYBRIDS, *EXPERTS) else LIMIT_S
        return process.train("graphs", ["--layout", layout, "--repeats", str(REPEATS), *words], limit)
    except TrainingFailed as error:
        return str(error)


def records_of(layout: str, found: dict[str, Any], origin: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the records of what a layout's ranks found: one of the parity, two for each size that was timed."""
    worst = [max(far[i] for rank in found["ranks"] for far in rank["far"].values()) for i in range(2)]
    replays, fallbacks = found["ranks"][0]["replays"], found["ranks"][0]["fallbacks"]
    parity_of_all = {"forward_rel": worst[0], "grad_rel": worst[1], "replays": replays, "fallbacks": fallbacks}
    records = [{"case": layout, "mode": "plugin_deterministic", **parity_of_all, **origin}]
    for tokens in found["ranks"][0]["ms"]:
        eager, graphs = (max(rank["ms"][tokens][mode] for rank in found["ranks"]) for mode in ("eager", "plugin"))
        for mode, ms in (("eager", eager), ("plugin", graphs)):
            timed = {"case": f"{layout}_{tokens}", "mode": mode, "tokens": int(tokens), "ms": ms, "ratio": ms / eager}
            records.append({**timed, **origin})
    return records


def misses(found: dict[str, Any]) -> list[str]:
    """Return what is not as it must be."""
    missed = []
    for number, rank in enumerate(found["ranks"]):
        missed += [f"rank {number} {said}" for said in _inexact(rank)]
        if rank["fallbacks"] != dict.fromkeys(rank["beyond"], 1):
            missed.append(f"rank {number} counted {rank['fallbacks']}, wanted each of {rank['beyond']} once")
        if rank.get("failing", FAILED) != FAILED:
            missed.append(f"rank {number}, where one rank cannot capture: {rank['failing']}")
        for tokens, ms in rank["ms"].items():
            if ms["plugin"] >= ms["eager"]:
                missed.append(f"rank {number}, {tokens} tokens: {ms['plugin']:.1f} ms, eager {ms['eager']:.1f} ms")
    if len({json.dumps([rank["replays"], rank["fallbacks"]]) for rank in found["ranks"]}) > 1:
        missed.append(f"ranks chose otherwise: {[(r['replays'], r['fallbacks']) for r in found['ranks']]}")
    return missed


def _inexact(rank: dict[str, Any]) -> list[str]:
    """Return how a rank's graphs are farther from eager, or with experts inside them from fp32, than they may be."""
    if "from_fp32" not in rank:
        differ = {name: far for name, far in rank["far"].items() if far != [0.0, 0.0]}
        return [f"differs from eager (losses, worst gradient): {differ}"] if differ else []
    graphs, eager = rank["from_fp32"]["graphs"], rank["from_fp32"]["eager"]
    farther = any(not ours <= FARTHER * eagers for ours, eagers in zip(graphs, eager, strict=True))
    return [f"is from fp32 (losses, gradients): {graphs}, eager {eager}"] if farther else []
