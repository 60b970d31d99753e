"""Several metrics change their level in the same step: the run itself changed there."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import Floats, Series

BESIDE = 5  # steps on each side whose medians are compared
SHIFTED = 6.0  # standard errors of that comparison
JUMPED = 4.0  # times the noise, from one step to the next
FALLEN = 2.0  # standard errors that the reward must lose at the same step
LEAST_SHIFT = 0.15  # of the level before
# With the least change that counts: near 0, spikes of the KL are large beside its noise.
WATCHED = {
    "entropy": 0.0, "length": 0.0, "grad_norm": 0.0, "reference_kl": 0.0, "approx_kl": 0.05, "clip_ratio": 0.0,
}  # fmt: skip


def level_shifts(run: Run) -> Alarm | None:
    """D42: the reward falls in the step in which another metric jumps to a new level."""
    reward = run.series.get("reward")
    if reward is None or len(reward.finite.values) < 4 * BESIDE:
        return None
    lost = dict(zip(reward.finite.steps[BESIDE:].tolist(), shifts(reward.finite).tolist(), strict=False))
    jumps = {}
    for quantity, least in WATCHED.items():
        series = run.series.get(quantity)
        if series is not None and len(series.finite.values) >= 4 * BESIDE:
            step, size = largest_jump(series.finite, least)
            if size > 0 and lost.get(step, 0.0) < -FALLEN:
                jumps[quantity] = (step, series.finite)
    if not jumps:
        return None
    step, series = next(iter(jumps.values()))
    at = int(np.searchsorted(series.steps, step))
    before, after = np.median(series.values[at - BESIDE : at]), np.median(series.values[at : at + BESIDE])
    return alarm(
        "D42",
        series,
        found=f"{' and '.join(jumps)} jumped (the first from {before:.3g} to {after:.3g}) and the reward fell, in one step",
        evidence=tuple((int(series.steps[i]), float(series.values[i])) for i in range(at - 2, at + 3)),
        since=step,
        step=step,
        before=step - 1,
    )


def shifts(series: Series) -> Floats:
    """Return the change of level at each step from the sixth on, in standard errors [n - 9]."""
    medians = np.median(sliding_window_view(series.values, BESIDE), axis=1)
    # 1.2533: standard error of a median over that of a mean
    error = max(1.2533 * series.noise * float(np.sqrt(2 / BESIDE)), 1e-12)
    found: Floats = (medians[BESIDE:] - medians[:-BESIDE]) / error
    return found


def largest_jump(series: Series, least: float) -> tuple[int, float]:
    """Return the step of the largest change of level that happens in one step, and its size.

    The size is 0 if none is large beside the noise and the level, or reaches `least`.
    """
    change = shifts(series)
    inner = slice(BESIDE, BESIDE + len(change))
    jump = (series.values[1:] - series.values[:-1])[BESIDE - 1 : BESIDE - 1 + len(change)]
    medians = np.median(sliding_window_view(series.values, BESIDE), axis=1)
    is_jump = np.abs(jump) > JUMPED * max(series.noise, 1e-12)
    enough = np.maximum(LEAST_SHIFT * np.abs(medians[:-BESIDE]), least)
    is_jump &= np.abs(medians[BESIDE:] - medians[:-BESIDE]) > enough
    sizes = np.where(is_jump & (np.sign(jump) == np.sign(change)), np.abs(change), 0.0)
    best = int(np.argmax(sizes))
    return int(series.steps[inner][best]), float(sizes[best]) if sizes[best] > SHIFTED else 0.0


RULES = (level_shifts,)
