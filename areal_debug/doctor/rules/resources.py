"""Steps that take longer than their tokens explain, and memory that grows until it runs out."""

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run

SLOWER = 1.5
UNEXPLAINED = 1.25  # factor of a step's time that longer completions do not explain
CREEP = 0.15  # growth of memory over the run, as a share of the beginning
LONG_ENOUGH = 30  # steps: memory rises while buffers fill


def steps_get_slower(run: Run) -> Alarm | None:
    """D36: steps take longer, and completions did not grow by as much."""
    series, length = run.finite("step_time"), run.finite("length")
    if not series.rose(SLOWER):
        return None
    slower = series.last / series.first
    longer = max(1.0, length.last / length.first) if length.first > 0 else 1.0
    if slower < UNEXPLAINED * longer:
        return None
    found = (
        f"{series.first:.3g} s a step at first, {series.last:.3g} s in the last {series.window} steps ({slower:.2f} times)"
        + (f", {longer:.2f} times by longer completions" if longer > 1.05 else "")
    )
    return alarm("D36", series, found=found, since=onset(series, "up", in_ratios=True))


def memory_creeps(run: Run) -> Alarm | None:
    """D37: memory grows from step to step and does not level off."""
    for name in ("host_memory", "device_memory"):
        series = run.finite(name)
        if len(series.values) < LONG_ENOUGH:
            continue
        half = series.since(int(series.steps[len(series.steps) // 2]))
        found, late = series.trend, half.trend
        if found is None or late is None or not (found.rises and late.rises):
            continue
        if found.change < CREEP * series.first or late.change < found.change / 3:
            continue
        a_step = late.change / max(1.0, float(half.steps[-1] - half.steps[0]))
        doubled = int(series.steps[-1] + series.last / a_step)
        return alarm(
            "D37",
            series,
            found=f"{series.first:.4g} at first, {series.last:.4g} at the end, {a_step:.3g} a step without levelling off",
            since=onset(series, "up"),
            memory=name.replace("_", " "),
            doubled=doubled,
        )
    return None


RULES = (steps_get_slower, memory_creeps)
