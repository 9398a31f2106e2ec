"""Trains a packed language model whose activations leave its graphs: where memory is short, and for many steps.

    python scripts/performance/train_offload.py
    python scripts/performance/train_offload.py --cases flat --flat-steps 400

`limit`: packs in flight, all forwards and then all backwards as a pipeline's first stage has them, under a limit on
what the process may take of the device (`limit_gb` in the records). Eager and graphs that keep their activations must
run out of memory; graphs with a memory target must train, with the losses of eager steps under Megatron's recompute.
Algorithms are the default ones: cuDNN's deterministic backward takes 64 GiB of workspace for packs of this size.
`flat`: steps on graphs that offload everything; device and host memory at a few of them must be the same.
Records go to docs/benchmarks/offload_training.jsonl.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.graphs.buckets import Bucket  # noqa: E402
from bridge_cg_plugin.graphs.errors import CaptureError, OutOfMemoryInCapture  # noqa: E402
from scripts.performance.results import first_line, loss_distance, output_path, provenance, put_record  # noqa: E402

CASES = ("limit", "flat")
# Modes of `limit` that must run out of memory.
RUN_OUT = ("eager", "plugin")
GIB = 2**30
PACKS, TOKENS, DOCUMENTS = 4, 8192, 5
# The limit lies so far between what recompute takes and what keeping everything takes, and a slot's memory target is
# this part of what a pack keeps.
LIMIT_SHARE, TARGET_SHARE = 0.75, 0.55
# Two runs of the same steps may differ by this much where algorithms add up in an order that timing decides.
LOSS_TOLERANCE = 1e-3
# Steps after which memory is looked at, beside the last; what the first of them took is what later ones may take.
LOOKS = (10, 50, 100)
# What the process may grow by, beside pages that the run itself pins: buffers of libraries.
RESIDENT_GROWTH_GB = 0.05
LEARNING_RATE = 3e-4
OFFLOAD_OFF = dict.fromkeys(f"cuda_graph_packed_{name}" for name in ("offload", "recompute", "offload_above_gb"))
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class OutOfSpace(RuntimeError):
    """A run took more device memory than it may."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and write the records; non-zero if a run did not do what its case says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/offload_training.jsonl on a GPU")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated; all: {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=8, help="steps of every run of `limit`")
    parser.add_argument("--flat-steps", type=int, default=200, help="steps of `flat`, more than 100")
    args = parser.parse_args(arguments)
    cases = args.cases.split(",")
    if not set(cases) <= set(CASES) or args.steps < 2 or args.flat_steps <= max(LOOKS):
        print(
            f"train_offload.py: --cases {args.cases} --steps {args.steps} --flat-steps {args.flat_steps}: allowed are "
            f"{', '.join(CASES)}, at least 2 steps and more than {max(LOOKS)}; correct them",
            file=sys.stderr,
        )
        return 2
    out = output_path(args.out, "offload_training.jsonl")
    makers = {"limit": lambda: limit_records(args.steps), "flat": lambda: flat_records(args.flat_steps)}
    missed = []
    for case in cases:
        records = []
        for record in makers[case]():
            put_record(out, record)
            print(summary(record), flush=True)
            records.append(record)
        missed += misses(records)
    print("\n".join(missed) or "every run did what its case says")
    return 1 if missed else 0


def summary(record: dict[str, Any]) -> str:
    """Return one line on a record."""
    head = f"{record['case']:6} {record['mode']:16}"
    if "error" in record:
        return f"{head} {record['error']}"
    if "memory_steps" in record:
        looks = "; ".join(
            f"step {step}: " + ", ".join(f"{name.removesuffix('_gb')} {value:.3f}" for name, value in look.items())
            for step, look in record["memory_steps"].items()
        )
        return f"{head} {record['ms']:.1f} ms a step, GiB: {looks}"
    losses = record["losses"]
    return (
        f"{head} {record['ms']:8.1f} ms a step, peak {record['peak_gb']:.1f} of {record['limit_gb']:.1f} GiB, host "
        f"{record['pinned_gb']:.1f} GiB, loss {losses[0]:.4f} to {losses[-1]:.4f}, differs by {record['loss_rel']:.1e}"
    )


