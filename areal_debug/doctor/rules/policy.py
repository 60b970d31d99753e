"""Importance ratios near 1, rare clipping, stable entropy and gradients in the policy update."""

import numpy as np
import numpy.typing as npt

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import ENOUGH_STEPS, gain_since, is_learning, is_solved, rose_and_fell
from areal_debug.doctor.series import Series, medians_between, running_medians, trend

FAR_FROM_ONE = 0.05
FAR_AT_ONE_MINIBATCH = 1e-3
NEIGHBOURS = 31  # steps whose median a gradient norm is compared with
GROWN, LARGE = 100.0, 10.0  # times the first gradient norm, and a norm that no sound run ends at
SPIKE = 5.0  # times that median
HIGH_SPIKE = 10.0  # of these, three are enough
FEWEST_SPIKES = 3  # two are found in short sound runs with stale samples
EXPLODED = 10.0  # times the first loss of a critic
GROWN = 1.5  # times its first level
LEAST_EXPLAINED = 0.02  # variance of the returns


def importance_weight_off_one(run: Run) -> Alarm | None:
    """D10: the mean ratio of new to proximal policy is not 1."""
    weight = run.series.get("importance_weight")
    if weight is None:
        return None
    one_minibatch = run.config.get("actor.ppo_n_minibatches") == 1
    limit = FAR_AT_ONE_MINIBATCH if one_minibatch else FAR_FROM_ONE
    series = weight.finite
    if not series.sustained(lambda value: abs(value - 1) > limit):
        return None
    return alarm(
        "D10",
        series,
        found=(
            f"median {series.last:.5g} in the last {series.window} steps, more than {limit:g} from 1"
            + (", and with one minibatch it must be exactly 1" if one_minibatch else "")
        ),
        severity="error" if one_minibatch else "warning",
        since=onset(Series(weight.name, series.steps, np.abs(series.values - 1)), "up"),
    )


def many_tokens_are_clipped(run: Run) -> Alarm | None:
    clipped = run.series.get("clip_ratio")
    if clipped is None:
        return None
    series = clipped.finite
    is_most = series.sustained(lambda value: value > 0.5)
    if (
        not is_most
        and not series.sustained(lambda value: value > 0.3)
        and not (len(series.values) >= ENOUGH_STEPS and np.median(series.values) > 0.3)
        and not (series.rose(3.0) and series.last > 0.2)
    ):
        return None
    return alarm(
        "D12",
        series,
        found=f"median {series.last:.3g} in the last {series.window} steps, {series.first:.3g} at first",
        severity="error" if is_most else "warning",
        title="most" if is_most else "saturates",
        since=onset(series, "up"),
    )


def never_moves(run: Run) -> Alarm | None:
    """D13: gradient norm or learning rate is exactly 0: the optimizer changes nothing."""
    norm, rate = run.series.get("grad_norm"), run.series.get("lr")
    alike = run.series.get("zero_variance_groups")
    is_explained = alike is not None and alike.finite.holds(lambda value: value > 0.99)  # D22
    if not is_explained and norm is not None and norm.finite.is_zero and np.isfinite(norm.values[-1]):
        what, series = "the gradient norm is exactly 0", norm.finite
    elif rate is not None and rate.finite.is_zero:
        what, series = "the learning rate is 0", rate.finite
    else:
        return None
    return alarm(
        "D13",
        series,
        found=f"{what} in the last {min(2 * series.window, len(series.values))} steps",
        severity="warning" if series.is_short else "error",
        variant="" if "reward" in run.series else "supervised",
        since=onset(series, "down"),
    )


def entropy_collapses(run: Run) -> Alarm | None:
    """D15: entropy halved within two windows, or fell below a quarter of its first value.

    Below a tenth while validation rises.
    """
    entropy = run.series.get("entropy")
    if entropy is None or len(entropy.finite.values) < 10 or is_solved(run):
        return None
    series = entropy.finite
    lost = series.before_last() - series.last
    fast = lost > max(0.5 * series.before_last(), 4 * series.noise)
    start = max(series.first, float(series.values[0]))  # it may fall within the first window
    least = (0.1 if is_learning(run) else 0.25) * start  # it falls as a sound policy learns
    if not fast and not series.sustained(lambda value: value < least):
        return None
    return alarm(
        "D15",
        series,
        found=f"median {series.last:.3g} in the last {series.window} steps, {series.before_last():.3g} before, {start:.3g} at first",
        severity="error" if fast else "warning",
        since=onset(series, "down", in_ratios=True),
    )


