"""What options raise and warn with."""


class OptionError(ValueError):
    """An option has a value that cannot work. The message names the field, the value, what is allowed, what to do."""

    def __init__(self, field: str, value: object, allowed: str, remedy: str) -> None:
        super().__init__(f"{field}={value!r}: allowed is {allowed}. {remedy}")
        self.field = field


class GraphOptionWarning(FutureWarning):
    """A deprecated spelling, an option without effect, or wrong gradients of upstream. Has what to write instead."""
