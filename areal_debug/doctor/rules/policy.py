"""Importance ratios near 1, rare clipping, stable entropy and gradients in the policy update."""

import re

import numpy as np
import numpy.typing as npt

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run, flat
from areal_debug.doctor.rules.groups import share_alike
from areal_debug.doctor.rules.learning import (
    EARLY_STEPS,
    ENOUGH_STEPS,
    fall_from_the_peak,
    is_learning,
    is_share,
    is_solved,
)
from areal_debug.doctor.series import FEWEST_STEPS, NOTHING, Series, medians_between, running_medians

NEIGHBOURS = 31  # steps whose median a gradient norm is compared with
MULTIPLIED, LARGE = 30.0, 10.0  # times the first gradient norm, and a norm that no sound run ends at
SPIKE = 5.0  # times that median
HIGH_SPIKE = 20.0  # of these, three are enough: sound runs recover from a few of 10 times
FEWEST_SPIKES = 3  # two are found in short sound runs with stale samples
EXPLODED = 10.0  # times the first loss of a critic
GROWN = 1.5  # times its first level
LEAST_EXPLAINED = 0.02  # variance of the returns
ENDED, MIRRORED = 0.05, 0.1  # of the full learning rate: at its end, between both halves
ABSURD = 1.0  # learning rate: Adam changes each weight by about as much in one update
REPEATED = 5  # different losses, and how many come again: with four digits no chance
NOT_SMALL = 0.5  # a supervised loss that does not become 0 in one step
WARM_UP = re.compile(r"(^|\.)(lr_|num_)*warm_?up_(steps|iters)$")
STYLE = re.compile(r"(?i)(^|\.)(lr_scheduler_type|lr_scheduler|lr_schedule|lr_decay_style|warmup_style)$")
FALLING, OF_CRITIC = ("cosine", "linear"), re.compile(r"(?i)critic|value|teacher")
OF_RATE = re.compile(r"(?i)(^|\.)(min_)?(lr|learning_rate)$")
OF_TOKENS = re.compile(r"(?i)(?<![a-z])(?:logits?|logps?|logprobs?)(?![a-z])")


def never_moves(run: Run) -> Alarm | None:
    """D13: gradient norm or learning rate is exactly 0, or a supervised loss repeats itself exactly."""
    norm, rate, loss = run.finite("grad_norm"), run.finite("lr"), run.finite("loss")
    alike, differ = share_alike(run), ""
    if (
        not alike.holds(lambda value: value > 0.99)
        and norm.is_zero
        and np.isfinite(run.series["grad_norm"].values[-1])
    ):
        what, series, differ = "the gradient norm is exactly 0", norm, "differ" if len(alike.values) else ""
    elif rate.is_zero and len(rate.values) > 1:  # a warm-up begins at 0, a schedule ends there
        what, series = "the learning rate is 0", rate
    elif run.kind == "supervised" and (period := period_of(loss)):
        what, series = f"the loss is the same again every {period} steps, to the last digit,", loss
    else:
        return None
    count = min(2 * series.window, len(series.values))
    return alarm(
        "D13",
        series,
        found=f"{what} in "
        + (f"the last {count} steps" if count > 1 else "the only step")
        + (", and rewards differ within groups" if differ else ""),
        severity="warning" if series.is_short else "error",
        variant=differ if "reward" in run.series else "supervised",
        since=int(series.steps[0]) if series is loss else onset(series, "down"),
    )


def schedule_is_another(run: Run) -> Alarm | None:
    """D51: the learning rate rises for a multiple of the configured steps, or is constant where it has to fall."""
    rate, options = run.finite("lr"), run.record.header.config if run.record is not None else run.config
    named = {name: value for name, value in flat(options) if not OF_CRITIC.search(name)}
    styles = {name: value for name, value in named.items() if STYLE.search(name) and isinstance(value, str)}
    rates = [value for name, value in named.items() if OF_RATE.search(name)]
    falls = bool(styles) and all(style.lower() in FALLING for style in styles.values())
    is_constant = len(rate.values) >= ENOUGH_STEPS and rate.resolution == np.ptp(rate.values) == 0
    if falls and is_constant and rates.count(rate.values[0]) == 1 and rate.values[0]:
        options_say = " and ".join(f"{name} is {style}" for name, style in styles.items())
        found = f"it is {rate.values[0]:.3g} in all {len(rate.values)} steps, and {options_say}"
        return alarm("D51", rate, found=found, variant="constant", since=int(rate.steps[0]))
    configured = [value for name, value in flat(options) if WARM_UP.search(name) and type(value) is int]
    peak = int(np.argmax(rate.values)) if len(rate.values) else 0
    if len(configured) != 1 or configured[0] < 1 or peak < FEWEST_STEPS:
        return None
    slopes = np.diff(rate.values[: peak + 1]) / np.diff(rate.steps[: peak + 1])
    took = float(rate.values[peak] / max(np.median(slopes), 1e-30))
    factor = took / configured[0]
    is_line = np.ptp(slopes) < 0.1 * abs(np.median(slopes))
    if not is_line or factor < 1.5 or abs(factor - round(factor)) > 0.05 * factor:
        return None
    found = f"it rises for {took:.0f} steps, {round(factor)} times the {configured[0]} that are configured"
    return alarm("D51", rate, found=found, since=int(rate.steps[0]), factor=round(factor))


