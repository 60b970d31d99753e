"""Groups and advantages that carry no gradient: all right, all wrong, or of equal reward."""

from typing import Literal

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import is_learning, is_solved
from areal_debug.doctor.series import NOTHING, Series

Kind = Literal["right", "wrong", "mixed", "unknown"]

USUAL, MOST_ALIKE, TOO_MANY, NEARLY_ALL = 0.15, 0.5, 0.7, 0.8  # of the groups
SAME_KIND = 0.85  # share of such groups that are right, or wrong, to say so of all
MOST_ZERO = 0.1  # of the steps
VANISHED = 0.2  # of the first spread
FINE = 1e-3  # a spread of rewards that is printed so finely as 0 is 0


def groups_are_alike(run: Run) -> Alarm | None:
    """D22: most groups have equal rewards, so their advantages are 0.

    Sound runs with small groups have up to two thirds of these from the start; where validation
    rises nearly all must be so.
    """
    series = share_alike(run)
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
        found=f"share of such groups: {series.ending} (limit {MOST_ALIKE}){why}",
        severity="error" if is_grave else "warning",
        variant=kind,
        since=begins,
        cost=f"{100 * wasted:.0f} % of the samples since step {begins} gave no gradient",
    )


def share_alike(run: Run) -> Series:
    """Return the share of groups with equal rewards; 1 or 0 where only the spread of all is logged.

    A spread, or a distance from the lowest reward to the highest, of 0 leaves no group that differs.
    """
    shares, spread = run.finite("zero_variance_groups"), run.finite("reward_std")
    if not len(spread.values):
        spread = distance(run, "reward_min", "reward_max")
    if len(shares.values) or spread.resolution > FINE:
        return shares
    return Series(spread.name, spread.steps, (spread.values == 0.0).astype(np.float64))


def distance(run: Run, lowest: str, highest: str) -> Series:
    """Return how far two quantities are apart in each step; empty if not both are logged."""
    low, high = run.finite(lowest), run.finite(highest)
    if not np.array_equal(low.steps, high.steps):
        return NOTHING
    return Series(high.name, high.steps, high.values - low.values)


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

    The scale is that of the logged extremes, or 0 to 1; one step alone shows none. Rewards above 1
    are a sum: then the median counts as a share of the largest whole number below it.
    """
    reward, low, high = (run.finite(name) for name in ("reward", "reward_min", "reward_max"))
    if not len(reward.values) or (len(reward.values) == 1 and reward.last not in (0.0, 1.0)):
        return None
    level = reward.last
    top, bottom = max(1.0, float(np.floor(level))), min(0.0, float(reward.values.min()))
    if len(low.values) and len(high.values):
        top, bottom = float(np.max(high.values)), float(np.min(low.values))
    return float(np.clip((level - bottom) / max(top - bottom, 1e-12), 0, 1))


def only_reward(run: Run) -> float | None:
    """Return the reward that all samples of the last steps have; None if they differ."""
    low, high, mean = (run.finite(name) for name in ("reward_min", "reward_max", "reward"))
    if len(low.values) and len(high.values):
        return high.last if high.last == low.last else None
    is_one = np.ptp(mean.values) == 0 and mean.last not in (0.0, 1.0)  # a constant: its scale is unknown
    return mean.last if is_one else None


def advantages_vanish(run: Run) -> Alarm | None:
    """D33: the spread of advantages, or of rewards, falls to a fraction of what it was."""
    series = spread_of(run)
    what = "largest minus smallest: " if series.name == run.finite("advantage_max").name else ""
    is_zero = series.is_zero and share_alike(run).holds(lambda value: value <= MOST_ALIKE)  # else D22
    if is_solved(run) or not (is_zero or series.fell(VANISHED)):
        return None
    return alarm(
        "D33",
        series,
        found=what + series.change,
        severity="error" if series.last < 0.5 * VANISHED * series.first else "warning",
        title="zero" if is_zero else "advantages" if "adv" in series.name else "rewards",
        evidence=run.by_name[series.name].finite.tail(),
        since=onset(series, "down"),
    )


def spread_of(run: Run) -> Series:
    """Return the spread of advantages, or of rewards, of each step; empty if neither is logged.

    Advantages are scaled to a spread of about 1: extremes that are printed as 0.000 are 0.
    """
    extremes = distance(run, "advantage_min", "advantage_max")
    logged = (run.finite(name) for name in ("advantage_std", "reward_std"))
    return extremes if extremes.is_zero else next((one for one in logged if not one.is_short), extremes)


def steps_without_gradient(run: Run) -> Alarm | None:
    """D34: the gradient norm of some steps is 0; if it is 0 at the end, that is D13."""
    series = run.finite("grad_norm")
    zero = series.values == 0.0
    if series.is_short or series.resolution or series.is_zero or zero.sum() < 5 or zero.mean() <= MOST_ZERO:
        return None
    at = np.flatnonzero(zero)
    return alarm(
        "D34",
        series,
        found=f"the norm is exactly 0 in {len(at)} of {len(zero)} steps ({100 * zero.mean():.0f} %)",
        severity="error" if zero.mean() > 0.5 else "warning",
        evidence=series.at(at[:8]),
        since=int(series.steps[at[0]]),
    )


RULES = (groups_are_alike, advantages_vanish, steps_without_gradient)
