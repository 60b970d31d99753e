"""Supervised losses that do not fall, overfitting, and preference training that goes wrong.

A run with a reward is judged by the reward: the level of a policy-gradient loss has no meaning.
"""

import re

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import ENOUGH_STEPS, is_lost_in_scatter
from areal_debug.doctor.series import FEWEST_STEPS, Floats, Series, running_medians

MEDIAN_OF = 3  # measurements of held-out rows
# Share of the best held-out loss. The trend starts at the minimum, so significance is not enough.
CLEAR_SHARE = 0.05
FEW_MEASUREMENTS, CLEAR_SHARE_OF_FEW = 12, 0.1
STEPS_OF_A_PEAK = 5
EXPLODED = 2.0  # times the first loss
NEARLY_AS_FAR = 2 / 3  # of the fall of rejected answers
LEAST_FALL, CLEAR_FALL, LEAST_LEARNED = 0.005, 0.1, 0.2  # of the first loss
SCALE = re.compile(r"(?i)loss[ _]?scale(?![a-z])")  # of fp16: at 1 each gradient overflows
UNDERFLOW = 1e-6  # a gradient norm: half precision rounds its elements to 0


def loss_does_not_fall(run: Run) -> Alarm | None:
    """D06: the 95 % interval of the loss's trend includes 0, or its fall is next to nothing."""
    loss = run.finite("loss")
    found = loss.trend
    if "reward" in run.series or found is None or is_lost_in_scatter(loss, found.change):
        return None
    least = LEAST_FALL if found.falls else CLEAR_FALL  # single rows scatter by more than the fall
    if found.high < 0 and -found.change > least * abs(loss.first):
        return None
    start = float(np.median(loss.values[:MEDIAN_OF]))
    if not found.rises and start - loss.last > max(4 * loss.deviation, LEAST_LEARNED * start):
        return None  # it fell at once
    held_out = run.finite("eval_loss").trend
    if held_out is not None and held_out.falls and not found.rises:
        return None  # each row is new in a single epoch: the training loss scatters by more than it falls
    if loss.is_late_level or loss_explodes(run) is not None:
        return None
    norm, scale = (
        run.finite("grad_norm").last,
        [one for name, one in run.by_name.items() if SCALE.search(name)],
    )
    underflows = norm < UNDERFLOW or any(one.finite.sustained(lambda value: value <= 1) for one in scale)
    return alarm(
        "D06",
        loss,
        found=found.describe(len(loss.values))
        + (f"; the gradient norm is {norm:.2g}" if norm < UNDERFLOW else ""),
        severity="error" if found.rises else "warning",
        variant="underflow" if underflows else "",
        title="rises" if found.rises else "flat",
        since=onset(loss, "up"),
    )


def loss_explodes(run: Run) -> Alarm | None:
    """D41: the loss rose to twice where it began, or fell and lost it, all for a time or half to the end."""
    series = run.finite("loss")
    if "reward" in run.series or len(series.values) < FEWEST_STEPS:
        return None
    is_young = len(series.values) < ENOUGH_STEPS  # then each row counts
    medians = running_medians(series.values, 1 if is_young else STEPS_OF_A_PEAK)
    start = float(np.median(series.values[:MEDIAN_OF]))
    had_fallen = start - np.minimum.accumulate(medians) > max(4 * series.deviation, LEAST_LEARNED * start)
    exploded = max(EXPLODED * start, start + 4 * series.noise)  # single rows scatter as much
    high = np.where(had_fallen | (medians >= exploded), medians, 0.0)
    highest = int(np.argmax(high))
    exceeds = start > 0 and high[highest] > start and not is_young
    if not exceeds and not (start > 0 and loses_half(series, medians, start)):
        return None
    lowest = int(np.argmin(medians[: highest + 1] if exceeds else medians))
    highest = highest if exceeds else lowest + int(np.argmax(medians[lowest:]))
    at, explodes = int(series.steps[highest]), exceeds and medians[highest] >= exploded
    limit = exploded if explodes else start if exceeds else (start + medians[lowest]) / 2
    beyond = int(series.steps[lowest + np.argmax(series.values[lowest:] > limit)])
    begins = min(beyond, onset(series.since(int(series.steps[lowest])), "up"))
    return alarm(
        "D41",
        series,
        found=(
            f"{start:.4g} at first, {medians[lowest]:.4g} at its lowest before, {medians[highest]:.4g} around "
            f"step {at}, {series.last:.4g} at the end"
        ),
        severity="error" if series.last > start else "warning",
        title="explodes" if explodes else "back" if exceeds else "lost",
        evidence=((beyond, float(series.values[np.searchsorted(series.steps, beyond)])), *series.tail(3)),
        since=begins,
        beyond=beyond,
    )


