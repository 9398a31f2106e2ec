"""What vision towers from Hugging Face have in common: where models hold them, calls, results."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ...options import OptionError
from ...upstream_types import UpstreamModule


def held_as(attribute: str, tower: str) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function that finds a tower in the module that holds it, or takes the tower itself; see `EncoderFamily`.

    Args:
        attribute: Under which a model holds it.
        tower: Its class; one derived from it is found as well.
    """

    def find(holder: nn.Module) -> nn.Module | None:
        for module in (getattr(holder, attribute, None), holder):
            if isinstance(module, nn.Module) and tower in {base.__name__ for base in type(module).__mro__}:
                return module
        return None

    return find


# What arguments ask for of a module's result, and its configuration where they do not.
OF_RESULT = ("return_dict", "output_hidden_states", "output_attentions")


def returns_an_object(model: UpstreamModule, others: dict[str, Any]) -> bool:
    """Whether a call of a Hugging Face module asks for its usual result and for nothing else.

    Args:
        model: The module.
        others: Further arguments.
    """
    by_default = {name: getattr(model.config, name, None) for name in OF_RESULT}
    asked = {**by_default, **{name: value for name, value in others.items() if value is not None}}
    as_object = asked.pop("return_dict") is not False
    return as_object and all(value is None or value is False for value in asked.values())


def result(**tensors: Any) -> Any:
    """Return what a tower's forward returns, with these tensors in it."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(**tensors)


def refuse_checkpointing(model: UpstreamModule) -> None:
    """Refuse a tower whose layers are recomputed in the backward.

    Raises:
        OptionError: It is one.
    """
    if getattr(model, "is_gradient_checkpointing", False):
        raise OptionError(
            "gradient_checkpointing",
            True,
            "false on a vision tower with vision_cuda_graph_impl=transformer_engine",
            "Call gradient_checkpointing_disable() on it: its activations live in the graph's memory.",
        )
