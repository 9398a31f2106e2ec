"""All graph options that are declared."""

from .language_model import LANGUAGE_MODEL
from .offload import OFFLOAD
from .packed import PACKED
from .vision import VISION

GROUPS = (LANGUAGE_MODEL, VISION, PACKED, OFFLOAD)
