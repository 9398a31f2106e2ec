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
        "when buckets are captured: at_once or on_demand",
        "`at_once`: all buckets after warm-up. `on_demand`: the buckets of warm-up steps after warm-up, then at most "
        "one more before each step, if recent microbatches would gain more than its capture costs. Microbatches "
        "without a bucket run eager (`not_captured_yet`)",
        tuning=True,
    )
