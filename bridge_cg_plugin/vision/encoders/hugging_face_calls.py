"""What calls of Hugging Face's modules ask for."""

from typing import Any


def returns_an_object(others: dict[str, Any]) -> bool:
    """Whether further arguments of a Hugging Face module ask for its usual result and for nothing else."""
    asked = {name for name, value in others.items() if value is not None and value is not False}
    return asked <= {"return_dict"} and others.get("return_dict") is not False
