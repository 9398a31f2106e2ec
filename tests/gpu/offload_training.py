"""Training of a packed language model whose activations leave its graphs."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.graphs.errors import CaptureError, OutOfMemoryInCapture
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from scripts.performance.measure import GIB, collect, synchronize
from scripts.performance.records import first_line
from tests.models.tower import MegatronParameter

PACKS, TOKENS, DOCUMENTS = 4, 8192, 5
LEARNING_RATE = 3e-4
OFFLOAD_OFF = dict.fromkeys(f"cuda_graph_packed_{name}" for name in ("offload", "recompute", "offload_above_gb"))


class OutOfSpace(RuntimeError):
    """A run took more device memory than it may."""


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


class Trainer:
    """A model that every run trains from the same weights, on the same packs.

    Args:
        model: On the device, with random weights.
        packs: What every step trains on, all in flight at once.
    """

    def __init__(self, model: nn.Module, packs: Sequence[Any]) -> None:
        from tests.models import tower

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
        losses: list[float] = self._steps(steps, **config)["losses"]
        return losses

    def graphs(self, steps: int, options: dict[str, Any]) -> dict[str, Any]:
        """Train on graphs with these options; returns what a record says of it.

        Raises:
            OutOfSpace: It took more than it may.
        """
        return self._record(lambda: self._graphed(steps, options))

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

    def _graphed(self, steps: int, options: dict[str, Any]) -> dict[str, Any]:
        from tests.models import language_model as lm

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
            found = self._steps(steps)
            said = helper.graphs.statistics()
            if said.fallbacks or said.replays != steps * len(self.packs):
                raise CaptureError(f"{said.replays} replays, packs that ran eager: {dict(said.fallbacks)}")
            memory = {"memory_gb": said.memory_bytes / GIB, "pinned_gb": said.pinned_bytes / GIB}
            return {**found, **memory, "capture_s": said.capture_seconds, "replays": said.replays}
        finally:
            helper.delete_cuda_graphs()
            vars(self.model.config).update(kept)

    def _steps(self, steps: int, **config: Any) -> dict[str, Any]:
        """Train from the first weights on."""
        with torch.no_grad():
            for parameter, initial in zip(self.grads.parameters, self._initial, strict=True):
                parameter.copy_(initial)
                parameter.grad = None  # of a run that ended in the middle of a backward
        weights = MasterWeights(self.grads.parameters)
        losses, times = [], []
        with configured(self.model.config, config):
            for _ in range(steps):
                began = time.perf_counter()
                losses.append(self._step())
                weights.step()
                synchronize()
                times.append((time.perf_counter() - began) * 1e3)
        return {"losses": losses, "step_ms": times}

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

    def __init__(self, parameters: Sequence[MegatronParameter]) -> None:
        self._parameters = list(parameters)
        self._masters = [p.detach().to(torch.float32, copy=True) for p in parameters]
        self._adam = torch.optim.AdamW(self._masters, lr=LEARNING_RATE)

    def step(self) -> None:
        """Take a step and round the weights."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = parameter.main_grad
        self._adam.step()
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](self._parameters), self._masters)


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
