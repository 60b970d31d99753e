"""Rewards that do not rise, get noisier, do not carry over to validation, or fall after a peak."""

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.names import is_validation
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import FEWEST_STEPS, Floats, Series, medians_between, running_medians

ENOUGH_STEPS = 20
FEWEST_EVALUATIONS = 4
EARLY_STEPS = 3  # the start of a run whose reward rises within its first window
LEAST_RISE, LEAST_HUMP = 0.4, 0.15  # of the reward's range
SOLVED, HIGH = 0.95, 0.85
BEYOND_THE_DRAW = 4.0  # standard errors: the best of all windows is chosen by its height
CLEAR, OF_FEW = 2.0, 3.0  # times the scatter of a step; of fewer steps than are enough
NOISY_SHARE = 0.15  # of the reward's range: 10 prompts a step that are right or wrong scatter so
NOISY = 0.5  # scatter of a step, as a share of the run's gain


def reward_does_not_rise(run: Run) -> Alarm | None:
    reward, stale = run.finite("reward"), run.finite("staleness").values.any()
    found = reward.trend
    if found is None or found.rises or fall_from_the_peak(run):
        return None  # D04
    if is_lost_in_scatter(reward, -found.change if found.falls else 0.0):
        return None
    if is_share(reward) and reward.last >= SOLVED:
        return None
    falls, is_young = found.falls, len(reward.values) < 2 * ENOUGH_STEPS
    may_still_rise = is_young and found.change > 0 and found.high > 2 * found.scatter
    if rises(run, "eval_reward") or (not falls and (may_still_rise or is_high(reward))):
        return None
    if reward.is_late_level or (not falls and is_at_its_top(reward)):
        return None
    reached = None if falls else end_of_rise(reward)
    how = f"{reward.values[0]:.3g} at first, {reward.last:.3g} from step {reached} on"
    return alarm(
        "D01",
        reward,
        found=found.describe(len(reward.values)) if reached is None else how,
        severity="error" if falls and len(reward.values) >= ENOUGH_STEPS else "warning",
        title="falls" if falls else "flat" if reached is None else "stopped",
        variant="" if stale or run.config.get("rollout.max_head_offpolicyness") else "synchronous",
        since=onset(reward, "down") if falls else reached or int(reward.steps[0]),
    )


def is_lost_in_scatter(series: Series, change: float) -> bool:
    """Return whether there are too few steps for a change that is not three times their scatter."""
    scatter = series.trend.scatter if series.trend is not None else change
    return len(series.values) < ENOUGH_STEPS and change <= OF_FEW * scatter


def end_of_rise(reward: Series) -> int | None:
    """Return the step at which a flat reward reached its level; None if it never rose."""
    start, level = float(np.median(reward.values[:EARLY_STEPS])), reward.last
    if level - start <= max(4 * reward.noise, LEAST_RISE * float(np.ptp(reward.values))):
        return None
    return int(reward.steps[int(np.argmax(reward.values >= level - reward.noise))])


def is_high(reward: Series) -> bool:
    """Return whether a reward between 0 and 1 was high from the beginning."""
    return is_share(reward) and reward.first >= HIGH


def is_at_its_top(reward: Series) -> bool:
    """Return whether a reward rose to its largest value and is exactly that in both last windows.

    A mean that equals the maximum again and again is a bound that each episode reaches.
    """
    top = float(reward.values.max())
    return reward.resolution == 0 and reward.first < top and reward.sustained(lambda value: value == top)


def rises(run: Run, quantity: str) -> bool:
    """Return whether a quantity clearly rises over the run; False for a short series."""
    found = run.finite(quantity).trend
    return found is not None and found.rises and found.change > CLEAR * found.scatter


def is_learning(run: Run) -> bool:
    """Return whether validation rises; without enough of it, whether the reward clearly does."""
    found = run.finite("eval_reward").trend
    return rises(run, "reward") if found is None else found.rises


def is_solved(run: Run) -> bool:
    """Return whether rewards between 0 and 1 have reached 1: then little is left to learn."""
    for quantity in ("eval_reward", "reward"):
        series = run.finite(quantity)
        if len(series.values) >= FEWEST_EVALUATIONS:
            return is_share(series) and series.last >= SOLVED
    return False


def is_share(reward: Series) -> bool:
    return bool(reward.values.min() >= 0 and reward.values.max() <= 1 + 1e-6)


