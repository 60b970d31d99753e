"""Several metrics change their level in the same step: the run itself changed there."""

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import JUMPED
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import NOTHING, Floats, Series, medians_between, running_medians

BESIDE = 5  # steps on each side whose medians are compared
AROUND = 15  # steps on each side whose noise counts: it may grow, or end where values become 0
FAR_LARGER = 1.5  # times the noise of the run: 30 steps alone scatter by less
SHIFTED = 6.0  # standard errors of that comparison
FALLEN = 2.0  # standard errors that the reward must lose at the same step
LEAST_SHIFT = 0.15  # of the level before
MOST_JUMPS = 3  # upwards: more of them are blocks of data
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
        levels = jumps_of(run.finite(quantity), least)
        step = max(levels, key=lambda at: abs(levels[at][1] - levels[at][0]), default=-1)
        if lost.get(step, 0.0) < -FALLEN:
            jumps[quantity] = step, *levels[step]
    if not jumps:
        return None
    first, (step, before, after) = next(iter(jumps.items()))
    together = " and ".join(name.replace("_", " ") for name in jumps if jumps[name][0] == step)
    found = f"{together} jumped (the first from {before:.3g} to {after:.3g}) and the reward fell, in one step"
    return changed(run.finite(first), step, found)


def loss_jumps(run: Run) -> Alarm | None:
    """D42: a supervised loss jumps up, or falls and jumps back, in single steps inside an epoch.

    A loss that only falls in one step is sound: it does where an epoch begins.
    """
    loss, epoch = run.finite("loss"), run.by_name.get("epoch", NOTHING).finite
    if run.kind == "learning":
        return None
    turns = np.flatnonzero(np.diff(np.floor(epoch.values)) > 0)
    begins = set(epoch.steps[[*(turns + 1), *(turns + 2)[turns + 2 < len(epoch.steps)]]].tolist())
    jumps = {step: levels for step, levels in jumps_of(loss, 0.0).items() if step not in begins}
    up = [step for step, (before, after) in jumps.items() if after > before]
    if not 0 < len(up) <= MOST_JUMPS:
        return None
    step, (low, high) = up[0], jumps[up[0]]
    found = f"the loss jumped from {low:.3g} to {high:.3g} at step {step}"
    for at in [at for at in jumps if at < step and abs(jumps[at][0] - high) < LEAST_SHIFT * high][-1:]:
        step, found = at, f"it fell from {jumps[at][0]:.3g} to {jumps[at][1]:.3g} at step {at}; {found}"
    return changed(loss, step, found, "supervised")


def changed(series: Series, step: int, found: str, variant: str = "") -> Alarm:
    at = int(np.searchsorted(series.steps, step))
    evidence = series.at(range(at - 2, at + 3))
    return alarm("D42", series, found=found, variant=variant, evidence=evidence, since=step)


def shifts(series: Series) -> Floats:
    """Return the change of level at each step from the sixth on, in standard errors [n - 9]."""
    medians = running_medians(series.values, BESIDE)
    found: Floats = medians[BESIDE:] - medians[:-BESIDE]
    # 1.2533: of a median over that of a mean; 0.6745: of the changes themselves, if steps are correlated
    drawn = 1.2533 * noise_around(series) * float(np.sqrt(2 / BESIDE))
    found /= np.maximum(drawn, max(float(np.median(np.abs(found))) / 0.6745, 1e-12))
    return found


def noise_around(series: Series) -> Floats:
    """Return the noise at each step from the sixth on: that of the run, or if far larger, there [n - 9]."""
    steps, at = np.abs(np.diff(series.values)), np.arange(BESIDE - 1, len(series.values) - BESIDE)
    near = medians_between(steps, np.maximum(at - AROUND, 0), np.minimum(at + AROUND + 1, len(steps)))
    usual = max(series.noise, 1e-12)
    return np.where(near > FAR_LARGER * usual, near / 0.954, usual)


def jumps_of(series: Series, least: float) -> dict[int, tuple[float, float]]:
    """Return the steps in which the level changes, with the levels before and after.

    More than half of a change happens in one step; it is large beside the noise and the level, and
    reaches `least`.
    """
    if len(series.values) < 4 * BESIDE:
        return {}
    change, medians = shifts(series), running_medians(series.values, BESIDE)
    before, after = medians[:-BESIDE], medians[BESIDE:]
    jump = np.diff(series.values)[BESIDE - 1 :][: len(change)]
    is_jump = (np.abs(jump) > JUMPED * noise_around(series)) & (np.sign(jump) == np.sign(change))
    is_jump &= np.abs(jump) > np.abs(after - before) / 2
    is_jump &= (np.abs(after - before) > np.maximum(LEAST_SHIFT * np.abs(before), least)) & (
        np.abs(change) > SHIFTED
    )
    return {
        int(series.steps[BESIDE + at]): (float(before[at]), float(after[at]))
        for at in np.flatnonzero(is_jump)
    }


RULES = (level_shifts, loss_jumps)
