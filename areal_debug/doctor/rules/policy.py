"""Importance ratios near 1, rare clipping, stable entropy and gradients in the policy update."""

import warnings

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import ENOUGH_STEPS, gain_since, is_learning, is_solved
from areal_debug.doctor.series import Series, trend

FAR_FROM_ONE = 0.05
FAR_AT_ONE_MINIBATCH = 1e-3
NEIGHBOURS = 31  # steps whose median a gradient norm is compared with
SPIKE = 5.0  # times that median
HIGH_SPIKE = 10.0  # of these, three are enough
FEWEST_SPIKES = 3  # two are found in short sound runs with stale samples
EXPLODED = 10.0  # times the first loss of a critic
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
    return Alarm(
        "D10",
        "importance weights deviate from 1",
        "error" if one_minibatch else "warning",
        weight.name,
        f"median {series.last:.5g} in the last {series.window} steps, more than {limit:g} from 1"
        + (", and with one minibatch it must be exactly 1" if one_minibatch else ""),
        series.tail(),
        (
            "fewer minibatches (actor.ppo_n_minibatches)",
            "a smaller learning rate",
            "for mixtures of experts: deterministic kernels, so that routing is reproducible",
        ),
        "one step with actor.optimizer.lr=0: the weight must be exactly 1",
        "AReaL, best practices: importance_weight/avg must stay at 1; the limit is our own default",
        {"actor.ppo_n_minibatches": 1},
        onset(Series(weight.name, series.steps, np.abs(series.values - 1)), "up"),
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
    return Alarm(
        "D12",
        "more than half of the tokens are clipped" if is_most else "clipping saturates",
        "error" if is_most else "warning",
        clipped.name,
        f"median {series.last:.3g} in the last {series.window} steps, {series.first:.3g} at first",
        series.tail(),
        ("a smaller learning rate", "fewer minibatches", "the same dtype in engine and trainer"),
        "one step with actor.optimizer.lr=0: tokens clipped then differ in precision, not in policy",
        "miles: above 0.5 lower the learning rate; PPO: 0.1 to 0.3 is usual; Hugging Face (2026-04): phantom clipping",
        {},
        onset(series, "up"),
    )


def never_moves(run: Run) -> Alarm | None:
    """D13: gradient norm or learning rate is exactly 0: the optimizer changes nothing."""
    norm, rate = run.series.get("grad_norm"), run.series.get("lr")
    alike = run.series.get("zero_variance_groups")
    is_explained = alike is not None and alike.finite.sustained(lambda value: value > 0.99)  # D22
    if not is_explained and norm is not None and norm.finite.sustained(lambda value: value == 0.0):
        what, series = "the gradient norm is exactly 0", norm.finite
    elif rate is not None and rate.finite.sustained(lambda value: value == 0.0):
        what, series = "the learning rate is 0", rate.finite
    else:
        return None
    return Alarm(
        "D13",
        "the weights do not move",
        "error",
        series.name,
        f"{what} in the last {2 * series.window} steps",
        series.tail(),
        (
            "are all rewards of each group equal? then advantages are 0: filter groups (actor.dynamic_sampling)",
            "is the loss mask empty, or every token filtered?",
            "is the schedule at its end (total_train_steps)?",
        ),
        "areal-debug record show RECORD: rewards of each group, and the tokens in the loss mask",
        "a gradient of 0 changes nothing",
        {"actor.dynamic_sampling": True},
        onset(series, "down"),
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
    least = (0.1 if is_learning(run) else 0.25) * series.first  # it falls as a sound policy learns
    if not fast and not series.sustained(lambda value: value < least):
        return None
    return Alarm(
        "D15",
        "entropy collapses",
        "error" if fast else "warning",
        entropy.name,
        f"median {series.last:.3g} in the last {series.window} steps, {series.before_last():.3g} before, {series.first:.3g} at first",
        series.tail(),
        (
            "clip higher: actor.eps_clip_higher 0.28",
            "a bonus for entropy (actor.entropy_coef 0.001) or a KL penalty (actor.kl_ctl)",
            "a smaller learning rate; temperature 1",
        ),
        "the same run with actor.eps_clip_higher=0.28",
        "DAPO (2503.14476), section 3.1; the limits are our own defaults, since levels differ from model to model",
        {"actor.eps_clip_higher": 0.28},
        onset(series, "down", in_ratios=True),
    )


def entropy_rises(run: Run) -> Alarm | None:
    """D19: entropy grows and the reward does not, or entropy is multiplied."""
    entropy = run.series.get("entropy")
    if entropy is None or not entropy.finite.rose(1.5):
        return None
    series = entropy.finite
    begins = onset(series, "up")
    gain = gain_since(run, begins)
    is_multiplied = series.rose(3.0)
    if not is_multiplied and (gain is None or gain.rises):
        return None
    return Alarm(
        "D19",
        "entropy explodes" if is_multiplied else "entropy rises without gaining reward",
        "error" if is_multiplied else "warning",
        entropy.name,
        f"median {series.last:.3g} in the last {series.window} steps, {series.first:.3g} at first"
        + (f"; the reward changed by {gain.change:+.3g} since step {begins}" if gain is not None else ""),
        series.tail(),
        (
            "no bonus for entropy (actor.entropy_coef 0), and clip higher by less (actor.eps_clip_higher)",
            "a smaller learning rate; a KL penalty (actor.kl_ctl)",
            "read samples: mixed languages, noise after the answer, completions that never end?",
            "does the engine sample what the trainer scores? areal-debug consistency RECORD",
        ),
        "the same run from the checkpoint before, with actor.entropy_coef=0",
        "verl #2738, #6382 and Search-R1 #162: entropy rises before the collapse; the limits are our own defaults",
        {"actor.entropy_coef": 0.0},
        begins,
    )


def critic_fails(run: Run) -> Alarm | None:
    """D28: the critic explains no more than a constant does, or its loss rises, even for a time."""
    explained, loss = run.series.get("explained_variance"), run.series.get("value_loss")
    exploded = peak_of_loss(loss.finite, explained) if loss is not None else None
    if explained is not None and explained.finite.sustained(lambda value: value < 0):
        series, worse = explained.finite, onset(explained.finite, "down")
        title = "the critic does not predict the returns"
        found = f"explained variance {series.last:.3g}, below 0 is worse than a constant"
    elif loss is not None and exploded is not None:
        series, worse = loss.finite, exploded[0]
        title = "the critic's loss explodes"
        found = f"{series.values[0]:.3g} at first, {exploded[1]:.3g} around step {worse}, {series.last:.3g} at the end"
    elif explained is not None and explains_nothing(explained.finite):
        series, worse = explained.finite, int(explained.finite.steps[0])
        title = "the critic learns nothing"
        found = f"explained variance never exceeds {LEAST_EXPLAINED:g} over a window; a constant has 0"
    elif loss is not None and len(loss.finite.values) >= ENOUGH_STEPS and rises_from_its_lowest(loss.finite):
        series, worse = loss.finite, onset(loss.finite, "up")
        title = "the critic's loss diverges"
        found = f"it had fallen, and is {series.last:.3g} in the last {series.window} steps, {series.first:.3g} at first"
    else:
        return None
    return Alarm(
        "D28",
        title,
        "warning",
        series.name,
        found,
        series.tail(),
        (
            "a larger learning rate of the critic, or warm it up first",
            "clip its gradients; normalise the returns",
            "group normalisation without a critic",
        ),
        "train the critic alone on recorded steps",
        "Stable Baselines 3 and TRL: explained variance must approach 1; the rest is our own default",
        {},
        worse,
    )


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
    windows = sliding_window_view(series.values, min(series.window, len(series.values)))
    medians: npt.NDArray[np.float64] = np.median(windows, axis=1)
    return medians


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
    return Alarm(
        "D16",
        "the policy moves away from its reference without gaining reward",
        "warning",
        divergence.name,
        f"KL grew by {grows.change:.3g}, the reward changed by {gains.change:+.3g}",
        divergence.tail(),
        (
            "stop, and lower the learning rate",
            "a larger actor.kl_ctl",
            "check that the reward can be earned at all",
        ),
        "the same run with a tenth of the learning rate: KL must grow by less for the same reward",
        "own default: trends of both over the run",
        {},
        onset(divergence.finite, "up", in_ratios=True),
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
    return Alarm(
        "D17",
        "gradients that are not finite" if bad.any() else "gradient spikes",
        "error" if bad.any() else "warning",
        norm.name,
        f"{len(at)} of {len(norm.values)} steps are "
        + (
            "not finite"
            if bad.any()
            else f"beyond {SPIKE:g} times their neighbours, the largest {times.max():.0f} times"
        ),
        tuple((int(norm.steps[i]), float(norm.values[i])) for i in at[:8]),
        (
            f"find the samples that {'break' if bad.any() else 'dominate'} step {first}: "
            f"areal-debug replay RECORD --explain {first}",
            "a smaller learning rate, gradient clipping (actor.optimizer.gradient_clipping 1.0)",
            "were weights stale there? compare with the logprob difference",
        ),
        "replay the step without its largest sample: --filter",
        "own default: by count and by size; miles: a jump together with the logprob difference means stale weights",
        {},
        first,
        f"{len(at)} updates whose direction a few samples chose" if not bad.any() else "",
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
    windows = sliding_window_view(np.pad(moving, half, constant_values=np.nan), NEIGHBOURS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a window of zeros only
        usual = np.nanmedian(windows, axis=1)
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
    return Alarm(
        "D18",
        "metrics that are not finite",
        "error",
        series.name,
        f"{len(at)} of {len(bad)} steps, the first is {step}"
        + (f"; also {', '.join(sorted(set(broken) - {first}))}" if len(broken) > 1 else ""),
        tuple((int(series.steps[i]), float(series.values[i])) for i in at[:8]),
        (
            f"find the first cause: areal-debug replay RECORD --explain {step}",
            "rewards and logprobs of that step: a reward function that divides by 0, an engine that gave -inf",
            "go back to the checkpoint before it",
        ),
        f"areal-debug goto RECORD --step {step}, and inspect the batch",
        "one value that is not finite makes every mean that contains it not finite",
        {},
        step,
    )


RULES = (
    gradients_spike,
    numbers_that_are_none,
    never_moves,
    importance_weight_off_one,
    many_tokens_are_clipped,
    entropy_collapses,
    entropy_rises,
    critic_fails,
    policy_drifts_for_nothing,
)
