"""Configurations of a stand-in for Kimi K2.5's repository; field names are the repository's."""

from transformers import PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    """Configuration of the vision encoder: what `config.json` says of it."""

    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    """Configuration of the model."""

    model_type = "kimi_k25"

    def __init__(self, vision_config=None, **others):
        super().__init__(**others)
        self.vision_config = KimiK25VisionConfig(**(vision_config or {}))
