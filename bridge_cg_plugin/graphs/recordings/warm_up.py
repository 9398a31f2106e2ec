"""How far a recording is warmed up: new shapes need a brief pass, as long as nothing else is new."""

from collections.abc import Callable

from ...announce import LOGGER
from ..errors import CaptureError, OutOfMemoryInCapture, release_frames
from ..planning.buckets import Bucket


def record_warmed_up(record: Callable[[bool], None], warm: bool, name: str, bucket: Bucket) -> None:
    """Record, warmed up briefly where only shapes should be new, and fully where that proves wrong.

    Args:
        record: Records; is told whether briefly.
        warm: Whether something like it was recorded before.
        name: Of the region, for the log.
        bucket: What is recorded.

    Raises:
        CaptureError: It failed warmed up fully, or for lack of memory.
    """
    if warm:
        try:
            return record(True)
        except OutOfMemoryInCapture:
            raise
        except CaptureError as error:
            LOGGER.info("%s: bucket %s needs whole warm-up passes: %s", name, bucket, error)
            release_frames(error)  # which hold the recording that is thrown away; the next one takes its memory
    return record(False)
