"""What a worker of bench_vision.py measures."""

from dataclasses import dataclass

from scripts.performance.models.workloads import Grid


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker measures.

    Attributes:
        modes: Of one group.
        grids: Cases by name.
        out: The records' file.
        repeats: Timed runs of each measurement.
        case_seconds: When no further repeat of a measurement begins.
        seconds: For all of it.
    """

    modes: tuple[str, ...]
    grids: dict[str, Grid]
    out: str
    repeats: int
    case_seconds: float
    seconds: float
