"""Parity of graphs of packed documents with eager: many packs from one capture, documents apart, fallbacks."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from bridge_cg_plugin.cli.runs.results import provenance
from scripts.performance.models import language_model as lm
from scripts.performance.models import tower
from scripts.performance.packed import parity as parity

SIZES: dict[str, Any] = {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 3072}
MAX_SEQS = 24
BUCKETS = (1024, 2048)
EAGER_RUNS, GRAPH_RUNS = 3, 2
NOISE = 1.5
# Graphs may be farther from fp32 than eager on a pack's own rows by this factor: both are a rounding of the same.
FARTHER = 1.1
Record = dict[str, Any]


class Comparison:
    """One model, eager and on graphs.

    Args:
        name: Its cases' prefix.
        fused: Whether eager rotates with Transformer Engine's kernel.
        deterministic: Whether algorithms are.
    """

    def __init__(self, name: str, fused: bool, deterministic: bool) -> None:
        self.name, self.deterministic = name, deterministic
        shape = lm.Shape(**SIZES, fused_rope=fused)
        with self._algorithms():
            self.model = lm.build_model(shape)
        self.grads = tower.MainGrads(self.model)
        reference = (lambda: lm.build_model(lm.Shape(**SIZES), dtype=torch.float32)) if deterministic else None
        self.fp32 = None if reference is None else parity.Fp32Reference(reference, self.model)

    def _algorithms(self) -> ExitStack:
        stack = ExitStack()
        if self.deterministic:
            stack.enter_context(parity.deterministic())
        return stack

    def records(self) -> Iterator[Record]:
        """Yield all records, from one capture."""
        fallbacks = {
            "too_many_documents": lm.make_pack(lm.split(1024, MAX_SEQS + 1)),
            "too_many_tokens": lm.make_pack((BUCKETS[-1] + 8,)),
            "other_layout": lm.make_pack((500,), room=(512,)),
            "too_few_tokens": lm.make_pack((100, 60)),
        }
        with self._algorithms():
            never = {reason: self._results(pack) for reason, pack in fallbacks.items()}
            options: dict[str, Any] = {
                "cuda_graph_max_packed_seqs": MAX_SEQS,
                "cuda_graph_packed_buckets": list(BUCKETS),
            }
            once: dict[str, Any] = {"cuda_graph_packed_tuning": {"slots": 1}}
            helper = lm.new_helper(self.model, lm.make_pack((500, 200)), **once, **options)
            self.graphs = helper.graphs
            for index, lengths in enumerate(parity.thirty_packs(MAX_SEQS, BUCKETS).values()):
                yield from self._pack(f"{self.name}_{index}", lm.make_pack(lengths, index))
            yield self._documents_apart()
            if self.deterministic:
                for reason, pack in fallbacks.items():
                    yield self._fallback(reason, pack, never[reason])
            helper.delete_cuda_graphs()

    def _pack(self, case: str, pack: lm.Pack) -> Iterator[Record]:
        rows = next(bucket for bucket in BUCKETS if bucket >= pack.tokens)
        with parity.eager_at(self.graphs, rows):
            runs = [self._results(pack) for _ in range(EAGER_RUNS)]
        before = self.graphs.statistics()
        found = [self._results(pack) for _ in range(GRAPH_RUNS)]
        after = self.graphs.statistics()
        forward_noise, grad_noise = parity.noise_of(runs)
        # Few runs differ from the others, on graphs as eager: the replay nearest to an eager run counts.
        gradient, forward = min(parity.nearest(each, runs)[::-1] for each in found)
        record = {
            **self._origin(case, "plugin", pack),
            "bucket": rows,
            "replays": after.replays - before.replays,
            "bit_equal": all(parity.same(each, runs[0]) for each in found),
            "forward_rel": forward,
            "grad_rel": gradient,
            "forward_noise": forward_noise,
            "grad_noise": grad_noise,
        }
        if self.fp32 is None:
            yield record
            return
        with self.graphs.paused():
            own = self._results(pack)
        exact = self.fp32.results(pack)
        yield record | fp32_fields(found[0], exact)
        forward, gradient = parity.nearest(own, found[:1])
        differ = {"bit_equal": parity.same(own, found[0]), "forward_rel": forward, "grad_rel": gradient}
        yield {**self._origin(case, "eager_own_rows", pack), **differ, **fp32_fields(own, exact)}

    def _documents_apart(self) -> Record:
        """Change one of three documents; the others' logits must stay what they are to the bit."""
        pack, changed = lm.make_pack((300, 450, 200)), lm.make_pack((300, 450, 200))
        ids = changed.arguments["input_ids"]
        ids[0, 300:750] = ids[0, 300:750].flip(0)
        before = self.graphs.statistics().replays
        first, second = (self.model(**{**p.arguments, "labels": None}).detach() for p in (pack, changed))
        differ = (first != second).any(-1)[0]
        others = slice(300), slice(750, 950)
        return {
            **self._origin(f"{self.name}_documents_apart", "plugin", pack),
            "replays": self.graphs.statistics().replays - before,
            "bit_equal": not (differ[:300].any() or differ[750:].any()) and bool(differ[300:750].any()),
            "forward_rel": max(tower.relative(second[:, part], first[:, part]) for part in others),
        }

    def _fallback(self, reason: str, pack: lm.Pack, never: parity.Result) -> Record:
        """Run what no graph takes; it must be what it was before there were graphs."""
        before = self.graphs.statistics().fallbacks[reason]
        found = self._results(pack)
        counted = self.graphs.statistics().fallbacks[reason] - before
        forward, gradient = parity.nearest(found, [never])
        return {
            **self._origin(f"{self.name}_fallback_{reason}", "plugin", pack),
            "fallback": reason if counted == 1 else None,
            "bit_equal": parity.same(found, never),
            "forward_rel": forward,
            "grad_rel": gradient,
        }

    def _results(self, pack: lm.Pack) -> parity.Result:
        self.grads.zero()
        losses = lm.step(self.model, pack)
        return losses, self.grads.copy()

    def _origin(self, case: str, mode: str, pack: lm.Pack) -> Record:
        suffix = "_deterministic" if self.deterministic and mode == "plugin" else ""
        sizes = {"tokens": pack.tokens, "documents": len(pack.lengths)}
        return {"case": case, "mode": f"{mode}{suffix}", **sizes, **provenance(GRAPH_RUNS, 0)}