def reward_scatters(run: Run) -> Alarm | None:
    """D02: the scatter around the reward's trend is large beside the gain of the complete run."""
    reward = run.finite("reward")
    values, found = reward.values, reward.trend
    if found is None or len(values) < ENOUGH_STEPS:
        return None
    half = len(values) // 2
    # around the median of five steps, which follows a value that falls in one step
    scatter = values - running_medians(np.pad(values, 2, mode="edge"), 5)
    early, late = float(np.std(scatter[:half])), float(np.std(scatter[half:]))
    batch = run.config.get("train_dataset.batch_size")
    gets_noisier = late > 0 and late >= (1.5 if found.rises else 2.0) * early and late >= abs(found.change)
    gets_noisier = gets_noisier and not is_due_to_prompts(values[half:], late, batch)
    is_noisy = reward.noise >= max(NOISY * abs(found.change), NOISY_SHARE * max(1.0, float(np.ptp(values))))
    if not gets_noisier and not (found.rises and is_noisy):
        return None
    return alarm(
        "D02",
        reward,
        found=(
            f"steps scatter by {late:.3g} in the second half of the run and by {early:.3g} in the first; "
            f"the reward changed by {found.change:+.3g}"
        ),
        title="noisier" if gets_noisier else "noisy",
        since=onset(Series(reward.name, reward.steps, np.abs(scatter)), "up"),
    )


def is_due_to_prompts(rewards: Floats, scatter: float, prompts: object) -> bool:
    """Return whether the choice of prompts alone explains the scatter of rewards in [0, 1].

    Each prompt is then always or never solved, so that the mean has a binomial's deviation.
    """
    if not isinstance(prompts, int) or prompts < 1 or rewards.min() < 0 or rewards.max() > 1:
        return False
    mean = float(rewards.mean())
    return scatter <= 1.2 * float(np.sqrt(mean * (1 - mean) / prompts))


def validation_is_left_behind(run: Run) -> Alarm | None:
    """D03: the training reward rises and validation does not follow, or validation falls."""
    train = run.finite("reward")
    if train.is_short:
        return None
    found = (compare(train, one) for one in validations(run) if one.finite.values.any())  # else D32
    return next((alarm for alarm in found if alarm is not None), None)


def validations(run: Run) -> list[Series]:
    """Return the reward on each validation set; the one that other rules use first."""
    first = run.series.get("eval_reward")
    if first is None:
        return []
    return [
        first,
        *(series for name, series in run.by_name.items() if name != first.name and is_validation(name)),
    ]


def compare(train: Series, validation: Series) -> Alarm | None:
    """Compare the training reward with that of one validation set."""
    behind = left_behind(train, validation.finite)
    falls = fall_of(validation.finite)
    if behind is not None:
        trained, held_out, begins = behind
        title = "left_behind"
    elif falls < 0:
        rises = train.trend
        trained, held_out = rises.change if rises is not None else 0.0, falls
        begins, title = onset(validation.finite, "down"), "falls"
    else:
        return None
    found = f"training gained {trained:+.3g}, {validation.name} {held_out:+.3g} at the same steps"
    return alarm("D03", validation.finite, found=found, title=title, since=begins)