def entropy_rises(run: Run) -> Alarm | None:
    """D19: entropy grows and the reward does not, or entropy is multiplied."""
    entropy = run.series.get("entropy")
    if entropy is None or not entropy.finite.rose(1.5):
        return None
    series = entropy.finite
    is_multiplied = series.rose(3.0)
    begins = onset(series, "up", in_ratios=is_multiplied)
    gain = gain_since(run, begins)
    if not is_multiplied and (gain is None or gain.rises):
        return None
    return alarm(
        "D19",
        series,
        found=(
            f"median {series.last:.3g} in the last {series.window} steps, {series.first:.3g} at first"
            + (f"; the reward changed by {gain.change:+.3g} since step {begins}" if gain is not None else "")
        ),
        severity="error" if is_multiplied else "warning",
        title="explodes" if is_multiplied else "rises",
        since=begins,
    )


def critic_fails(run: Run) -> Alarm | None:
    """D28: the critic explains no more than a constant does, or its loss rises, even for a time."""
    explained, loss = run.series.get("explained_variance"), run.series.get("value_loss")
    exploded = peak_of_loss(loss.finite, explained) if loss is not None else None
    if explained is not None and explained.finite.sustained(lambda value: value < 0):
        series, worse = explained.finite, onset(explained.finite, "down")
        title = "worse_than_constant"
        found = f"explained variance {series.last:.3g}, below 0 is worse than a constant"
    elif loss is not None and exploded is not None:
        series, worse = loss.finite, exploded[0]
        title = "explodes"
        found = f"{series.values[0]:.3g} at first, {exploded[1]:.3g} around step {worse}, {series.last:.3g} at the end"
    elif explained is not None and explains_nothing(explained.finite):
        series, worse = explained.finite, int(explained.finite.steps[0])
        title = "explains_nothing"
        found = f"explained variance never exceeds {LEAST_EXPLAINED:g} over a window; a constant has 0"
    elif loss is not None and len(loss.finite.values) >= ENOUGH_STEPS and rises_from_its_lowest(loss.finite):
        series, worse = loss.finite, onset(loss.finite, "up")
        title = "diverges"
        found = f"it had fallen, and is {series.last:.3g} in the last {series.window} steps, {series.first:.3g} at first"
    elif loss is not None and explained is None and grows_to_the_end(loss.finite, run.series.get("reward")):
        series, worse = loss.finite, onset(loss.finite, "up")
        title = "grows"
        found = f"{series.first:.3g} at first, {series.last:.3g} in the last {series.window} steps, and it has not levelled off"
    else:
        return None
    return alarm("D28", series, found=found, title=title, since=worse)


