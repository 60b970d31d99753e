"""Rewards that do not rise, get noisier, do not carry over to validation, or fall after a peak."""

import numpy as np

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import trend

ENOUGH_STEPS = 20
# In the order of AReaL's algorithm guide (docs/en/best_practices/algo_perf.md).
EXPERIMENTS = (
    "evaluate the model before training: is there any reward to begin with?",
    "train on the test set: if its reward cannot rise either, the training is broken, not the data",
    "tune the learning rate and the batch size",
    "fine-tune on solutions (SFT) first, so that some samples are right",
    "filter the data: drop prompts that all samples solve or none does",
)
SYNCHRONOUS = {
    "rollout.max_head_offpolicyness": 0,
    "actor.recompute_logprob": False,
    "actor.use_decoupled_loss": False,
}


def reward_does_not_rise(run: Run) -> Alarm | None:
    """D01: the 95 % interval of the reward's trend includes 0."""
    reward = run.series.get("reward")
    if reward is None or len(reward.finite.values) < ENOUGH_STEPS:
        return None
    found = trend(reward.finite)
    if found is None or found.rises:
        return None
    falls = found.falls
    return Alarm(
        "D01",
        "the reward falls" if falls else "the reward does not rise",
        "error" if falls else "warning",
        reward.name,
        found.describe(len(reward.values)),
        reward.tail(),
        EXPERIMENTS,
        "the synchronous baseline: if its reward rises, staleness is the cause",
        "AReaL, best practices for algorithm performance; Theil-Sen slope with block bootstrap",
        SYNCHRONOUS,
    )


def reward_scatters(run: Run) -> Alarm | None:
    """D02: the scatter around the reward's trend exceeds the gain of the complete run."""
    reward = run.series.get("reward")
    if reward is None or len(reward.finite.values) < ENOUGH_STEPS:
        return None
    values = reward.finite.values
    found = trend(reward.finite)
    half = len(values) // 2
    early, late = (float(np.std(np.diff(part)) / np.sqrt(2)) for part in (values[:half], values[half:]))
    if found is None or not found.rises or late < 1.5 * early or late < abs(found.change):
        return None
    return Alarm(
        "D02",
        "the reward gets noisier",
        "warning",
        reward.name,
        f"from step to step it scatters by {late:.3g} in the second half, {early:.3g} in the first; the run gained {found.change:.3g}",
        reward.tail(),
        (
            "a larger train_dataset.batch_size",
            "more samples a prompt (gconfig.n_samples)",
            "a smaller learning rate",
        ),
        "the same run with twice the batch: the scatter must fall by a factor of about 1.4",
        "AReaL, best practices for algorithm performance: the variance of task_reward should fall",
    )


def validation_is_left_behind(run: Run) -> Alarm | None:
    """D03: the training reward rises, the validation reward does not."""
    train, validation = run.series.get("reward"), run.series.get("eval_reward")
    if train is None or validation is None:
        return None
    rises, stays = trend(train.finite), trend(validation.finite)
    if rises is None or stays is None or not rises.rises or stays.rises:
        return None
    return Alarm(
        "D03",
        "the training reward rises and validation does not follow",
        "warning",
        validation.name,
        f"training gained {rises.change:+.3g}, validation {stays.change:+.3g} (interval {stays.low:+.3g} to {stays.high:+.3g})",
        validation.tail(),
        (
            "read samples with the highest reward: is it reward hacking?",
            "compare the distribution of training and validation prompts",
            "fewer epochs, or more data",
        ),
        "score validation samples manually and compare with the reward function",
        "AReaL, best practices; TRL, how to read the logs",
    )


def reward_fell_from_its_peak(run: Run) -> Alarm | None:
    """D04: the reward was higher before, by more than the run's own scatter."""
    reward = run.series.get("reward")
    if reward is None or len(reward.finite.values) < ENOUGH_STEPS:
        return None
    series = reward.finite
    medians = [
        float(np.median(series.values[i : i + series.window]))
        for i in range(len(series.values) - series.window + 1)
    ]
    peak = int(np.argmax(medians))
    # 0.954: median absolute difference of two normal values, in standard deviations.
    scatter = float(np.median(np.abs(np.diff(series.values)))) / 0.954
    fall = medians[peak] - series.last
    if not series.sustained(lambda value: medians[peak] - value > 2 * scatter) or fall < 0.1 * abs(
        medians[peak]
    ):
        return None
    at = int(series.steps[peak])
    return Alarm(
        "D04",
        "the reward fell after a peak",
        "error",
        reward.name,
        f"around step {at} its median was {medians[peak]:.3g}, at the end {series.last:.3g}; steps scatter by {scatter:.2g}",
        ((at, medians[peak]), *series.tail(3)),
        (
            f"go back to the checkpoint before step {at + series.window}; continuing makes it worse",
            "check what else changed there: entropy, gradient norm, length, importance weights",
            "a smaller learning rate from there",
        ),
        f"areal-debug goto RECORD --step {at}, then the same steps with half the learning rate",
        "own default: two windows below the peak by twice the scatter",
    )


RULES = (reward_fell_from_its_peak, reward_does_not_rise, reward_scatters, validation_is_left_behind)
