"""The provider of the model in `mean_encoder`, which imports nothing of the plugin."""

from dataclasses import dataclass


@dataclass
class MeanProvider:
    """Describes the model."""

    patches: int = 4
