"""Microbatches without an image, in which a model's encoder is not called, while parameters are gathered."""

from collections.abc import Callable
from typing import Any

from torch import nn


class TextOnlyMicrobatches:
    """Waits for the encoder's parameters in microbatches without an image where other ranks do in theirs.

    The token embedding, which every microbatch calls after the encoder, is where it shows that there was no image.

    Args:
        holder: The module that holds the vision model and the language model.
        vision_model: The vision model.
        gather: Waits for the encoder's parameters. Data-parallel ranks share a communicator, so all gather in one
            order, before anything of the language model's.
    """

    def __init__(self, holder: nn.Module, vision_model: nn.Module, gather: Callable[[], None]) -> None:
        self._gather, self._due = gather, False
        embedding = getattr(getattr(holder, "language_model", None), "embedding", None)
        self._handles = []
        if embedding is not None:
            self._handles = [
                holder.register_forward_pre_hook(self._began),
                vision_model.register_forward_pre_hook(self._has_images),
                embedding.register_forward_pre_hook(self._before_embedding, prepend=True),
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
        if self._due:
            self._due = False
            self._gather()