def fp32_fields(found: parity.Result, exact: parity.Result) -> Record:
    """Return a result's distances from fp32."""
    far = parity.distances(found, exact)
    return {"fp32_output": far["losses"], "fp32_mean": far["mean of gradients"], "fp32_worst": far["worst gradient"]}


def misses(records: list[Record]) -> list[str]:
    """Return what misses its limit."""
    missed = [f"{r['case']}: {r['replays']} replays" for r in records if r.get("replays") == 0]
    graphs = [r for r in records if r["mode"] != "eager_own_rows"]
    exact = [r for r in graphs if r["mode"] == "plugin_deterministic" or "grad_rel" not in r]
    missed += [f"{r['case']}: not equal to the bit, {r['forward_rel']:.2e}" for r in exact if not r["bit_equal"]]
    missed += [f"{r['case']}: not counted" for r in graphs if "fallback" in r and r["fallback"] is None]
    noisy = [r for r in graphs if r not in exact]
    for what in ("forward", "grad"):
        limit = NOISE * max((r[f"{what}_noise"] for r in noisy), default=0.0)
        far = [r for r in noisy if not r[f"{what}_rel"] <= limit]
        missed += [f"{r['case']}: {what} {r[f'{what}_rel']:.2e}, eager runs differ by {limit / NOISE:.2e}" for r in far]
    return missed + farther(records)


def farther(records: list[Record]) -> list[str]:
    """Return where graphs are farther from fp32 than eager on a pack's own rows, which rounds otherwise."""
    eager = {r["case"]: r for r in records if r["mode"] == "eager_own_rows" and not r["bit_equal"]}
    pairs = [(r, eager[r["case"]]) for r in records if r["case"] in eager and r["mode"] == "plugin_deterministic"]
    missed = [
        f"{graphs['case']}: {what} {graphs[what]:.3e}, eager {own[what]:.3e}"
        for graphs, own in pairs
        for what in ("fp32_output", "fp32_mean")
        if not graphs[what] <= FARTHER * own[what]
    ]
    # The gradient that is farthest is one small norm's of a pack, by chance: the farthest of all packs counts.
    worst = [max(r["fp32_worst"] for r in side) for side in zip(*pairs, strict=True)]
    if worst and not worst[0] <= FARTHER * worst[1]:
        missed.append(f"worst gradient of all packs {worst[0]:.3e}, eager {worst[1]:.3e}")
    return missed
