"""Samples that grow longer without reward, are stale, fail, or carry wrong logprobs."""

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import ENOUGH_STEPS, is_learning, left_behind, rises
from areal_debug.doctor.rules.mismatch import explain_growth
from areal_debug.doctor.series import NOTHING, Series, binned

EXPLODES = 3.0  # times the first length
DOUBLES = 2.0
TOO_MANY_CUT = 0.1  # share of the completions, of a run that learns
AFTER_A_START = 0.15  # share of the run: growth that begins later is a change, not the recipe
FAR_BEYOND = 10.0  # times the limit: a steady level below that is a warning, some runs learn at it
LEAST_KL = 0.0007  # of logprobs that differ by 0.03 on average, if normal
TOGETHER = 0.9  # correlation of reward and length since the onset


def grows_longer(run: Run) -> Alarm | None:
    """D21: completions grow for nothing, for a reward that validation lacks, or explode."""
    length, gains = run.finite("length"), run.finite("reward").trend
    grows = length.trend
    if grows is None or gains is None or not length.rose(1.25):
        return None
    begins = onset(length, "up", in_ratios=True)
    for_nothing = grows.rises and not gains.rises and not rises(run, "eval_reward")
    kind = why_longer(run, begins, for_nothing)
    if kind is None:
        return None
    title, detail = kind
    found = (
        f"median {length.first:.0f} tokens at first, {length.last:.0f} at the end, the reward changed "
        f"by {gains.change:+.3g}{detail}"
    )
    return alarm("D21", length, found=found, title=title, since=begins)


def why_longer(run: Run, begins: int, for_nothing: bool) -> tuple[str, str] | None:
    """Return which title a length that grew has, and a phrase with the evidence; None if it may.

    Completions may grow while the reward rises: reasoning gets longer. They may not if validation
    stays behind, if samples are cut off increasingly, or if the length departs from a level in
    mid-run and the reward follows it from that step on without validation to show for it.
    """
    length, reward = run.series["length"].finite, run.series["reward"].finite
    validation, cut = run.series.get("eval_reward"), run.series.get("no_eos")
    factor = length.last / max(length.first, 1e-12)
    if for_nothing:
        return "nothing", ""
    behind = left_behind(reward, validation.finite) if validation is not None else None
    if factor >= 1.5 and behind is not None:
        return "rewarded", f", validation by {behind[1]:+.3g}"
    least = TOO_MANY_CUT if is_learning(run) else 0.02
    if factor >= EXPLODES and cut is not None and cut.finite.rose(EXPLODES) and cut.finite.last > least:
        return "explodes", f"; {cut.finite.last:.3g} are cut off, {cut.finite.first:.3g} at first"
    is_checked = validation is not None and validation.finite.trend is not None
    later, paid = length.since(begins), reward.since(begins)
    start = begins - int(length.steps[0])
    if is_checked or factor < DOUBLES or len(later.values) < 10 or len(later.values) != len(paid.values):
        return None
    steady = length.values[length.steps < begins]
    if (
        start < AFTER_A_START * (length.steps[-1] - length.steps[0])
        or np.ptp(np.array_split(steady, 2)[1]) > length.last - length.first
    ):
        return None
    together = float(np.corrcoef([binned(one, len(one.values) // 5)[1] for one in (later, paid)])[0, 1])
    if together < TOGETHER:
        return None
    return (
        "perhaps_rewarded",
        f"; since step {begins} they correlate with {together:.2f}, and no validation shows that it is learning",
    )


def samples_are_old(run: Run) -> Alarm | None:
    """D23: staleness grows, or exceeds its limit."""
    allowed, series = run.config.get("rollout.max_head_offpolicyness"), run.finite("staleness")
    beyond = allowed is not None and series.sustained(lambda value: value > allowed)
    trend = series.trend
    grows = trend is not None and trend.rises and trend.change > 1
    if not beyond and not (grows and series.last > 2):
        return None
    found = series.change + (f"; rollout.max_head_offpolicyness is {allowed}" if allowed is not None else "")
    severity, title = ("error", "beyond") if beyond else ("warning", "grows")
    return alarm("D23", series, found=found, severity=severity, title=title, since=onset(series, "up"))


def measured_difference(run: Run) -> tuple[Series, float]:
    """Return how far engine and trainer are apart, and its limit; an empty series if unknown.

    The KL divergence of the decoupled loss is one where no sample is stale: there it compares the
    same weights, and is half the square of the difference.
    """
    both = [(run.finite(name), limit) for name, limit in (("logprob_difference", 0.03), ("k3", 0.015))]
    if logged := [(series, limit) for series, limit in both if len(series.values)]:
        return max(logged, key=lambda one: one[0].last / one[1])  # a difference of probabilities is small
    divergence, lag = run.finite("behave_kl"), run.finite("staleness").values
    if not len(lag) or lag.max() > 0:
        return NOTHING, LEAST_KL
    return Series(divergence.name, divergence.steps, -divergence.values), LEAST_KL


def mean_beyond(series: Series, limit: float) -> float | None:
    if len(series.values) < ENOUGH_STEPS:
        return None
    cut = len(series.values) // 10
    kept = np.sort(series.values)[cut : len(series.values) - cut]
    mean = float(kept.mean())
    return mean if mean - limit > 3 * float(kept.std()) / len(kept) ** 0.5 else None


def engine_disagrees(run: Run) -> Alarm | None:
    """D24: logprobs of engine and trainer differ, from the start or from some step on.

    A growth is split into longer completions, entropy, and what remains: the weights.
    """
    series, limit = measured_difference(run)
    jumped = series.sustained(lambda value: value > 2.5 * series.first) and series.last > limit / 3
    grows = series.rose(1.5) and series.last > limit / 3
    mean = mean_beyond(series, limit)
    steady = jumped or grows or mean is not None or series.sustained(lambda value: value > limit)
    far = series.values > FAR_BEYOND * max(series.first, limit / FAR_BEYOND)
    at = np.flatnonzero(far[:-2] & far[1:-1] & far[2:])  # three steps in a row
    if not steady and (series.is_short or not len(at)):
        return None
    is_far = series.last > (limit if grows else FAR_BEYOND * limit) and (grows or not is_learning(run))
    first = int(series.steps[0 if steady else at[0]])
    begins = onset(series, "up", in_ratios=True) if jumped or grows else first
    return alarm(
        "D24",
        series,
        found=(
            series.change
            + ("" if steady else f", up to {series.values.max():.3g} for some steps from {begins} on")
            + (f", mean {mean:.3g}" if mean is not None else "")
            + f" (limit {limit:g})"
            + (explain_growth(run, series) if jumped or grows else "")
        ),
        severity="error" if jumped or is_far else "warning",
        title="drifts" if jumped or grows else "differs" if steady else "for_a_time",
        since=begins,
    )


def episodes_fail(run: Run) -> Alarm | None:
    """D27: more than one episode in twenty ends in an exception."""
    failed, accepted = run.series.get("failed"), run.series.get("accepted")
    if failed is None or accepted is None or not len(failed.values):
        return None
    count, total = float(failed.values[-1]), float(failed.values[-1] + accepted.values[-1])
    if total == 0 or count / total <= 0.05:
        return None
    return alarm(
        "D27", failed, found=f"{count:.0f} of {total:.0f} prompts so far", since=onset(failed.finite, "up")
    )


RULES = (
    engine_disagrees,
    samples_are_old,
    grows_longer,
    episodes_fail,
)
