"""When buckets are recorded, and for which limits: options of vision graphs and of packed-sequence graphs."""

from typing import Any, Literal

from .declaration import option
from .errors import OptionError
from .values import bucket_limits, one_of

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


def limits_option() -> Any:
    """Declare which limits the named buckets have."""
    return option(
        None,
        bucket_limits,
        "LIST",
        "named buckets with the only limits to capture them for, joined by +",
        "As the report's line `next run` writes them. With None, a named bucket is captured for several limits",
        tuning=True,
    )


def check_limits(limits: tuple[tuple[int, ...], ...] | None, buckets: object, field: str, buckets_field: str) -> None:
    """Make sure that limits are of named buckets.

    Raises:
        OptionError: One is not.
    """
    for each in limits or ():
        if not isinstance(buckets, tuple) or each[0] not in buckets:
            written = "/".join(map(str, each))
            allowed = f"of a bucket of {buckets_field}"
            raise OptionError(field, written, allowed, f"Add {each[0]} to {buckets_field} or remove the limits.")