def grows_to_the_end(loss: Series, reward: Series | None) -> bool:
    """Return whether a critic's loss grows over the run, by more than the rewards explain.

    Rewards between 0 and 1 that are seldom 0 or 1 have returns that vary more: up to the variance
    of a coin.
    """
    found = trend(loss)
    if found is None or len(loss.values) < ENOUGH_STEPS or not (found.rises and loss.rose(GROWN)):
        return False
    late = trend(loss.since(int(loss.steps[len(loss.steps) // 2])))
    if late is None or late.low <= 0:
        return False
    if reward is None or not len(reward.finite.values):
        return True
    kept = reward.finite
    if kept.values.min() < 0 or kept.values.max() > 1 or loss.last > 1:
        return True
    varied = (kept.last * (1 - kept.last)) / max(kept.first * (1 - kept.first), 1e-12)
    return loss.last > GROWN * varied * loss.first


def explains_nothing(explained: Series) -> bool:
    if len(explained.values) < 2 * ENOUGH_STEPS:
        return False
    return float(medians_of(explained).max()) < LEAST_EXPLAINED


def peak_of_loss(loss: Series, explained: Series | None) -> tuple[int, float] | None:
    """Return step and height of the peak of a critic's loss that exploded; None if it did not.

    Returns that begin to vary raise the loss of a sound critic too: there the explained variance
    does not fall, and the loss does not come back.
    """
    if len(loss.values) < ENOUGH_STEPS:
        return None
    medians = medians_of(loss)
    peak, at = float(medians.max()), int(np.argmax(medians))
    if peak < EXPLODED * max(float(loss.values[:3].min()), 1e-12):  # it may explode in the second step
        return None
    window = slice(at, at + loss.window)
    if explained is None:
        is_bad = loss.last < peak / 3
    else:
        inside = np.isin(explained.steps, loss.steps[window]) & np.isfinite(explained.values)
        is_bad = bool(inside.any()) and float(np.median(explained.values[inside])) < 0
    return (int(loss.steps[at]), peak) if is_bad else None


def medians_of(series: Series) -> npt.NDArray[np.float64]:
    return running_medians(series.values, min(series.window, len(series.values)))


def rises_from_its_lowest(series: Series) -> bool:
    medians = medians_of(series)
    has_fallen = series.first - float(medians.min()) > 3 * series.noise
    return has_fallen and series.rose(1.5) and series.last > 3 * float(medians.min())


def policy_drifts_for_nothing(run: Run) -> Alarm | None:
    """D16: the KL divergence to the reference grows and the reward does not."""
    divergence, reward = run.series.get("reference_kl"), run.series.get("reward")
    if divergence is None or reward is None:
        return None
    grows, gains = trend(divergence.finite), trend(reward.finite)
    if grows is None or gains is None or not grows.rises or gains.rises:
        return None
    if grows.change < max(0.01, abs(divergence.finite.first)):
        return None
    if rose_and_fell(run):
        return None  # it did gain reward until the peak, which D04 names
    return alarm(
        "D16",
        divergence,
        found=f"KL grew by {grows.change:.3g}, the reward changed by {gains.change:+.3g}",
        since=onset(divergence.finite, "up", in_ratios=True),
    )


def gradients_spike(run: Run) -> Alarm | None:
    """D17: single steps whose gradient norm is many times that of their neighbours, or not finite.

    By count (2 % of the steps, three at least, beyond 5 times) or by size (three beyond 10 times).
    """
    norm = run.series.get("grad_norm")
    if norm is None:
        return None
    bad = ~np.isfinite(norm.values)
    if not bad.any() and len(norm.values) < 5:
        return None
    times, deviations = beside_the_neighbours(norm.values)
    spikes, high = (times > SPIKE) & (deviations > 6), (times > HIGH_SPIKE) & (deviations > 4)
    if not bad.any() and spikes.sum() < max(FEWEST_SPIKES, 0.02 * len(norm.values)) and high.sum() < 3:
        return None
    at = np.flatnonzero(bad if bad.any() else spikes | high)
    first = int(norm.steps[at[0]])
    return alarm(
        "D17",
        norm,
        found=(
            f"{len(at)} of {len(norm.values)} steps are "
            + (
                "not finite"
                if bad.any()
                else f"beyond {SPIKE:g} times their neighbours, the largest {times.max():.0f} times"
            )
        ),
        severity="error" if bad.any() else "warning",
        title="not_finite" if bad.any() else "spikes",
        evidence=tuple((int(norm.steps[i]), float(norm.values[i])) for i in at[:8]),
        since=first,
        cost=f"{len(at)} updates whose direction a few samples chose" if not bad.any() else "",
        verb="break" if bad.any() else "dominate",
        first=first,
    )


def gradients_grow(run: Run) -> Alarm | None:
    """D17: each norm of the last third is a hundred times each of the first, and nothing is learned."""
    norm = run.series.get("grad_norm")
    if norm is None or norm.finite.is_short:
        return None
    series = norm.finite
    third = len(series.values) // 3
    begin, end = float(series.values[:third].max()), float(series.values[-third:].min())
    if begin <= 0 or end < max(LARGE, GROWN * begin) or is_learning(run):
        return None
    begins = onset(series, "up", in_ratios=True)
    return alarm(
        "D17",
        series,
        found=f"at least {end:.3g} in the last {third} steps, at most {begin:.3g} in the first",
        severity="warning",
        title="grow",
        since=begins,
        verb="break",
        first=begins,
    )


def beside_the_neighbours(
    norms: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return each norm over the median of its neighbours, and its distance in robust deviations.

    Deviations are those of the logarithm. Norms that are 0 or not finite count as usual ones.
    """
    moving = np.where(np.isfinite(norms) & (norms > 0), norms, np.nan)
    if np.isfinite(moving).sum() < 5:
        return np.ones(len(norms)), np.zeros(len(norms))
    half = NEIGHBOURS // 2
    usable = np.isfinite(moving)
    counted, at = np.concatenate([[0], np.cumsum(usable)]), np.arange(len(norms))
    begin, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(norms))
    usual = medians_between(moving[usable], counted[begin], counted[end])
    ratios = np.nan_to_num(np.log(moving / usual), nan=0.0)
    noise = float(np.median(np.abs(ratios[np.isfinite(moving)]))) / 0.6745
    return np.exp(ratios), ratios / max(noise, 1e-12)


def numbers_that_are_none(run: Run) -> Alarm | None:
    """D18: a metric is NaN or infinite (the gradient norm has its own rule, D17)."""
    broken = {name: ~np.isfinite(series.values) for name, series in run.series.items() if name != "grad_norm"}
    broken = {name: bad for name, bad in broken.items() if bad.any()}
    if not broken:
        return None
    first = min(broken, key=lambda name: int(run.series[name].steps[np.argmax(broken[name])]))
    series, bad = run.series[first], broken[first]
    at = np.flatnonzero(bad)
    step = int(series.steps[at[0]])
    return alarm(
        "D18",
        series,
        found=(
            f"{len(at)} of {len(bad)} steps, the first is {step}"
            + (f"; also {', '.join(sorted(set(broken) - {first}))}" if len(broken) > 1 else "")
        ),
        severity="error",
        evidence=tuple((int(series.steps[i]), float(series.values[i])) for i in at[:8]),
        since=step,
        step=step,
    )


RULES = (
    gradients_spike,
    gradients_grow,
    numbers_that_are_none,
    never_moves,
    importance_weight_off_one,
    many_tokens_are_clipped,
    entropy_collapses,
    entropy_rises,
    critic_fails,
    policy_drifts_for_nothing,
)