def misses(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a case's runs did otherwise than it says."""
    found = {record["mode"]: record for record in records}
    missed = []
    for mode, record in found.items():
        if (mode in RUN_OUT) != ("error" in record):
            missed.append(f"{record['case']} {mode}: {record.get('error', 'fits, where it should run out of memory')}")
        elif record.get("inside_spread") is False:
            missed.append(f"{record['case']} {mode}: losses differ from recompute's by {record['loss_rel']:.1e}")
        elif record.get("flat") is False:
            missed.append(f"{record['case']} {mode}: memory grows: {record['memory_steps']}")
    return missed


def limit_records(steps: int) -> Iterator[dict[str, Any]]:
    """Yield the records of packs in flight under a limit of device memory."""
    from scripts.performance import language_model as lm

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


def flat_records(steps: int) -> Iterator[dict[str, Any]]:
    """Yield the record of many steps on graphs that offload everything."""
    from scripts.performance import language_model as lm

    model = lm.build_model(lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072))
    trainer = Trainer(model, in_flight(2, 2048))
    options = {"cuda_graph_packed_offload": "all", "cuda_graph_packed_tuning": {"offload_min_bytes": 1 << 14}}
    found = trainer.graphs(steps, options, look=True)
    yield {"case": "flat", "mode": "plugin_offload", "tokens": 2048, "slots": 2, **found, "flat": is_flat(found)}


def is_flat(found: dict[str, Any]) -> bool:
    """Whether no later look shows more memory than the first; the process may grow by what libraries take."""
    first, *later = found["memory_steps"].values()
    exact = all(look[name] <= first[name] for look in later for name in ("allocated_gb", "reserved_gb", "pinned_gb"))
    return exact and all(look["resident_gb"] <= first["resident_gb"] + RESIDENT_GROWTH_GB for look in later)


def in_flight(count: int, tokens: int) -> list[Any]:
    """Return packs of random documents, other ones in each."""
    from scripts.performance import language_model as lm

    return [lm.make_pack(lm.draw(tokens, DOCUMENTS, seed), seed) for seed in range(count)]


