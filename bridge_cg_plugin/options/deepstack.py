"""Qwen3-VL's deepstack features under sequence parallelism, whose gradients upstream does not sum over the ranks."""

from .facts import Facts
from .vision import PROVIDER_FIELDS

ALLREDUCE = PROVIDER_FIELDS["deepstack_gradient_allreduce"]
_PAGE = "docs/parallel.md#sequence-parallelism-and-deepstack"


def splits_deepstack(facts: Facts) -> bool:
    """Whether tensor-parallel ranks are known to hold different deepstack features.

    Args:
        facts: What decides it; unknown counts as no.
    """
    return (facts.tensor_ranks or 1) > 1 and bool(facts.sequence_parallel or facts.moe) and bool(facts.deepstack)


def deepstack_warnings(facts: Facts) -> tuple[str, ...]:
    """Return the warning for a run that trains its vision encoder with wrong gradients; empty if it does not.

    Args:
        facts: What decides it; what is unknown warns of nothing.
    """
    if not (splits_deepstack(facts) and facts.encoder_trained):
        return ()
    how = "mixture of experts, where Bridge sets sequence_parallel=true" if facts.moe else "sequence_parallel=true"
    return (
        f"tensor_model_parallel_size={facts.tensor_ranks} with {how}: the vision encoder is trained with wrong "
        "gradients, eager and on graphs, because upstream does not sum the gradients of the deepstack features over "
        f"the tensor-parallel ranks. Write {ALLREDUCE}=true; see {_PAGE}",
    )