def rate_rises_again(run: Run) -> Alarm | None:
    """D49: the learning rate falls to its end, and rises again as it fell: its scheduler ran on."""
    rate, options = run.finite("lr"), str(run.config).lower()
    values = rate.values
    if len(values) < ENOUGH_STEPS or "cycl" in options or "restart" in options:
        return None
    full = int(np.argmax(values >= values.max() / 2))
    lowest = full + int(np.argmin(values[full:]))
    fell, rose = values[full : lowest + 1], values[lowest:]
    both = min(len(fell), len(rose))
    is_mirrored = np.abs(fell[::-1][:both] - rose[:both]).max() < MIRRORED * values.max()
    if both < FEWEST_STEPS or fell[-1] > ENDED * fell[0] or rose[-1] < values.max() / 4 or not is_mirrored:
        return None
    step = int(rate.steps[lowest])
    found = f"it falls from {fell[0]:.3g} to {fell[-1]:.2g} at step {step}, and rises again to {rose[-1]:.3g}"
    return alarm("D49", rate, found=found, evidence=rate.at([full, lowest, len(values) - 1]), since=step)


def period_of(loss: Series) -> int:
    """Return after how many steps the values are the same again, to the end; 0 if they are not."""
    values = loss.values
    again = np.flatnonzero(values == values[0])[1:4].tolist() if len(values) else []
    repeats = (at for at in again if len(values) - at >= REPEATED and (values[at:] == values[:-at]).all())
    return next((at for at in repeats if len(set(values[:at].tolist())) >= REPEATED), 0)


def entropy_collapses(run: Run) -> Alarm | None:
    """D15: entropy halved within two windows, or fell below a quarter of its first value.

    Below a tenth while validation rises.
    """
    series = run.finite("entropy")
    if len(series.values) < 10 or is_solved(run):
        return None
    before = float(np.median(series.values[-2 * series.window : -series.window]))
    fast = before - series.last > max(0.5 * before, 4 * series.noise)
    start = max(series.first, float(series.values[0]))  # it may fall within the first window
    least = (0.1 if is_learning(run) else 0.25) * start  # it falls as a sound policy learns
    if not fast and not series.sustained(lambda value: value < least):
        return None
    return alarm(
        "D15",
        series,
        found=f"{series.ending}, {before:.3g} before, {start:.3g} at first",
        severity="error" if fast else "warning",
        since=onset(series, "down", in_ratios=True),
    )


def entropy_rises(run: Run) -> Alarm | None:
    """D19: entropy grows and the reward does not, or entropy is multiplied."""
    series = run.finite("entropy")
    if not series.rose(1.5):
        return None
    is_multiplied = series.rose(3.0)
    begins = onset(series, "up", in_ratios=is_multiplied)
    gain = run.finite("reward").since(begins).trend
    if not is_multiplied and (gain is None or gain.rises):
        return None
    gained = "" if gain is None else f"; the reward changed by {gain.change:+.3g} since step {begins}"
    severity, title = ("error", "explodes") if is_multiplied else ("warning", "rises")
    return alarm("D19", series, found=series.change + gained, severity=severity, title=title, since=begins)


