"""Training with activations that leave graphs, under a limit of device memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.graphs.errors import CaptureError
from scripts.performance.measure import GIB
from scripts.performance.records import first_line, loss_distance
from tests.gpu.offload_training import DOCUMENTS, PACKS, TOKENS, OutOfSpace, Trainer, limited

# Modes of `limit` that must run out of memory.
RUN_OUT = ("eager", "plugin")
# The limit lies so far between what recompute takes and what keeping everything takes, and a slot's memory target is
# this part of what a pack keeps.
LIMIT_SHARE, TARGET_SHARE = 0.75, 0.55
# Two runs of the same steps may differ by this much where algorithms add up in an order that timing decides.
LOSS_TOLERANCE = 1e-3
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def misses(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a case's runs did otherwise than it says."""
    found = {record["mode"]: record for record in records}
    missed = []
    for mode, record in found.items():
        if (mode in RUN_OUT) != ("error" in record):
            missed.append(f"{record['case']} {mode}: {record.get('error', 'fits, where it should run out of memory')}")
        elif record.get("inside_spread") is False:
            missed.append(f"{record['case']} {mode}: losses differ from recompute's by {record['loss_rel']:.1e}")
    return missed


def limit_records(steps: int) -> Iterator[dict[str, Any]]:
    """Yield the records of packs in flight under a limit of device memory."""
    from tests.models import language_model as lm

    trainer = Trainer(lm.build_model(lm.Shape(layers=8)), in_flight(PACKS, TOKENS))
    kept, again = trainer.peak(), trainer.peak(**RECOMPUTE)
    a_pack = (kept - again) / PACKS
    limit = again + LIMIT_SHARE * (kept - again)
    target = {"cuda_graph_packed_offload_above_gb": TARGET_SHARE * a_pack / GIB}
    head = {"case": "limit", "tokens": TOKENS, "documents": DOCUMENTS, "slots": PACKS, "limit_gb": limit / GIB}
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "eager": lambda: trainer.eager(steps),
        "plugin": lambda: trainer.graphs(steps, {}),
        "eager_recompute": lambda: trainer.eager(steps, **RECOMPUTE),
        "eager_recompute_again": lambda: trainer.eager(steps, **RECOMPUTE),
        "plugin_mixed": lambda: (
            trainer.graphs(steps, target) | {"memory_target_gb": PACKS * TARGET_SHARE * a_pack / GIB}
        ),
    }
    base: dict[str, Any] | None = None
    with limited(limit):
        for mode, run in runs.items():
            try:
                found = run()
            except (OutOfSpace, CaptureError) as error:
                yield {**head, "mode": mode, "error": first_line(error), **provenance(0, 0)}
                continue
            base = base or (found if mode not in RUN_OUT else None)
            yield {**head, "mode": mode, **found, **compared(found, base or found)}


def compared(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that compare a run with that of Megatron's recompute; both learn."""
    far = loss_distance(found["losses"], base["losses"])
    same = far <= LOSS_TOLERANCE and found["losses"][-1] < found["losses"][0]
    return {"ratio": found["ms"] / base["ms"], "loss_rel": far, "inside_spread": same}


def in_flight(count: int, tokens: int) -> list[Any]:
    """Return packs of random documents, other ones in each."""
    from tests.models import language_model as lm

    return [lm.make_pack(lm.draw(tokens, DOCUMENTS, seed), seed) for seed in range(count)]
