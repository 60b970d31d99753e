"""Samples that grow longer without reward, are stale, fail, or carry wrong logprobs."""

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import SYNCHRONOUS
from areal_debug.doctor.series import trend


def grows_longer(run: Run) -> Alarm | None:
    """D21: completions grow and the reward does not."""
    length, reward = run.series.get("length"), run.series.get("reward")
    if length is None or reward is None:
        return None
    grows, gains = trend(length.finite), trend(reward.finite)
    if grows is None or gains is None or not grows.rises or gains.rises:
        return None
    if grows.change < 0.25 * length.finite.first:
        return None
    return Alarm(
        "D21",
        "completions grow longer without more reward",
        "warning",
        length.name,
        f"they grew by {grows.change:.0f} tokens from {length.finite.first:.0f}, the reward changed by {gains.change:+.3g}",
        length.tail(),
        (
            "a loss that does not favour length: Dr.GRPO (constant denominator), or DAPO's token mean",
            "an overlong penalty (actor.overlong_reward_penalty)",
            "read long samples: do they repeat themselves?",
        ),
        "reward against length over one step's samples: areal-debug view RECORD",
        "Dr.GRPO (2503.20783); DAPO (2503.14476), section 3.4",
        {"actor.overlong_reward_penalty": True},
    )


def samples_are_old(run: Run) -> Alarm | None:
    """D23: staleness grows, or exceeds its limit."""
    lag = run.series.get("staleness")
    if lag is None:
        return None
    allowed = run.config.get("rollout.max_head_offpolicyness")
    series = lag.finite
    beyond = allowed is not None and series.sustained(lambda value: value > allowed)
    found = trend(series)
    grows = found is not None and found.rises and found.change > 1
    if not beyond and not (grows and series.last > 2):
        return None
    return Alarm(
        "D23",
        "samples are staler than allowed" if beyond else "staleness grows",
        "error" if beyond else "warning",
        lag.name,
        f"median {series.last:.2g} versions in the last {series.window} steps, {series.first:.2g} at the beginning"
        + (f"; rollout.max_head_offpolicyness is {allowed}" if allowed is not None else ""),
        series.tail(),
        ("more or faster engines", "a smaller rollout.max_head_offpolicyness", "shorter completions"),
        "the synchronous baseline",
        "own default; AReaL bounds staleness by max_head_offpolicyness",
        SYNCHRONOUS,
    )


def engine_disagrees(run: Run) -> Alarm | None:
    """D24: logprobs of engine and trainer differ, from the start or from some step on."""
    difference = run.series.get("logprob_difference") or run.series.get("k3")
    if difference is None:
        return None
    series, is_k3 = difference.finite, "logprob_difference" not in run.series
    limit = 0.015 if is_k3 else 0.03
    jumped = series.sustained(lambda value: value > 2.5 * series.first) and series.last > limit / 3
    if not jumped and not series.sustained(lambda value: value > limit):
        return None
    return Alarm(
        "D24",
        "engine and trainer drift apart" if jumped else "engine and trainer disagree",
        "error",
        difference.name,
        f"median {series.last:.3g} in the last {series.window} steps, {series.first:.3g} at the beginning (limit {limit:g})",
        series.tail(),
        (
            "name the cause: areal-debug consistency RECORD --previous CHECKPOINT",
            "compare weights after every weight sync: rollout.verify_weights_every=1",
            "flush the prefix cache at every weight sync",
        ),
        "areal-debug consistency on one step before and one after the rise",
        "miles: mean |D| above 0.03; prime-rl: KL above 0.015; vime#64: a rise from 0.011 to 0.036 was a stale engine",
        {"rollout.verify_weights_every": 1, "consistency.every_k_steps": 1},
    )


def episodes_fail(run: Run) -> Alarm | None:
    """D27: more than one episode in twenty ends in an exception."""
    failed, accepted = run.series.get("failed"), run.series.get("accepted")
    if failed is None or accepted is None or not len(failed.values):
        return None
    count, total = float(failed.values[-1]), float(failed.values[-1] + accepted.values[-1])
    if total == 0 or count / total <= 0.05:
        return None
    return Alarm(
        "D27",
        "episodes fail",
        "warning",
        failed.name,
        f"{count:.0f} of {total:.0f} prompts so far",
        failed.tail(),
        (
            "read the run's log: it names each failure with its prompt",
            "run one episode alone: areal-debug agent run",
        ),
        "areal-debug agent stress with the concurrency of training",
        "prime-rl: sustained errors above 5 %",
    )


RULES = (
    engine_disagrees,
    samples_are_old,
    grows_longer,
    episodes_fail,
)
