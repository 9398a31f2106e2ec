"""Images that move between Megatron's data-parallel ranks: their groups."""

from typing import Literal

from torch import distributed, nn

from ...attention_bounds import deterministic
from ...options import PROVIDER_FIELDS, OptionError
from ...vision.adapter import EncoderFamily
from ...vision.balance.exchange import ImageExchange
from .process_groups import new_group


def image_exchange(
    model: nn.Module, family: EncoderFamily, share: float | Literal["auto"] | None
) -> ImageExchange | None:
    """Return how a vision model's data-parallel ranks level their work; None where nobody asked or there is one rank.

    Every rank of the group calls it, ranks of other pipeline stages need not.

    Args:
        model: The vision model.
        family: Its family.
        share: `vision_cuda_graph_balance`.

    Raises:
        OptionError: Images of this family cannot move, or times were to decide in a deterministic run.
    """
    if share is None:
        return None
    if family.movable is None:
        raise OptionError(
            PROVIDER_FIELDS["balance"],
            share,
            f"null with {family.name}'s encoder",
            "Its images stay on their ranks; unset the field.",
        )
    if share == "auto" and deterministic():
        raise OptionError(
            PROVIDER_FIELDS["balance"],
            share,
            "a number above 0 and below 1 with deterministic algorithms",
            f"Such a run must not decide by times: write {PROVIDER_FIELDS['balance']}=0.1, say.",
        )
    group = getattr(getattr(model, "pg_collection", None), "dp", None)
    if group is None or group.size() == 1:
        return None
    ranks = distributed.get_process_group_ranks(group)
    return ImageExchange(
        new_group(ranks, "gloo"),
        new_group(ranks, distributed.get_backend(group)),
        share,
        family.movable(model),
        lambda: any(parameter.requires_grad for parameter in model.parameters()),
    )