def critic_fails(run: Run) -> Alarm | None:
    """D28: the critic explains no more than a constant does, or its loss rises, even for a time."""
    explained, loss = run.finite("explained_variance"), run.finite("value_loss")
    series, exploded = loss, peak_of_loss(loss, explained)
    lowest = float(medians_of(loss).min()) if len(loss.values) >= ENOUGH_STEPS else np.inf
    if explained.sustained(lambda value: value < 0):
        series, worse, title = explained, onset(explained, "down"), "worse_than_constant"
        found = f"explained variance {series.last:.3g}, below 0 is worse than a constant"
    elif exploded is not None:
        until = np.searchsorted(loss.steps, exploded[0]) + loss.window
        before = Series(loss.name, loss.steps[:until], loss.values[:until])
        worse, title = min(exploded[0], onset(before, "up", in_ratios=True)), "explodes"
        found = f"{series.values[0]:.3g} at first, {exploded[1]:.3g} around step {exploded[0]}, {series.last:.3g} at the end"
    elif len(explained.values) >= 2 * ENOUGH_STEPS and medians_of(explained).max() < LEAST_EXPLAINED:
        series, worse, title = explained, int(explained.steps[0]), "explains_nothing"
        found = f"explained variance never exceeds {LEAST_EXPLAINED:g} over a window; a constant has 0"
    elif loss.first - lowest > 3 * loss.noise and loss.rose(1.5) and loss.last > 3 * lowest:
        worse, title = onset(loss, "up"), "diverges"
        found = f"it had fallen and rose again: {series.change}"
    elif not len(explained.values) and grows_to_the_end(loss, run.finite("reward")):
        worse, title = onset(loss, "up", in_ratios=loss.rose(EXPLODED)), "grows"
        found = f"{series.change}, and it has not levelled off"
    else:
        return None
    return alarm("D28", series, found=found, title=title, since=worse)


