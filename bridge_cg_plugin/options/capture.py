"""When buckets are recorded: an option of vision graphs and of packed-sequence graphs."""

from typing import Any, Literal

from .declaration import option
from .values import one_of

type CaptureMode = Literal["auto", "at_once", "on_demand"]


def on_demand(mode: CaptureMode, buckets: object) -> bool:
    """Whether buckets are recorded when microbatches ask for them."""
    return mode == "on_demand" or (mode == "auto" and buckets == "auto")


def capture_option() -> Any:
    """Declare when buckets are recorded."""
    return option(
        "auto",
        one_of(("auto", "at_once", "on_demand")),
        "WHEN",
        "when buckets are captured: auto, at_once or on_demand",
        "`at_once`: all buckets after warm-up. `on_demand`: the buckets of warm-up steps after warm-up, then at most "
        "one more before each step, if recent microbatches would gain more than its capture costs. Microbatches "
        "without a bucket run eager (`not_captured_yet`). `auto` is `at_once` for a list of buckets, `on_demand` for "
        "automatic ones",
        tuning=True,
    )
