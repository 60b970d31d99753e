"""Groups and advantages that carry no gradient: all right, all wrong, or of equal reward."""

from typing import Literal

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import is_learning, is_solved
from areal_debug.doctor.series import FEWEST_STEPS, Series

Kind = Literal["right", "wrong", "mixed", "unknown"]

USUAL, MOST_ALIKE, TOO_MANY, NEARLY_ALL = 0.15, 0.5, 0.7, 0.8  # of the groups
SAME_KIND = 0.85  # share of such groups that are right, or wrong, to say so of all
MOST_ZERO = 0.1  # of the steps
VANISHED = 0.2  # of the first spread


def groups_are_alike(run: Run) -> Alarm | None:
    """D22: most groups have equal rewards, so their advantages are 0.

    Sound runs with small groups have up to two thirds of these from the start; where validation
    rises nearly all must be so.
    """
    alike = run.series.get("zero_variance_groups")
    if alike is None:
        return None
    series = alike.finite
    if not series.sustained(lambda value: value > MOST_ALIKE) and not series.throughout(
        lambda value: value > NEARLY_ALL
    ):
        return None
    kind, why = kind_of(run, series.last)
    if series.first > USUAL and series.last <= (NEARLY_ALL if is_learning(run) else TOO_MANY):
        return None
    is_grave = series.last > NEARLY_ALL and not series.is_short and kind != "right"
    begins = onset(series, "up")
    wasted = float(np.mean(series.since(begins).values))
    return alarm(
        "D22",
        series,
        found=f"median {series.last:.3g} of the groups in the last {series.window} steps (more than {MOST_ALIKE}){why}",
        severity="error" if is_grave else "warning",
        variant=kind,
        since=begins,
        cost=f"{100 * wasted:.0f} % of the samples since step {begins} gave no gradient",
    )


def kind_of(run: Run, alike: float) -> tuple[Kind, str]:
    """Return what groups of equal rewards have in common, and a phrase that says why.

    `alike` is the share of such groups. Counts of solved and failed groups decide where they are
    logged. Otherwise the reward on its scale does: groups that differ are taken to be half right.
    """
    solved, failed = run.series.get("solved_groups"), run.series.get("failed_groups")
    if solved is not None and failed is not None and len(solved.values) and len(failed.values):
        right = solved.finite.last / max(1e-12, solved.finite.last + failed.finite.last)
        why = f"; {solved.name} {solved.finite.last:.3g}, {failed.name} {failed.finite.last:.3g}"
    else:
        level = level_of_reward(run)
        if level is None:
            return "unknown", ""
        only = only_reward(run)
        if only is not None and (0 < level < 1 or "reward_max" not in run.series):
            return "unknown", f"; every reward is {only:.3g}"
        right = float(np.clip((level - (1 - alike) / 2) / max(alike, 1e-12), 0, 1))
        why = f"; the reward is at {level:.2f} of its scale"
    if right >= SAME_KIND:
        return "right", why
    return ("wrong" if right <= 1 - SAME_KIND else "mixed"), why


def level_of_reward(run: Run) -> float | None:
    """Return the last reward on the scale from all wrong (0) to all right (1); None if unknown.

    The scale is that of the logged extremes, or 0 to 1. Rewards above 1 are a sum: then the median
    counts as a share of the largest whole number below it.
    """
    reward = run.series.get("reward")
    if reward is None or len(reward.finite.values) < 2:
        return None
    level, extremes = reward.finite.last, extremes_of_reward(run)
    if extremes is not None:
        low, high = extremes
        top, bottom = float(np.max(high.values)), float(np.min(low.values))
    else:
        top, bottom = max(1.0, float(np.floor(level))), min(0.0, float(reward.finite.values.min()))
    return float(np.clip((level - bottom) / max(top - bottom, 1e-12), 0, 1))


def only_reward(run: Run) -> float | None:
    """Return the reward that all samples of the last steps have; None if they differ."""
    extremes = extremes_of_reward(run)
    if extremes is None:
        mean = run.series["reward"].finite.values
        is_one = np.ptp(mean) == 0 and mean[-1] not in (0.0, 1.0)  # a constant: its scale is unknown
        return float(mean[-1]) if is_one else None
    low, high = extremes
    return high.last if high.last == low.last else None


def extremes_of_reward(run: Run) -> tuple[Series, Series] | None:
    """Return the lowest and the highest reward of each step; None if not both are logged."""
    low, high = run.series.get("reward_min"), run.series.get("reward_max")
    return None if low is None or high is None else (low.finite, high.finite)


def advantages_vanish(run: Run) -> Alarm | None:
    """D33: the spread of advantages, or of rewards, falls to a fraction of what it was."""
    series = spread_of(run)
    if series is None or not series.fell(VANISHED) or is_solved(run):
        return None
    return alarm(
        "D33",
        series,
        found=f"median {series.last:.3g} in the last {series.window} steps, {series.first:.3g} at first",
        severity="error" if series.last < 0.5 * VANISHED * series.first else "warning",
        title="advantages" if "adv" in series.name else "rewards",
        since=onset(series, "down"),
    )


def spread_of(run: Run) -> Series | None:
    """Return the spread of advantages, or of rewards, of each step; None if neither is logged."""
    for name in ("advantage_std", "reward_std"):
        if name in run.series and len(run.series[name].finite.values) >= FEWEST_STEPS:
            return run.series[name].finite
    high, low = run.series.get("advantage_max"), run.series.get("advantage_min")
    if high is None or low is None or not np.array_equal(high.finite.steps, low.finite.steps):
        return None
    return Series(high.name, high.finite.steps, high.finite.values - low.finite.values)


def steps_without_gradient(run: Run) -> Alarm | None:
    """D34: the gradient norm of some steps is 0; if it is 0 at the end, that is D13."""
    norm = run.series.get("grad_norm")
    if norm is None or len(norm.finite.values) < FEWEST_STEPS:
        return None
    series = norm.finite
    zero = series.values == 0.0
    if series.resolution or series.is_zero or zero.sum() < 5 or zero.mean() <= MOST_ZERO:
        return None
    at = np.flatnonzero(zero)
    return alarm(
        "D34",
        norm,
        found=f"the norm is exactly 0 in {len(at)} of {len(zero)} steps ({100 * zero.mean():.0f} %)",
        severity="error" if zero.mean() > 0.5 else "warning",
        evidence=tuple((int(series.steps[i]), 0.0) for i in at[:8]),
        since=int(series.steps[at[0]]),
        cost=f"{len(at)} steps changed no weight",
        first=int(series.steps[at[0]]),
    )


RULES = (groups_are_alike, advantages_vanish, steps_without_gradient)
