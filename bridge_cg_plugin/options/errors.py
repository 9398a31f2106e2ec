"""What options raise and warn with."""

from typing import Self


class OptionError(ValueError):
    """An option has a value that cannot work. The message names the field, the value, what it must be, what to do."""

    def __init__(self, field: str, value: object, allowed: str, remedy: str) -> None:
        super().__init__(f"Cannot use {field}={value!r}: it must be {allowed}. {remedy}")
        self.field = field

    @classmethod
    def because(cls, field: str, message: str) -> Self:
        """Return the error of a field with a message of its own: what cannot be done, why, and what to do."""
        error = cls.__new__(cls)
        ValueError.__init__(error, message)
        error.field = field
        return error

    @classmethod
    def unknown(cls, name: str, what: str, nearest: str = "") -> Self:
        """Return the error of a name that does not exist.

        Args:
            name: What was written.
            what: What it could have been, in words.
            nearest: The name that is most like it; empty where none is.
        """
        advice = f"Did you mean {nearest}?" if nearest else "Correct or remove it."
        return cls.because(name, f"Cannot use {name!r}: there is no such {what}. {advice}")


class GraphOptionWarning(FutureWarning):
    """A deprecated spelling, an option without effect, or wrong gradients of upstream. Has what to write instead."""