def loses_half(series: Series, medians: Floats, start: float) -> bool:
    """Return whether a loss ends above twice its lowest, and by half of what it had fallen.

    Few rows must rise from the lowest to the end, in each of three or more.
    """
    lowest = int(np.argmin(medians))
    least = max(EXPLODED * medians[lowest], (start + medians[lowest]) / 2)
    if len(series.values) < ENOUGH_STEPS:
        risen = series.values[lowest:]
        return len(risen) > MEDIAN_OF and bool((np.diff(risen) > 0).all()) and risen[-1] > least
    return series.sustained(lambda value: value > max(least, medians[lowest] + 4 * series.noise))


def held_out_loss_rises(run: Run) -> Alarm | None:
    series, trained = run.finite("eval_loss"), run.finite("loss").trend
    risen = rise_of_held_out(series)
    if risen is None or (trained is not None and trained.rises):
        return None
    best, lowest, change = risen
    meanwhile = "" if trained is None else f"; that of training by {trained.change:+.3g} over the run"
    at = int(series.steps[best])
    found = f"around step {at} it was {lowest:.4g}, from there it changes by {change:+.3g}{meanwhile}"
    return alarm("D07", series, found=found, evidence=((at, lowest), *series.tail(3)), since=at, end=at + 1)


def rise_of_held_out(series: Series) -> tuple[int, float, float] | None:
    """Return the index and value of the lowest held-out loss, and its rise since; None without one.

    Few measurements have no trend: each of the last three must then exceed the lowest clearly.
    """
    if len(series.values) < FEW_MEASUREMENTS:
        best = int(np.argmin(series.values)) if len(series.values) else 0
        since = series.values[best + 1 :]
        if len(since) < MEDIAN_OF or min(since[-MEDIAN_OF:]) < (1 + CLEAR_SHARE_OF_FEW) * series.values[best]:
            return None
        return best, float(series.values[best]), float(since[-1] - series.values[best])
    medians = running_medians(series.values, MEDIAN_OF)
    best, lowest = int(np.argmin(medians)) + MEDIAN_OF // 2, float(medians.min())
    if len(series.values) - best < 2 * series.window:
        return None
    found = Series(series.name, series.steps[best:], series.values[best:]).trend
    if found is None or not found.rises or found.change < max(CLEAR_SHARE * abs(lowest), 2 * found.scatter):
        return None
    return best, lowest, found.change


def chosen_answers_lose_probability(run: Run) -> Alarm | None:
    """D09: DPO lowers both likelihoods, the chosen one to below that of the reference.

    It lowers that of chosen answers a little in most runs: where the rejected ones are logged,
    the chosen ones must have fallen nearly as far.
    """
    chosen, rejected = run.finite("chosen_reward"), run.finite("rejected_reward")
    fall = chosen.trend
    if fall is None or not fall.falls or not chosen.sustained(lambda value: value < 0):
        return None
    # without a reference (SimPO, ORPO) they do not begin at 0
    start = [float(np.median(one.values[:MEDIAN_OF])) for one in (chosen, rejected) if len(one.values)]
    if len(start) > 1 and chosen.last - start[0] >= NEARLY_AS_FAR * (rejected.last - start[1]):
        return None
    found = (
        f"their reward changes by {fall.change:+.3g} over the run and is {chosen.last:.3g} at the end; "
        "below 0 the policy likes them less than its reference does"
    )
    return alarm("D09", chosen, found=found, since=onset(chosen, "down"))


def policy_is_the_reference(run: Run) -> Alarm | None:
    """D50: rewards of chosen and rejected answers are always 0, and log-probs too, or gradients are not."""
    both, norm = [run.finite(f"{side}_reward") for side in ("chosen", "rejected")], run.finite("grad_norm")
    known = all(len(one.values) >= FEWEST_STEPS and not one.resolution for one in both)
    answers = [one for name, one in run.by_name.items() if "logps/" in name]
    is_masked = bool(answers) and not any(one.values.any() for one in answers)
    moves = norm.sustained(lambda value: value > 0)
    if not known or not (moves or is_masked) or any(one.values.any() for one in both):
        return None
    names = " and ".join(one.name for one in (both + answers if is_masked else both))
    found = (
        f"{names} are 0 in all {len(both[0].values)} steps"
        + f", the gradient norm is {norm.last:.2g}" * moves
    )
    variant = "masked" if is_masked else ""
    return alarm("D50", both[0], found=found, variant=variant, since=int(both[0].steps[0]))


RULES = (
    policy_is_the_reference,
    loss_explodes,
    loss_does_not_fall,
    held_out_loss_rises,
    chosen_answers_lose_probability,
)
