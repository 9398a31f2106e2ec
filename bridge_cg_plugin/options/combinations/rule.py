"""What a refused combination of options is."""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import OptionError
from ..facts import Facts
from ..graph_options import GraphOptions


@dataclass(frozen=True, slots=True)
class Combination:
    """One combination that is refused.

    Attributes:
        what: The combination, in words.
        reason: Why it cannot work.
        finds: Whether options and facts are this combination.
        error: The field to change, its value, what is allowed and what to do.
        harmless: Whether upstream runs it, as if the option had not been given.
    """

    what: str
    reason: str
    finds: Callable[[GraphOptions, Facts], object]
    error: Callable[[GraphOptions, Facts], tuple[str, object, str, str]]
    harmless: bool = False

    def check(self, options: GraphOptions, facts: Facts) -> None:
        """Refuse options that are this combination.

        Raises:
            OptionError: They are.
        """
        if self.finds(options, facts):
            field, value, allowed, remedy = self.error(options, facts)
            raise OptionError(field, value, allowed, f"{self.reason}. {remedy}")
