"""Batches as verl's engines take them, without padding: jagged tensors of samples, and images beside them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.performance.loops.samples import PAIR, Sample


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """Return one jagged tensor of rows."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch_of(samples: Sequence[Sample], old: Tensor | None = None, reference: Tensor | None = None) -> Any:
    """Return verl's `TensorDict` of samples.

    Args:
        samples: Of a round.
        old: Jagged log-probabilities of the responses' tokens by the policy before its update.
        reference: The same by the reference.
    """
    from verl.utils import tensordict_utils as tu

    prompts = [torch.tensor(sample.prompt) for sample in samples]
    responses = [torch.tensor(sample.response) for sample in samples]
    masks = jagged([torch.ones_like(each) for each in responses])
    advantages = [torch.full(each.shape, sample.advantage) for sample, each in zip(samples, responses, strict=True)]
    fields: dict[str, Any] = {
        "input_ids": jagged([torch.cat(both) for both in zip(prompts, responses, strict=True)]),
        "prompts": jagged(prompts),
        "responses": jagged(responses),
        "response_mask": masks,
        "loss_mask": masks.clone(),
        "advantages": jagged(advantages),
        "temperature": torch.ones(len(samples)),
        "multi_modal_inputs": [
            {"pixel_values": sample.pixels(), "image_grid_thw": sample.grid_thw()} for sample in samples
        ],
    }
    if old is not None:
        fields["old_log_probs"] = old
    if reference is not None:
        fields["ref_log_prob"] = reference
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": PAIR,
        "use_remove_padding": True,
        "calculate_entropy": False,
        "global_batch_size": len(samples),
    }
    return tu.get_tensordict(fields, settings)


def response_log_probs(output: Any, batch: Any) -> Tensor:
    """Return the jagged log-probabilities, on the CPU, of the responses' tokens in what an engine returned."""
    from verl.workers.utils.padding import response_from_nested

    found: Tensor = response_from_nested(output["model_output"]["log_probs"].cpu().float(), batch["response_mask"])
    return found
