"""Configurations of a stand-in for Kimi K2.5's repository; field names are the repository's."""

from types import SimpleNamespace

from transformers import PretrainedConfig


class KimiK25Config(PretrainedConfig):
    """Configuration of the model: of its vision encoder and of its text model."""

    model_type = "kimi_k25"

    def __init__(self, vision_config=None, text_config=None, **others):
        self.vision_config = SimpleNamespace(**(vision_config or {}))
        self.text_config = SimpleNamespace(**(text_config or {}))
        super().__init__(**others)