def grows_to_the_end(loss: Series, reward: Series) -> bool:
    """Return whether a critic's loss grows over the run, by more than the rewards explain.

    Rewards between 0 and 1 that are seldom 0 or 1 have returns that vary more: up to the variance
    of a coin.
    """
    found = loss.trend
    if found is None or len(loss.values) < ENOUGH_STEPS or not (found.rises and loss.rose(GROWN)):
        return False
    late = loss.since(int(loss.steps[len(loss.steps) // 2])).trend
    if late is None or late.low <= 0:
        return False
    gained = reward.trend
    if gained is not None and gained.rises and not is_share(reward):  # squares of returns that grow
        return reward.first > 0 and loss.last / loss.first > (reward.last / reward.first) ** 2
    if not len(reward.values) or not is_share(reward) or loss.last > 1:
        return True
    varied = (reward.last * (1 - reward.last)) / max(reward.first * (1 - reward.first), 1e-12)
    return loss.last > GROWN * varied * loss.first


def peak_of_loss(loss: Series, explained: Series) -> tuple[int, float] | None:
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
    inside = explained.values[np.isin(explained.steps, loss.steps[at : at + loss.window])]
    is_bad = bool(len(inside) and np.median(inside) < 0) if len(explained.values) else loss.last < peak / 3
    return (int(loss.steps[at]), peak) if is_bad else None


def medians_of(series: Series) -> npt.NDArray[np.float64]:
    return running_medians(series.values, min(series.window, len(series.values)))


def policy_drifts_for_nothing(run: Run) -> Alarm | None:
    """D16: the KL divergence to the reference grows and the reward does not."""
    series = run.finite("reference_kl")
    grows, gains = series.trend, run.finite("reward").trend
    if grows is None or gains is None or not grows.rises or gains.rises:
        return None
    fell = fall_from_the_peak(run)
    if grows.change < max(0.01, abs(series.first)) or (fell is not None and fell[3]):
        return None  # it did gain reward until the peak, which D04 names
    found = f"KL grew by {grows.change:.3g}, the reward changed by {gains.change:+.3g}"
    return alarm("D16", series, found=found, since=onset(series, "up", in_ratios=True))


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
    first, before = int(norm.steps[at[0]]), numbers_that_are_none(run) if bad.any() else None
    if before is not None and before.onset is not None and before.onset <= first:
        return None  # D18: the gradient is computed from the loss
    return alarm(
        "D17",
        norm,
        found=(
            f"the norm is not finite in {len(at)} of {len(norm.values)} steps"
            if bad.any()
            else f"{len(at)} of {len(norm.values)} steps are beyond {SPIKE:g} times their neighbours, the largest {times.max():.0f} times"
        ),
        severity="error" if bad.any() else "warning",
        title="not_finite" if bad.any() else "spikes",
        evidence=norm.at(at[:8]),
        since=first,
        verb="break" if bad.any() else "dominate",
    )


def gradients_grow(run: Run) -> Alarm | None:
    """D17: gradient norms grow from step to step to many times the first, and nothing is learned."""
    series = run.finite("grad_norm")
    kept = series.values > 0
    logs = Series(series.name, series.steps[kept], np.log(series.values[kept]))
    begins = onset(logs, "up")
    grows = (later := logs.since(begins)).trend
    end = float(np.exp(np.median(logs.values[-EARLY_STEPS:]))) if kept.any() else 0.0
    if grows is None or not grows.rises or is_learning(run):
        return None
    if end < max(LARGE, MULTIPLIED * float(np.exp(np.median(logs.values[:EARLY_STEPS])))):
        return None
    found = (
        f"{np.exp(logs.values[0]):.3g} at first, {end:.3g} at the end; since step {begins} each is "
        f"{np.expm1(grows.change / max(1, len(later.values) - 1)):.0%} above the one before"
    )
    return alarm("D17", series, found=found, title="grow", since=begins, verb="break")


def beside_the_neighbours(
    norms: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return each norm over the median of its neighbours, and its distance in robust deviations.

    Deviations are those of the logarithm. Norms that are 0 or not finite count as usual ones, and so
    do those that are not above the medians of both sides: norms that grow are no spikes.
    """
    usable = np.isfinite(norms) & (norms > 0)
    moving, half = np.where(usable, norms, np.nan), NEIGHBOURS // 2
    if usable.sum() < 5:
        return np.ones(len(norms)), np.zeros(len(norms))
    counted, at = np.concatenate([[0], np.cumsum(usable)]), np.arange(len(norms))
    begin, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(norms))
    usual, before, after = (
        medians_between(moving[usable], counted[left], counted[right])
        for left, right in ((begin, end), (begin, at), (at + 1, end))
    )
    ratios = np.nan_to_num(np.log(moving / usual), nan=0.0)
    noise = float(np.median(np.abs(ratios[usable]))) / 0.6745
    ratios = np.where(moving > SPIKE * np.fmax(before, after), ratios, np.minimum(ratios, 0.0))
    return np.exp(ratios), ratios / max(noise, 1e-12)


def numbers_that_are_none(run: Run) -> Alarm | None:
    """D18: a metric is NaN or infinite (the gradient norm has its own rule, D17).

    Of names that mean no quantity those of logits and log-probs count, and of a record's rows; the
    others may be undefined.
    """
    named = {name: one for name, one in run.by_name.items() if name.startswith("record/")}
    judged = {name: one for name, one in run.series.items() if name != "grad_norm" and one.name not in named}
    every = judged | {name: run.by_name[name] for name in run.unknown_names if OF_TOKENS.search(name)} | named
    bad = {name: ~np.isfinite(one.values) for name, one in every.items()}
    if run.kind == "supervised":
        bad["loss"] |= is_lost(every["loss"])
    broken = [name for name, where in bad.items() if where.any()]
    if not broken:
        return None
    first = min(broken, key=lambda name: int(every[name].steps[np.argmax(bad[name])]))
    series, at = every[first], np.flatnonzero(bad[first])
    late = [one.name for one in (run.series.get("grad_norm", NOTHING),) if not np.isfinite(one.values).all()]
    step, also = int(series.steps[at[0]]), ", ".join(sorted({*broken, *late} - {first}))
    is_other, is_zero = judged.keys().isdisjoint(broken), bool(np.isfinite(series.values[at[0]]))
    what = (
        f"{series.name} is {'exactly 0' if is_zero else 'not finite'} in {len(at)} of {len(bad[first])} steps"
    )
    return alarm(
        "D18",
        series,
        found=f"{what}, first at step {step}" + (f"; not finite as well: {also}" if also else ""),
        severity="warning" if is_other else "error",
        title="rows" if first in named else "others" if is_other else "lost" if is_zero else "not_finite",
        variant="" if run.kind == "learning" else "supervised",
        evidence=series.at(at[:8]),
        since=step,
    )


def rate_is_absurd(run: Run) -> Alarm | None:
    """D48: a learning rate above all published ones; an error if values are not finite, or grow."""
    series, consequences = run.finite("lr"), (gradients_spike, gradients_grow, numbers_that_are_none)
    beyond = series.values > ABSURD
    if not beyond.any():
        return None
    first = int(series.steps[np.argmax(beyond)])
    return alarm(
        "D48",
        series,
        found=f"above {ABSURD:g} in {int(beyond.sum())} of {len(beyond)} steps: one update of Adam replaces the weights",
        severity="error" if any(rule(run) for rule in consequences) else "warning",
        since=first,
        rate=float(series.values.max()),
    )


def is_lost(loss: Series) -> npt.NDArray[np.bool_]:
    """Return at which steps a supervised loss is 0, if it stays so and was not small before.

    Transformers prints 0 for a loss that is not finite, and tables of notebooks 0.000000.
    """
    zero = loss.values == 0.0
    begins = int(np.argmax(zero))
    stays = loss.resolution < 1e-5 and zero[begins:].all() and (loss.values[:begins][-1:] > NOT_SMALL).all()
    found: npt.NDArray[np.bool_] = zero & stays
    return found


RULES = (
    rate_is_absurd,
    gradients_spike,
    gradients_grow,
    numbers_that_are_none,
    never_moves,
    rate_rises_again,
    schedule_is_another,
    entropy_collapses,
    entropy_rises,
    critic_fails,
    policy_drifts_for_nothing,
)
