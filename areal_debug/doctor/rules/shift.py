"""Several metrics change their level in the same step: the run itself changed there."""

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import JUMPED
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import Floats, Series, running_medians

BESIDE = 5  # steps on each side whose medians are compared
SHIFTED = 6.0  # standard errors of that comparison
FALLEN = 2.0  # standard errors that the reward must lose at the same step
LEAST_SHIFT = 0.15  # of the level before
# With the least change that counts: near 0, spikes of the KL are large beside its noise.
WATCHED = {
    "entropy": 0.0, "length": 0.0, "grad_norm": 0.0, "reference_kl": 0.0, "approx_kl": 0.05, "clip_ratio": 0.0,
}  # fmt: skip


def level_shifts(run: Run) -> Alarm | None:
    """D42: the reward falls in the step in which another metric jumps to a new level."""
    reward = run.finite("reward")
    if len(reward.values) < 4 * BESIDE:
        return None
    lost = dict(zip(reward.steps[BESIDE:].tolist(), shifts(reward).tolist(), strict=False))
    jumps = {}
    for quantity, least in WATCHED.items():
        step = largest_jump(run.finite(quantity), least)
        if step is not None and lost.get(step, 0.0) < -FALLEN:
            jumps[quantity] = step
    if not jumps:
        return None
    first, step = next(iter(jumps.items()))
    series = run.finite(first)
    together = " and ".join(name.replace("_", " ") for name in jumps if jumps[name] == step)
    at = int(np.searchsorted(series.steps, step))
    before, after = np.median(series.values[at - BESIDE : at]), np.median(series.values[at : at + BESIDE])
    return alarm(
        "D42",
        series,
        found=f"{together} jumped (the first from {before:.3g} to {after:.3g}) and the reward fell, in one step",
        evidence=series.at(range(at - 2, at + 3)),
        since=step,
        step=step,
        before=step - 1,
    )


def shifts(series: Series) -> Floats:
    """Return the change of level at each step from the sixth on, in standard errors [n - 9]."""
    medians = running_medians(series.values, BESIDE)
    # 1.2533: standard error of a median over that of a mean
    error = max(1.2533 * series.noise * float(np.sqrt(2 / BESIDE)), 1e-12)
    found: Floats = (medians[BESIDE:] - medians[:-BESIDE]) / error
    return found


def largest_jump(series: Series, least: float) -> int | None:
    """Return the step of the largest change of level that happens in one step.

    None if none is large beside the noise and the level, or reaches `least`.
    """
    if len(series.values) < 4 * BESIDE:
        return None
    change, medians = shifts(series), running_medians(series.values, BESIDE)
    jump = np.diff(series.values)[BESIDE - 1 :][: len(change)]
    is_jump = (np.abs(jump) > JUMPED * max(series.noise, 1e-12)) & (np.sign(jump) == np.sign(change))
    enough = np.maximum(LEAST_SHIFT * np.abs(medians[:-BESIDE]), least)
    is_jump &= (np.abs(medians[BESIDE:] - medians[:-BESIDE]) > enough) & (np.abs(change) > SHIFTED)
    best = int(np.argmax(np.abs(jump) * is_jump))
    return int(series.steps[BESIDE + best]) if is_jump[best] else None


RULES = (level_shifts,)