def fall_of(validation: Series) -> float:
    """Return the change of validation from its first values to its last, if it is a clear fall.

    Otherwise 0. Clear is a loss of a quarter, and of four times the noise.
    """
    values = validation.values
    if len(values) < FEWEST_STEPS:
        return 0.0
    start, end = float(values[:2].max()), float(np.median(values[-len(values) // 3 :]))
    return end - start if start - end > max(0.25 * abs(start), 4 * validation.noise) else 0.0


def left_behind(train: Series, validation: Series) -> tuple[float, float, int] | None:
    """Return the gains of training and validation, and the step from which they differ.

    None if validation follows, training does not rise, or there are too few evaluations. Both are
    compared at the steps of the evaluations. Validation is behind if its gain is within its noise,
    if it lost half of what it had gained, or if it gained a quarter as much on a scale of 0 to 1.
    """
    values, count = validation.values, len(validation.values)
    if count < FEWEST_EVALUATIONS:
        return None
    at = np.searchsorted(train.steps, validation.steps)
    half = max(2, train.window // 2)
    at = np.minimum(at, len(train.steps) - 1)
    ends = np.minimum(at + half + 1, len(train.steps))
    trained = medians_between(train.values, np.maximum(at - half, 0), ends)
    third = max(1, count // 3)
    gained = float(np.median(trained[-third:]) - min(trained[0], np.median(trained[:third])))
    start, end = float(min(values[0], np.median(values[:third]))), float(np.median(values[-third:]))
    noise = scatter_around(trained, validation)
    if count >= ENOUGH_STEPS:  # enough for the scatter between neighbours, which no curve inflates
        noise = min(noise, validation.noise)
    rises = train.trend
    if gained <= 2 * train.noise or rises is None or not (rises.rises or train.rose(1.0)):
        return None
    peak = float(running_medians(values, third).max())
    is_share = min(values.min(), train.values.min()) >= 0 and max(values.max(), train.values.max()) <= 1.25
    is_clear = gained - (end - start) > 4 * noise if is_share else count >= FEWEST_STEPS
    stays = is_clear and end - start < 3 * noise and (not is_share or end - start < 0.5 * gained)
    fell = peak - end > max(0.5 * (peak - start), 4 * noise)
    lags = is_share and end - start < 0.25 * gained and gained - (end - start) > 4 * noise
    if not (stays or fell or lags):
        return None
    gap = Series(
        validation.name,
        validation.steps,
        (trained - trained[0]) / gained - (values - values[0]) / max(peak - start, noise, 1e-12),
    )
    return gained, end - start, onset(gap, "up")


def scatter_around(trained: Floats, validation: Series) -> float:
    found = []
    for x in (validation.steps.astype(np.float64), trained):
        centred = x - x.mean()
        slope = float(centred @ validation.values) / max(float(centred @ centred), 1e-12)
        left = validation.values - validation.values.mean() - slope * centred
        found.append(float(np.sqrt(left @ left / max(1, len(x) - 2))))
    return min(found)


def reward_fell_from_its_peak(run: Run) -> Alarm | None:
    """D04: the reward was higher before, by more than the run's own scatter."""
    fell = fall_from_the_peak(run)
    if fell is None:
        return None
    series, peak, at, rose = fell
    return alarm(
        "D04",
        series,
        found=f"around step {at} its median was {peak:.3g}, at the end {series.last:.3g}; steps scatter by {series.noise:.2g}",
        title="peak" if rose else "level",
        evidence=((at, peak), *series.tail(3)),
        since=onset(series.since(at), "down"),
    )


def fall_from_the_peak(run: Run) -> tuple[Series, float, int, bool] | None:
    """Return the reward, its highest running median, that one's step, and whether it rose to it.

    None if it did not fall since, fell from the beginning of the run on, or validation rises since:
    then the prompts became harder, or solved ones were dropped.
    """
    series = run.finite("reward")
    if len(series.values) < ENOUGH_STEPS:
        return None
    medians = running_medians(series.values, series.window)
    at = int(np.argmax(medians))
    peak, checked = float(medians[at]), run.finite("eval_reward").since(int(series.steps[at])).trend
    if checked is not None and checked.rises:
        return None
    is_below = series.sustained(lambda value: peak - value > 2 * series.noise)
    if not is_below or peak - series.last < 0.1 * abs(peak) or not exceeds_the_draw(series, at):
        return None
    rose = peak - series.first > max(4 * series.noise, LEAST_HUMP * float(np.ptp(series.values)))
    if not rose and onset(series, "down") <= series.steps[series.window]:
        return None
    return series, peak, int(series.steps[at]), rose


def exceeds_the_draw(series: Series, peak: int) -> bool:
    """Return whether the mean fell since the window at `peak` by more than chance allows.

    The standard error of a window is that of independent steps or, where larger, that of windows
    beside their neighbours: rewards of neighbouring steps are often correlated.
    """
    width, late = series.window, 2 * series.end_window
    high, low = series.values[peak : peak + width], series.values[-late:]
    pooled = float(np.concatenate([high - high.mean(), low - low.mean()]).std())
    count = len(series.values) // width
    means = series.values[-count * width :].reshape(count, width).mean(axis=1)
    # of the second difference of independent means: 6 times their variance; 0.6745 as in `noise`
    bends = float(np.median(np.abs(np.diff(means, 2)))) / (0.6745 * 6**0.5) if count > 3 else 0.0
    error = max(pooled / width**0.5, series.deviation / width**0.5, bends) * (1 + width / late) ** 0.5
    return float(high.mean() - low.mean()) > BEYOND_THE_DRAW * error


RULES = (reward_fell_from_its_peak, reward_does_not_rise, reward_scatters, validation_is_left_behind)
