"""How long the waves of bench_parallel.py are expected to take, as lines to read."""

from collections.abc import Sequence

from scripts.performance.layouts.jobs import Job

# Waves whose processes import, or wait, while another trains.
AHEAD = 2
# Seconds, as one H200 took for `--small`.
IMPORT_S, SETUP_S, CAPTURE_S = 25.0, 8.0, 10.0
MICROBATCH_S = {"eager": 0.27, "graphs": 0.175}


def expected_s(job: Job) -> float:
    """Return the seconds that a run is expected to take once its processes have imported.

    A step takes as long as its microbatches, in every layout: where the host is the limit, that is near. Ranks that
    share a GPU take turns.
    """
    steps = job.steps * job.microbatches * MICROBATCH_S[job.told] * job.sharing
    return SETUP_S + steps + (CAPTURE_S if job.told == "graphs" else 0.0)


def expected_times(waves: Sequence[Sequence[Job]]) -> list[tuple[float, float]]:
    """Return when each wave is expected to begin and to end, in seconds."""
    times: list[tuple[float, float]] = []
    for number, wave in enumerate(waves):
        imported = IMPORT_S + (times[number - AHEAD][0] if number >= AHEAD else 0.0)
        begin = max(imported, times[-1][1] if times else 0.0)
        times.append((begin, begin + max(map(expected_s, wave))))
    return times


def plan(waves: Sequence[Sequence[Job]], seconds: float) -> list[str]:
    """Return a line for each wave: when it is expected, its runs and their GPUs, and what is recorded after it.

    Args:
        waves: The runs.
        seconds: When runs that have not ended are ended.
    """
    last = {job.case: number for number, wave in enumerate(waves) for job in wave}
    lines, late = [], []
    for number, (wave, (begin, end)) in enumerate(zip(waves, expected_times(waves), strict=True)):
        runs = ", ".join(f"{job} on {_gpus(job.devices)}" for job in wave)
        ended = [str(layout) + (" slots" if slots else "") for (layout, slots), at in last.items() if at == number]
        lines.append(f"{begin:4.0f} to {end:4.0f} s: {runs}" + (f"; recorded: {', '.join(ended)}" if ended else ""))
        late += ended if end > seconds else []
    if late:
        lines.append(f"not through after {seconds:.0f} s: {', '.join(late)}; give more --seconds or fewer --layouts")
    return lines


def _gpus(devices: Sequence[int]) -> str:
    return f"GPU {devices[0]}" if len(devices) == 1 else f"GPUs {devices[0]} to {devices[-1]}"
