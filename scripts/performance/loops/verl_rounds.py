"""Rounds of verl's engines in this process, eager or on graphs: log-probabilities, an update, weights away and back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bridge_cg_plugin
from bridge_cg_plugin.upstream.wrappers import overridden
from scripts.performance.loops.rounds import (
    GIB,
    OLD,
    REFERENCE,
    UPDATE,
    WARM_UP,
    Round,
    eager,
    graph_counts,
    timed,
    worker_arguments,
    write_rounds,
)
from scripts.performance.loops.samples import draw_round, microbatches
from scripts.performance.loops.verl_engines import (
    batch_of,
    compute_gradients,
    engine_of,
    join_world,
    log_probs_of,
    loss_function,
    response_log_probs,
    stand_in,
    train,
)
from scripts.performance.loops.verl_setup import ADAPTERS, EAGER_PADDED, PACK_BUCKETS, PADDED, options_of
from scripts.performance.measure import synchronize
from tests.models.packed_parity import at_rows

stand_in()
import verl.workers.engine.megatron.transformer_impl  # noqa: F401  # while others still train

# Passes with gradients before the first round, with graphs. A size's first one runs eager, with the rows of its pack
# alone, and one size is captured before the next. In the first update that rounding would be all that differs.
WITH_GRADIENTS = 6
# Every so many rounds the optimizer's state leaves as well, which takes seconds; only then is all of a model away.
OPTIMIZER_EVERY = 4


class Rounds:
    """A policy and a reference, and what is done with them.

    Args:
        model: Folder of the model's files.
        mode: Of the run.
        seed: Of the samples.
        lora: Of `ADAPTERS`.
    """

    def __init__(self, model: Path, mode: str, seed: int, lora: Mapping[str, Any] | None) -> None:
        fields = options_of(mode)
        self._seed, self._buckets = seed, PACK_BUCKETS if mode in PADDED else ()
        self._on_graphs = bool(fields)
        self._policy = engine_of(model, True, fields, lora)
        self._engines = [self._policy, *([engine_of(model, False, fields)] if lora is None else [])]
        for engine in self._engines:
            engine.initialize()
        self._loss = loss_function()
        self._optimizer_away = False
        self.leave(optimizer=True)
        self._used = used_bytes()

    def leave(self, optimizer: bool) -> None:
        """Take weights, gradients and perhaps the optimizer's state off the device."""
        self._move("cpu", optimizer)
        self._optimizer_away = optimizer
        synchronize()

    def come_back(self) -> None:
        """Load all that left."""
        self._move("cuda", self._optimizer_away)
        synchronize()

    def _move(self, device: str, optimizer: bool) -> None:
        for engine in self._engines:
            trained = engine is self._policy
            engine.to(device, optimizer=optimizer and trained, grad=trained)

    def _log_probs(self, name: str, batch: Any) -> Any:
        """Return what the policy, or the reference, computes of a batch."""
        if name == REFERENCE and len(self._engines) == 1:
            with self._policy.disable_adapter():
                return log_probs_of(self._policy, batch.clone())
        return log_probs_of(self._engines[name == REFERENCE], batch.clone())

    def warm_up(self) -> None:
        """Let both compute log-probabilities of the first round's samples, and the policy their gradients."""
        self.come_back()
        samples = draw_round(0, self._seed)
        batch, found = batch_of(samples), {}
        for _ in range(WARM_UP):
            for name in (OLD, REFERENCE):
                found[name] = response_log_probs(self._log_probs(name, batch), batch)
        for _ in range(self._on_graphs * WITH_GRADIENTS):
            compute_gradients(self._policy, batch_of(samples, found[OLD], found[REFERENCE]), self._loss)
        self.leave(optimizer=False)

    def run(self, number: int) -> Round:
        """Make one round, which begins and ends with weights away."""
        samples = draw_round(number, self._seed)
        done = Round(len(microbatches(samples)))
        torch.cuda.reset_peak_memory_stats()
        self.come_back()
        self._passes(samples, done)
        done.peak_gb = torch.cuda.max_memory_allocated() / GIB
        self.leave(optimizer=number % OPTIMIZER_EVERY == OPTIMIZER_EVERY - 1)
        if self._optimizer_away:
            done.away_gb = (used_bytes() - self._used) / GIB
        return done

    def _passes(self, samples: Sequence[Any], done: Round) -> None:
        batch = batch_of(samples)
        found = {}
        for name in (OLD, REFERENCE):
            with timed(done, name, graph_counts, synchronize):
                output = self._log_probs(name, batch)
            found[name] = response_log_probs(output, batch)
            done.log_probs[name] = found[name].values().tolist()
        done.bit_equal = not self._on_graphs or self._equals_eager(found, batch)
        batch = batch_of(samples, found[OLD], found[REFERENCE])
        with timed(done, UPDATE, graph_counts, synchronize):
            done.loss, done.grad_norm = train(self._policy, batch, self._loss)

    def _equals_eager(self, found: Mapping[str, Tensor], batch: Any) -> bool:
        """Whether eager passes over the same weights and rows give the same log-probabilities, to the bit."""
        with eager(), self.eager_rows():
            return all(
                torch.equal(values.values(), response_log_probs(self._log_probs(name, batch), batch).values())
                for name, values in found.items()
            )

    def eager_rows(self) -> AbstractContextManager[None]:
        """Return what eager decoders run in, so that they compute the rows that the run's mode asks for."""
        return padded((chunk for engine in self._engines for chunk in engine.module), self._buckets)


@contextmanager
def padded(models: Iterable[nn.Module], buckets: Sequence[int]) -> Iterator[None]:
    """Inside, eager decoders compute as many rows of a pack as graphs do: another number of rows rounds differently.

    Args:
        models: Whose decoders run eager.
        buckets: Tokens, ascending. A longer pack is computed as it is.
    """

    def rows_of(tokens: int) -> int:
        return next((bucket for bucket in buckets if bucket >= tokens), tokens)

    with ExitStack() as stack:
        for decoder in [found for model in models for found in decoders_of(model)]:
            forward = type(decoder).forward.__get__(decoder)
            stack.enter_context(overridden(decoder, "forward", at_rows(forward, rows_of)))
        yield


def decoders_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoders of language models inside, not those of their encoders."""
    return [module for name, module in model.named_modules() if f".{name}".endswith(".language_model.decoder")]


def used_bytes() -> int:
    """Return the bytes of the device that are taken, without PyTorch's cache; what has left a pool is none of them."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def train_words(words: Sequence[str]) -> None:
    """Make all rounds, as the words of a command line say; see `worker_arguments`."""
    args = worker_arguments(words)
    join_world()
    (bridge_cg_plugin.activate if options_of(args.train) else bridge_cg_plugin.deactivate)()
    rounds = Rounds(args.model, args.train, args.seed, ADAPTERS[args.case])
    with rounds.eager_rows() if args.train == EAGER_PADDED else nullcontext():
        rounds.warm_up()
        write_rounds(args, rounds.run)
