"""Memory against time of packed-sequence graphs whose activations leave, beside the graph that keeps all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from scripts.performance.models import language_model as lm
from scripts.performance.models import tower
from scripts.performance.offload.replays import Replays, case_of

DOCUMENTS = 5
TOKENS = 8192
# Case -> the model.
SHAPES = {"experts_8192": lm.SHAPES["moe"]}
# Beside slots and evaluation.
TUNING: dict[str, Any] = {}
OFF = dict.fromkeys(f"cuda_graph_packed_{name}" for name in ("offload", "recompute", "offload_above_gb"))


class PackReplays(Replays):
    """Packs of random documents, as many as slots.

    Args:
        name: Of the case.
        slots: Packs in flight.
        repeats: Timed runs of each mode.
        modules: Parts of layers on graphs; none are all layers.
    """

    def __init__(self, name: str, slots: int, repeats: int, modules: Sequence[str] = ()) -> None:
        self.model: nn.Module = lm.build_model(SHAPES[name])
        self._modules = tuple(modules)
        self.batches = [lm.make_pack(lm.draw(TOKENS, DOCUMENTS, seed), seed) for seed in range(slots)]
        head = {
            "case": case_of(name, modules),
            "tokens": TOKENS,
            "documents": DOCUMENTS,
            "slots": slots,
            "bucket": TOKENS,
        }
        super().__init__(head, tower.MainGrads(self.model), repeats)

    @contextmanager
    def graphs(self, options: dict[str, Any]) -> Iterator[Any]:
        """See `Replays`: one bucket of exactly the packs' size."""
        from scripts.performance.measuring.memory import collect

        tokens = self.batches[0].tokens
        helper = lm.new_helper(
            self.model,
            self.batches[0],
            exact=False,
            modules=self._modules,
            cuda_graph_max_packed_seqs=2 * DOCUMENTS,
            cuda_graph_packed_buckets=[tokens],
            cuda_graph_packed_tuning={"slots": len(self.batches), "evaluation": False, **TUNING},
            **{**OFF, **{f"cuda_graph_packed_{name}": value for name, value in options.items()}},
        )
        try:
            yield helper
        finally:
            helper.delete_cuda_graphs()
            collect()

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        """See `Replays`: per-token losses."""
        return (self.model(**batch.arguments),)

    def gradients(self, batch: Any, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `Replays`."""
        return [batch.weights.to(output.dtype) for output in outputs]
