"""Are the samples worth training on: longer and longer, old, failing, or told with wrong logprobs."""

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.reading import Run
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
        "completions grow longer and earn nothing",
        "warning",
        length.name,
        f"they grew by {grows.change:.0f} tokens from {length.finite.first:.0f}, the reward changed by {gains.change:+.3g}",
        length.tail(),
        (
            "a loss that does not favour length: Dr.GRPO (constant denominator), or DAPO's token mean",
            "an overlong penalty (actor.overlong_reward_penalty)",
            "look at long samples: repetition?",
        ),
        "reward against length over one step's samples: areal-debug view RECORD",
        "Dr.GRPO (2503.20783); DAPO (2503.14476), section 3.4",
        {"actor.overlong_reward_penalty": True},
    )


def samples_are_old(run: Run) -> Alarm | None:
    """D23: samples grow older from step to step."""
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
        "samples are older than allowed" if beyond else "samples grow older",
        "error" if beyond else "warning",
        lag.name,
        f"median {series.last:.2g} versions in the last {series.window} steps, {series.first:.2g} at the beginning"
        + (f"; rollout.max_head_offpolicyness is {allowed}" if allowed is not None else ""),
        series.tail(),
        ("more or faster engines", "a smaller rollout.max_head_offpolicyness", "shorter completions"),
        "the synchronous baseline",
        "own default; AReaL bounds the age by max_head_offpolicyness",
        SYNCHRONOUS,
    )


def engine_disagrees(run: Run) -> Alarm | None:
    """D24: the engine's logprobs are not those of the trainer, all the time or from some step on."""
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
            "compare weights after every push: rollout.verify_weights_every=1",
            "flush the prefix cache at every push",
        ),
        "areal-debug consistency on a step before and one after it began",
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
        ("read the run's log: each failure is there with its prompt", "run one alone: areal-debug agent run"),
        "areal-debug agent stress with the concurrency of training",
        "prime-rl: sustained errors above 5 %",
    )


RULES = (
    engine_disagrees,
    samples_are_old,
    grows_longer,
    episodes_fail,
)