@contextmanager
def limited(nbytes: float) -> Iterator[None]:
    """Let this process take so many bytes of the device in all, without a GPU any."""
    collect()
    if not torch.cuda.is_available():
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def collect() -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Trainer:
    """A model that every run trains from the same weights, on the same packs.

    Args:
        model: On the device, with random weights.
        packs: What every step trains on, all in flight at once.
    """

    def __init__(self, model: nn.Module, packs: Sequence[Any]) -> None:
        from scripts.performance import tower

        self.model, self.packs = model, packs
        self.grads = tower.MainGrads(model)
        self._initial = [p.detach().to("cpu", copy=True) for p in self.grads.parameters]

    def peak(self, **config: Any) -> int:
        """Return the most bytes that eager steps take of the device, the optimizer's state included."""
        collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.losses(2, **config)
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0

    def eager(self, steps: int, **config: Any) -> dict[str, Any]:
        """Train eager; returns what a record says of it.

        Raises:
            OutOfSpace: It took more than it may.
        """
        return self._record(lambda: self._steps(steps, **config))

    def losses(self, steps: int, **config: Any) -> list[float]:
        """Train eager; returns the loss of every step."""
        return self._steps(steps, **config)["losses"]

    def graphs(self, steps: int, options: dict[str, Any], look: bool = False) -> dict[str, Any]:
        """Train on graphs with these options; returns what a record says of it.

        Raises:
            OutOfSpace: It took more than it may.
        """
        return self._record(lambda: self._graphed(steps, options, look))

    def _record(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        found = fitting(run)
        peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
        times = found.pop("step_ms")
        return {
            "ms": statistics.median(times[1:]),
            "peak_gb": peak / GIB,
            "pinned_gb": 0.0,
            **found,
            **provenance(len(times) - 1, 0),
        }

    def _graphed(self, steps: int, options: dict[str, Any], look: bool) -> dict[str, Any]:
        from scripts.performance import language_model as lm

        tokens, config = self.packs[0].tokens, vars(self.model.config)
        wanted = {
            "cuda_graph_max_packed_seqs": 2 * DOCUMENTS,
            "cuda_graph_packed_buckets": [tokens],
            **OFFLOAD_OFF,
            **options,
            "cuda_graph_packed_tuning": {
                "slots": len(self.packs),
                "evaluation": False,
                **options.get("cuda_graph_packed_tuning", {}),
            },
        }
        kept = {name: config.get(name) for name in wanted}
        helper = lm.new_helper(
            self.model, self.packs[0], recorded=[Bucket(tokens, (2 * DOCUMENTS, tokens))], capture=False, **wanted
        )
        try:
            helper.create_cudagraphs()
            found = self._steps(steps, look=look)
            said = helper.graphs.statistics()
            if said.fallbacks or said.replays != steps * len(self.packs):
                raise CaptureError(f"{said.replays} replays, packs that ran eager: {dict(said.fallbacks)}")
            memory = {"memory_gb": said.memory_bytes / GIB, "pinned_gb": said.pinned_bytes / GIB}
            return {**found, **memory, "capture_s": said.capture_seconds, "replays": said.replays}
        finally:
            helper.delete_cuda_graphs()
            vars(self.model.config).update(kept)

    def _steps(self, steps: int, look: bool = False, **config: Any) -> dict[str, Any]:
        """Train from the first weights on."""
        with torch.no_grad():
            for parameter, initial in zip(self.grads.parameters, self._initial, strict=True):
                parameter.copy_(initial)
                parameter.grad = None  # of a run that ended in the middle of a backward
        weights = MasterWeights(self.grads.parameters)
        losses, times, looks = [], [], {}
        with configured(self.model.config, config):
            for step in range(1, steps + 1):
                began = time.perf_counter()
                losses.append(self._step())
                weights.step()
                synchronize()
                times.append((time.perf_counter() - began) * 1e3)
                if look and step in (*LOOKS, steps):
                    looks[str(step)] = memory_now()
        return {"losses": losses, "step_ms": times, **({"memory_steps": looks} if look else {})}

    def _step(self) -> float:
        self.grads.zero()
        made: list[Tensor] = [self.model(**pack.arguments) for pack in self.packs]
        for losses, pack in zip(made, self.packs, strict=True):
            losses.backward(pack.weights.to(losses.dtype))
        means = [(one.detach() * p.weights).sum() / p.weights.sum() for one, p in zip(made, self.packs, strict=True)]
        return sum(map(float, means)) / len(self.packs)


class MasterWeights:
    """AdamW on fp32 copies of weights, from their `main_grad`.

    Args:
        parameters: Weights of any dtype, with an fp32 `main_grad`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._masters = [p.detach().to(torch.float32, copy=True) for p in parameters]
        self._adam = torch.optim.AdamW(self._masters, lr=LEARNING_RATE)

    def step(self) -> None:
        """Take a step and round the weights."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = parameter.main_grad
        self._adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)


@contextmanager
def configured(config: Any, changes: dict[str, Any]) -> Iterator[None]:
    """Change fields of a configuration inside."""
    before = {name: getattr(config, name) for name in changes}
    vars(config).update(changes)
    try:
        yield
    finally:
        vars(config).update(before)


def fitting(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `run` does; where memory is short, nothing of it is left.

    Raises:
        OutOfSpace: Device memory was short, in a capture or outside one.
    """
    try:
        return run()
    except (torch.OutOfMemoryError, CaptureError) as error:
        if not isinstance(error.__cause__ or error, (torch.OutOfMemoryError, OutOfMemoryInCapture)):
            raise
        said = first_line(error)
    collect()
    raise OutOfSpace(said)


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_now() -> dict[str, float]:
    """Return device memory allocated and reserved, page-locked memory, and the process's resident memory, in GiB."""
    gc.collect()
    on_gpu = torch.cuda.is_available()
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if on_gpu else 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "allocated_gb": (torch.cuda.memory_allocated() if on_gpu else 0) / GIB,
        "reserved_gb": (torch.cuda.memory_reserved() if on_gpu else 0) / GIB,
        "pinned_gb": pinned / GIB,
        "resident_gb": pages * 4096 / GIB,
    }


if __name__ == "__main__":
    import bridge_cg_plugin
    from scripts.performance.tower import start_process

    bridge_cg_plugin.activate()
    start_process()
    sys.exit(main())
