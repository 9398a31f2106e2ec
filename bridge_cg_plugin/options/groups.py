"""All graph options that are declared."""

from .choice import CHOICE
from .language_model import LANGUAGE_MODEL
from .offload import OFFLOAD
from .packed import PACKED
from .vision import VISION

GROUPS = (CHOICE, LANGUAGE_MODEL, VISION, PACKED, OFFLOAD)

# Field that holds a mapping of tuning values -> its group.
TUNING = {group.tuning: group for group in GROUPS if group.tuned}


def split_name(name: str) -> tuple[list[str], str]:
    """Return the sections of a dotted name and its field, which has a mapping's name in front for a tuning value."""
    *path, field = name.split(".")
    if path and path[-1] in TUNING:
        field = f"{path.pop()}.{field}"
    return path, field


def tuning_of(field: str) -> str:
    """Return the mapping that a field is, or is a value of; empty for other fields."""
    mapping = field.partition(".")[0]
    return mapping if mapping in TUNING else ""
