"""The largest attention logits, which megatron-core's attention leaves in a Python attribute."""

from collections.abc import Sequence

from torch import nn

from ...graphs.errors import CaptureError
from ...graphs.modules import every_module

# Fields of a transformer config that ask for them. Releases without a field do not have the statistics.
FIELDS = ("qk_clip", "log_max_attention_logit")
# Megatron-core's attention modules have this child, which has the statistics.
ATTENDS = "core_attention"


def refuse_statistics(modules: Sequence[nn.Module]) -> None:
    """Refuse to record attention whose largest logits somebody reads after each forward: a replay sets no attribute.

    Other modules' configs say nothing: attention around them runs eager.

    Args:
        modules: Roots of what is recorded.

    Raises:
        CaptureError: A config of attention asks for them.
    """
    attentions = [module for module in every_module(modules) if hasattr(module, ATTENDS)]
    configs = {id(module.config): module.config for module in attentions}
    for config in configs.values():
        for field in FIELDS:
            if getattr(config, field, False):
                raise CaptureError(
                    f"{field}=true reads the largest attention logits that every forward leaves in an attribute, which "
                    f"a graph does not set; write {field}=false to have graphs"
                )
