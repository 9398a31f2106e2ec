"""Memory against time of graphs whose activations are offloaded or recomputed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any

from bridge_cg_plugin.cli.runs.results import first_line, provenance
from scripts.performance.models.workloads import Grid, description, tokens_of

# Mode -> options. Targets are parts of the memory of `none`.
FIXED: dict[str, dict[str, Any]] = {
    "none": {},
    "offload": {"offload": ("attention", "mlp", "layernorm", "merger", "other")},
    "recompute": {"recompute": ("layernorm", "gelu", "linear")},
}
GIB = 2**30


def summary(record: dict[str, Any]) -> str:
    """Return one line on a record."""
    head = f"{record['case']:13} {record['mode']:10}"
    if "error" in record:
        return f"{head} {record['error']}"
    return (
        f"{head} {record['ms']:8.1f} ms (x{record['ratio']:.3f}, forward {record['fwd_ms']:.1f}, "
        f"GPU busy {record.get('gpu_busy_ms', 0):.1f}) "
        f"{record['memory_gb']:6.2f} GiB (x{record['memory_ratio']:.2f}) host {record['pinned_gb']:5.2f} GiB "
        f"copies {record.get('copy_ms', 0):.0f} ms, {record.get('copy_overlap', 0):.0%} beside kernels, outputs "
        f"{'equal' if record['bit_equal'] else 'DIFFER'}, gradients {record['grad_rel']:.1e} "
        f"(two runs {record['grad_noise']:.1e}), capture {record['capture_s']:.1f} s"
    )


class Replays:
    """A case: a model, its batches, and what is measured on them.

    Args:
        head: Fields of the case's records.
        grads: Where the model's gradients are summed.
        repeats: Timed runs of each mode.

    Attributes:
        batches: One for each slot.
    """

    batches: Sequence[Any]

    def __init__(self, head: dict[str, Any], grads: Any, repeats: int) -> None:
        self._head, self._grads, self._repeats = head, grads, repeats
        self._expected: tuple[list[Any], list[Any]] | None = None

    def graphs(self, options: dict[str, Any]) -> AbstractContextManager[Any]:
        """Capture with a bucket of exactly the batches' size; yields the helper."""
        raise NotImplementedError

    def forward(self, batch: Any) -> Sequence[Any]:
        """Return a batch's outputs."""
        raise NotImplementedError

    def gradients(self, batch: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of a batch's outputs."""
        raise NotImplementedError

    def records(
        self, modes: Sequence[str], targets: Sequence[float], deadline: float, rounds: int = 1
    ) -> Iterator[dict[str, Any]]:
        """Yield a record of every mode; with several rounds again whenever a figure changes.

        Args:
            modes: Without a memory target.
            targets: Parts of the memory of `none`.
            deadline: Of the first round's modes and of further rounds, as `time.monotonic()`.
            rounds: How often all modes are measured in turns; the fastest time of each counts.
        """
        asked: list[tuple[str, float | None]] = [(mode, None) for mode in FIXED if mode in modes]
        asked += [(f"mixed_{round(100 * target)}", target) for target in targets]
        fastest: dict[str, dict[str, Any]] = {}
        for turn, (mode, target) in ((turn, each) for turn in range(rounds) for each in asked):
            if turn and (time.monotonic() > deadline or mode not in fastest):
                continue
            try:
                record = self._record(mode, target, fastest.get("none"), deadline)
            except Exception as error:
                if not turn:
                    yield {**self._head, "mode": mode, "error": first_line(error), **provenance(0, 0)}
                if "none" not in fastest:
                    return
                continue
            fastest[mode] = min(record, fastest.get(mode, record), key=itemgetter("ms"))
            for name in fastest if mode == "none" else (mode,):
                fastest[name]["ratio"] = fastest[name]["ms"] / fastest["none"]["ms"]
                yield {**self._head, "mode": name, **fastest[name]}

    def _record(
        self, mode: str, target: float | None, baseline: dict[str, Any] | None, deadline: float
    ) -> dict[str, Any]:
        """Return the record of a mode, compared with the first one.

        Raises:
            Exception: It was not measured.
        """
        if time.monotonic() > deadline:
            raise TimeoutError("not measured: the time is used up; give more --seconds")
        options, told = FIXED.get(mode, {}), {}
        if target is not None and baseline is not None:
            gib = target * baseline["memory_gb"]
            options, told = {"offload_above_gb": gib / len(self.batches)}, {"memory_target_gb": gib}
        record, found = self.mode(options)
        self._expected = self._expected or found
        return {**record, **compared(record, baseline or record, found, self._expected), **told}

    def mode(self, options: dict[str, Any]) -> tuple[dict[str, Any], tuple[list[Any], list[Any]]]:
        """Return a mode's record, and the outputs and gradients of one run, on the host."""
        from scripts.performance.measuring import measure

        with self.graphs(options) as helper:
            found = self.results()
            noise = relative(self.results()[1], found[1])
            # Device memory that later modes have less of would slow them: eager parts allocate in every run.
            found = [each.cpu() for each in found[0]], [each.cpu() for each in found[1]]
            times = measure.median_times(self.run, self._repeats, warmup=1)
            statistics = helper.graphs.statistics()
            record = {
                "ms": times.ms,
                "fwd_ms": times.fwd_ms,
                "host_ms": times.host_ms,
                "memory_gb": statistics.memory_bytes / GIB,
                "pinned_gb": statistics.pinned_bytes / GIB,
                "capture_s": statistics.capture_seconds,
                "grad_noise": noise,
                "fallbacks": dict(statistics.fallbacks),
                **rebuilding(helper),
                **on_device(self.run),
                **provenance(times.repeats, 0),
            }
            if statistics.fallbacks:
                raise RuntimeError(f"some batches ran eager: {dict(statistics.fallbacks)}")
        return record, found

    def results(self) -> tuple[list[Any], list[Any]]:
        """Return outputs of all batches, and their summed gradients."""
        self._grads.zero()
        return [output.clone() for output in self.run()], self._grads.copy()

    def run(self, between: Any = None) -> list[Any]:
        """Run all forwards, then all backwards; returns all outputs.

        Args:
            between: Called when forwards are submitted, if given.
        """
        import torch

        made = [self.forward(batch) for batch in self.batches]
        if between is not None:
            between()
        for outputs, batch in zip(made, self.batches, strict=True):
            torch.autograd.backward(outputs, self.gradients(batch, outputs))
        return [output.detach() for outputs in made for output in outputs]


class TowerReplays(Replays):
    """Images through the vision tower, the same ones in each slot but for their pixels.

    Args:
        name: Of the case.
        grid: Of the images.
        slots: Batches in flight.
        model: The tower.
        grads: Where its gradients are summed.
        repeats: Timed runs of each mode.
        modules: Parts of layers on graphs; none are the whole tower.
    """

    def __init__(
        self, name: str, grid: Grid, slots: int, model: Any, grads: Any, repeats: int, modules: Sequence[str] = ()
    ) -> None:
        from scripts.performance.models import tower

        self.model, self._modules = model, tuple(modules)
        self.batches = [tower.make_batch(grid, model, seed=seed) for seed in range(slots)]
        head = {**description(case_of(name, modules), "", grid), "slots": slots, "bucket": tokens_of(grid)}
        super().__init__(head, grads, repeats)

    @contextmanager
    def graphs(self, options: dict[str, Any]) -> Iterator[Any]:
        """See `Replays`."""
        from bridge_cg_plugin.options import VisionGraphOptions
        from scripts.performance.measuring.memory import collect
        from scripts.performance.models.modes import new_helper

        first = self.batches[0]
        settings = {"buckets": (first.tokens,), "slots": len(self.batches), "max_frames": first.frames}
        helper = new_helper(
            self.model,
            VisionGraphOptions(
                impl="transformer_engine",
                evaluation=False,
                cost_fallback=False,
                strict=True,
                exact_below=0,
                modules=self._modules,
                **settings,
                **options,
            ),
        )
        try:
            yield helper
        finally:
            helper.delete_cuda_graphs()
            collect()

    def forward(self, batch: Any) -> Sequence[Any]:
        """See `Replays`."""
        from scripts.performance.models import tower

        outputs: Sequence[Any] = tower.forward(self.model, batch)
        return outputs

    def gradients(self, batch: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """See `Replays`."""
        gradients: Sequence[Any] = batch.gradients
        return gradients


def case_of(name: str, modules: Sequence[str]) -> str:
    """Return the case of a record, with the parts of layers that are on graphs."""
    return f"{name}_{'_'.join(modules)}" if modules else name


def relative(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest relative difference of matching tensors."""
    from scripts.performance.models import tower

    return tower.largest_relative(actual, expected)


def compared(
    record: dict[str, Any], baseline: dict[str, Any], found: tuple[Any, ...], expected: tuple[Any, ...]
) -> dict[str, Any]:
    """Return the fields that compare a mode with the graph that keeps all activations."""
    import torch

    return {
        "memory_ratio": record["memory_gb"] / baseline["memory_gb"],
        "forward_rel": relative(found[0], expected[0]),
        "bit_equal": all(map(torch.equal, found[0], expected[0])),
        "grad_rel": relative(found[1], expected[1]),
        "grad_noise": baseline["grad_noise"],
    }


def rebuilding(helper: Any) -> dict[str, Any]:
    """Return the ms that a GiB of each kind takes to be recomputed, where a memory target had it measured."""
    piece = helper.graphs._regions[0]._piece
    offloading = piece.offloading if piece.chain is None else piece.chain.offloading
    costs = {} if offloading is None else offloading.rebuild_ms
    return {"rebuild_ms_per_gb": {"/".join(group): ms * GIB for group, ms in costs.items()}} if costs else {}


def on_device(step: Any) -> dict[str, float]:
    """Return for how many ms of a step the device worked, and copied from or to the host; what ran beside kernels."""
    from scripts.performance.measuring import measure

    spans = measure.spans(step)
    if not spans:
        return {}
    found = {"gpu_busy_ms": measure.kernels_of(spans).busy_ms}
    moving = [(start, end) for start, end, name in spans if "DtoH" in name or "HtoD" in name]
    if total := sum(end - start for start, end in moving) / 1e3:
        kernels = [(start, end) for start, end, name in spans if not name.startswith(("Memcpy", "Memset"))]
        found |= {"copy_ms": total, "copy_overlap": measure.overlap_us(moving, kernels) / 1e3 / total}
    return found
