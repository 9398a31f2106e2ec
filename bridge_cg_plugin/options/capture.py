"""When buckets are recorded: an option of vision graphs and of packed-sequence graphs."""

from typing import Any

from .declaration import option
from .values import one_of


def capture_option() -> Any:
    """Declare when buckets are recorded."""
    return option(
        "at_once",
        one_of(("at_once", "on_demand")),
        "WHEN",
        "when buckets are recorded: at_once or on_demand",
        "`at_once`: after warm-up, for all that may come. `on_demand`: after warm-up what warm-up steps showed, and "
        "before each later step one more bucket at most, where microbatches of late would save more by it than it "
        "takes. Limits then take no memory, and what has no bucket yet runs eager (`not_captured_yet`)",
        tuning=True,
    )
