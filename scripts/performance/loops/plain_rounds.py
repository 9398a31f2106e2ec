"""Rounds of a plain loop over megatron-core's schedule, eager or on graphs: three passes over one batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

import bridge_cg_plugin
from bridge_cg_plugin.upstream.encoders.registry import find_encoder
from examples.photographs.training import Run, model_provider
from scripts.performance.loops.encoder_clock import EncoderClock
from scripts.performance.loops.rounds import (
    GIB,
    OLD,
    REFERENCE,
    UPDATE,
    WARM_UP,
    Round,
    eager,
    graph_counts,
    join_alone,
    timed,
    worker_arguments,
    write_rounds,
)
from scripts.performance.loops.samples import Sample, draw_round
from scripts.performance.measuring.measure import synchronize

FROZEN = {"freeze_vision_model": True, "freeze_vision_projection": True}
GRAPHS = (
    f"vision_cuda_graph_impl=transformer_engine max_vision_cuda_graph_seq_length=6144 cuda_graph_warmup_steps={WARM_UP}"
)
OPTIONS = {"plugin": GRAPHS, "plugin_frozen_outputs": f"{GRAPHS} vision_cuda_graph_tuning.frozen_outputs_gb=8"}
LEARNING_RATE, KL = 1e-5, 0.1

Losses = dict[str, Tensor]
LossOf = Callable[[Tensor], tuple[Tensor, Losses]]


class Rounds:
    """A policy and a reference of the same weights, and what is done with them.

    Args:
        options: For graphs of both; None for eager.
        seed: Of weights and samples.
    """

    def __init__(self, options: str | None, seed: int) -> None:
        self._seed = seed
        torch.manual_seed(seed)  # some of the encoder's weights are drawn outside of megatron-core's tracker
        provider: Any = model_provider(Run(overrides=FROZEN))
        provider.finalize()
        provider.initialize_model_parallel(seed=seed, seed_kwargs={"te_rng_tracker": True})
        self._policy: list[Any] = provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        )
        self._reference: list[nn.Module] = provider.provide_distributed_model(wrap_with_ddp=False)
        copy_weights(self._policy, self._reference)
        for chunk in self._reference:
            chunk.requires_grad_(False)
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=LEARNING_RATE, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True),
            self._policy,
        )
        config = get_model_config(self._policy[0])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        if options is not None:
            for model in (self._policy, self._reference):
                bridge_cg_plugin.enable(model, options)
        self._clocks = [EncoderClock(encoder_of(model)) for model in (self._policy, self._reference)]

    def warm_up(self) -> None:
        """Let both compute log-probabilities of the first round's samples."""
        samples = draw_round(0, self._seed)
        for _ in range(WARM_UP):
            for model in (self._policy, self._reference):
                self._log_probs(model, samples)

    def run(self, number: int) -> Round:
        """Make one round."""
        samples = draw_round(number, self._seed)
        done = Round(len(samples))
        torch.cuda.reset_peak_memory_stats()
        found = {}
        for name, model in ((OLD, self._policy), (REFERENCE, self._reference)):
            with self._timed(done, name):
                found[name] = self._log_probs(model, samples)
            done.log_probs[name] = torch.cat(found[name]).tolist()
        with eager():
            done.bit_equal = all(
                torch.equal(torch.cat(found[name]), torch.cat(self._log_probs(model, samples)))
                for name, model in ((OLD, self._policy), (REFERENCE, self._reference))
            )
        with self._timed(done, UPDATE):
            done.loss, done.grad_norm = self._update(samples, found[OLD], found[REFERENCE])
        done.peak_gb = torch.cuda.max_memory_allocated() / GIB
        return done

    @contextmanager
    def _timed(self, done: Round, name: str) -> Iterator[None]:
        for clock in self._clocks:
            clock.read()
        with timed(done, name, graph_counts, synchronize):
            yield
        done.passes[name].encoder_ms = sum(clock.read() for clock in self._clocks)

    def _log_probs(self, model: Sequence[nn.Module], samples: Sequence[Sample]) -> list[Tensor]:
        for chunk in model:
            chunk.eval()
        with torch.no_grad():
            found = schedule(model, samples, [_keep_log_probs] * len(samples), forward_only=True)
        return [each["log_probs"] for each in found]

    def _update(self, samples: Sequence[Sample], old: list[Tensor], reference: list[Tensor]) -> tuple[float, float]:
        for chunk in self._policy:
            chunk.train()
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = [
            partial(policy_loss, sample.advantage, one, other)
            for sample, one, other in zip(samples, old, reference, strict=True)
        ]
        found = schedule(self._policy, samples, losses, forward_only=False)
        norm = self._optimizer.step()[1]
        return sum(float(each["loss"]) for each in found) / len(samples), float(norm)


def copy_weights(source: Sequence[nn.Module], target: Sequence[nn.Module]) -> None:
    """Give a model the parameters of another of the same shape."""
    pairs = zip(*(chain.from_iterable(chunk.parameters() for chunk in each) for each in (source, target)), strict=True)
    with torch.no_grad():
        for one, other in pairs:
            other.copy_(one)


def encoder_of(model: Sequence[nn.Module]) -> nn.Module:
    """Return a model's vision encoder."""
    found = find_encoder(model)
    assert found is not None
    return found.model


def schedule(
    model: Sequence[nn.Module], samples: Sequence[Sample], losses: Sequence[LossOf], forward_only: bool
) -> list[Losses]:
    """Call megatron-core's schedule, a sample a microbatch; returns what the losses' functions returned beside them."""
    found: list[Losses] = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter(list(zip(samples, losses, strict=True))),
        model=list(model),
        num_microbatches=len(samples),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return found


def _forward_step(batches: Iterator[tuple[Sample, LossOf]], model: nn.Module) -> tuple[Tensor, LossOf]:
    sample, loss_of = next(batches)
    tokens = torch.tensor([sample.prompt + sample.response], device="cuda")
    losses = model(
        input_ids=tokens,
        position_ids=None,
        attention_mask=None,
        labels=tokens.roll(-1, 1),
        loss_mask=None,
        pixel_values=sample.pixels().cuda(),
        image_grid_thw=sample.grid_thw().cuda(),
    )
    # The loss of a token's position is that of the token after it.
    first = len(sample.prompt) - 1
    return -losses[0, first : first + len(sample.response)].float(), loss_of


def _keep_log_probs(log_probs: Tensor) -> tuple[Tensor, Losses]:
    return log_probs.sum(), {"log_probs": log_probs.detach().clone()}


def policy_loss(advantage: float, old: Tensor, reference: Tensor, log_probs: Tensor) -> tuple[Tensor, Losses]:
    """Return the loss of a response: its advantage by the ratio of probabilities, and a distance from the reference.

    Args:
        advantage: Of all tokens.
        old: `[tokens]` log-probabilities before the update.
        reference: The same by the reference.
        log_probs: The same by the policy.
    """
    apart = reference - log_probs
    loss = (KL * (apart.exp() - apart - 1) - advantage * (log_probs - old).exp()).mean()
    return loss, {"loss": loss.detach().clone()}


def train_words(words: Sequence[str]) -> None:
    """Make all rounds, as the words of a command line say; see `worker_arguments`."""
    args = worker_arguments(words)
    options = OPTIONS.get(args.train)
    (bridge_cg_plugin.deactivate if options is None else bridge_cg_plugin.activate)()
    join_alone()
    rounds = Rounds(options, args.seed)
    rounds.warm_up()
    write_rounds(args, rounds.run)
