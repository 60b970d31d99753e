"""Importance ratios near 1, rare clipping, stable entropy and gradients in the policy update."""

import numpy as np

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import trend

FAR_FROM_ONE = 0.05
FAR_AT_ONE_MINIBATCH = 1e-3


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
    )


def never_moves(run: Run) -> Alarm | None:
    """D13: gradient norm or learning rate is exactly 0: the optimizer changes nothing."""
    norm, rate = run.series.get("grad_norm"), run.series.get("lr")
    if norm is not None and norm.finite.sustained(lambda value: value == 0.0):
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
    )


def entropy_collapses(run: Run) -> Alarm | None:
    """D15: entropy halved within two windows, or fell below a quarter of its first value."""
    entropy = run.series.get("entropy")
    if entropy is None or len(entropy.finite.values) < 10:
        return None
    series = entropy.finite
    fast = series.last < 0.5 * series.before_last()
    if not fast and not series.sustained(lambda value: value < 0.25 * series.first):
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
    )


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
    )


def gradients_spike(run: Run) -> Alarm | None:
    """D17: single steps whose gradient norm is many times the median, or not finite."""
    norm = run.series.get("grad_norm")
    if norm is None:
        return None
    bad = ~np.isfinite(norm.values)
    if not bad.any() and len(norm.values) < 5:
        return None
    moving = norm.finite.values[norm.finite.values > 0]
    usual = np.median(moving) if len(moving) else np.inf
    spikes = bad if bad.any() else norm.values > 5 * usual
    if not bad.any() and spikes.sum() < max(2, 0.02 * len(norm.values)):
        return None
    at = np.flatnonzero(spikes)
    first = int(norm.steps[at[0]])
    return Alarm(
        "D17",
        "gradients that are not finite" if bad.any() else "gradient spikes",
        "error" if bad.any() else "warning",
        norm.name,
        f"{len(at)} of {len(norm.values)} steps are "
        + ("not finite" if bad.any() else f"beyond 5 times the median of {usual:.3g}"),
        tuple((int(norm.steps[i]), float(norm.values[i])) for i in at[:8]),
        (
            f"find the samples that {'break' if bad.any() else 'dominate'} step {first}: "
            f"areal-debug replay RECORD --explain {first}",
            "a smaller learning rate, gradient clipping (actor.optimizer.gradient_clipping 1.0)",
            "were weights stale there? compare with the logprob difference",
        ),
        "replay the step without its largest sample: --filter",
        "own default: 5 times the median; miles: a jump together with the logprob difference means stale weights",
    )


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
    )


RULES = (
    gradients_spike,
    numbers_that_are_none,
    never_moves,
    importance_weight_off_one,
    entropy_collapses,
    policy_drifts_for_nothing,
)
