"""Microbatches without an image, in which a model's encoder is not called, on ranks that others keep step with."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class TextOnlyMicrobatches:
    """Lets a model do in microbatches without an image what other ranks do for the encoder, at the same point.

    The token embedding, which every microbatch calls after the encoder, is where it shows that there was no image.

    Args:
        holder: The module that holds the vision model and the language model.
        vision_model: The vision model.
        gather: Waits for the encoder's parameters; None where nobody gathers them. Data-parallel ranks share a
            communicator, so all gather in one order, before anything of the language model's.
        take_part: Takes part in the exchange of images without one; returns what the loss must depend on. None where
            images stay on their ranks.
    """

    def __init__(
        self,
        holder: nn.Module,
        vision_model: nn.Module,
        gather: Callable[[], None] | None,
        take_part: Callable[[], Tensor | None] | None,
    ) -> None:
        self._gather, self._take_part = gather, take_part
        self._due = False
        embedding = getattr(getattr(holder, "language_model", None), "embedding", None)
        self._handles = []
        if embedding is not None:
            self._handles = [
                holder.register_forward_pre_hook(self._began),
                vision_model.register_forward_pre_hook(self._has_images),
                embedding.register_forward_pre_hook(self._before_embedding, prepend=True),
                embedding.register_forward_hook(self._embedded),
            ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _began(self, *unused: Any) -> None:
        self._due = True

    def _has_images(self, *unused: Any) -> None:
        self._due = False

    def _before_embedding(self, *unused: Any) -> None:
        if self._due and self._gather is not None:
            self._gather()

    def _embedded(self, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not self._due:
            return None
        self._due = False
        needed = self._take_part() if self._take_part is not None else None
        return None if needed is None else output + needed.to(output)
