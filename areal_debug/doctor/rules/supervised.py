"""Does supervised training learn: a loss that does not fall, held-out rows that are left behind, preferences that go wrong.

A run with a reward is judged by that: the loss of a policy gradient says nothing by its level.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.reading import Run
from areal_debug.doctor.rules.learning import ENOUGH_STEPS
from areal_debug.doctor.series import FEWEST_STEPS, Series, trend

MEDIAN_OF = 3  # measurements of held-out rows
CLEAR_SHARE = 0.05  # of the best held-out loss; where it starts is chosen for being lowest, so a sure trend is not enough
CHANCE = 0.5


def loss_does_not_fall(run: Run) -> Alarm | None:
    """D06: the trend of the loss over the run includes 0."""
    loss = run.series.get("loss")
    if "reward" in run.series or loss is None or len(loss.finite.values) < ENOUGH_STEPS:
        return None
    found = trend(loss.finite)
    if found is None or found.falls:
        return None
    return Alarm(
        "D06",
        "the loss rises" if found.rises else "the loss does not fall",
        "error" if found.rises else "warning",
        loss.name,
        found.told(len(loss.values)),
        loss.tail(),
        (
            "another learning rate: three times larger where the loss is flat, three times smaller where it rises",
            "read a batch as text, with its loss mask: are the trained tokens the answers?",
            "do the data fit the model's chat template and its end-of-sequence token?",
        ),
        "train on one batch again and again: if its loss does not go towards 0, the training is broken, not the data",
        "a supervised loss falls or nothing is learned; Theil-Sen slope with block bootstrap",
    )


def held_out_loss_rises(run: Run) -> Alarm | None:
    """D07: the held-out loss was lower before, and that of training does not rise, which D06 would tell."""
    held_out, loss = run.series.get("eval_loss"), run.series.get("loss")
    trained = trend(loss.finite) if loss is not None else None
    if trained is not None and trained.rises:
        return None
    if held_out is None or len(held_out.finite.values) < FEWEST_STEPS:
        return None
    series = held_out.finite
    medians = np.median(sliding_window_view(series.values, MEDIAN_OF), axis=1)
    best, lowest = int(np.argmin(medians)) + MEDIAN_OF // 2, float(medians.min())
    if len(series.values) - best < 2 * series.window:
        return None
    found = trend(Series(series.name, series.steps[best:], series.values[best:]))
    if found is None or not found.rises or found.change < max(CLEAR_SHARE * abs(lowest), 2 * found.scatter):
        return None
    meanwhile = "" if trained is None else f"; that of training by {trained.change:+.3g} over the run"
    at = int(series.steps[best])
    return Alarm(
        "D07",
        "the held-out loss rises: the model learns its rows by heart",
        "warning",
        held_out.name,
        f"around step {at} it was {lowest:.4g}, from there it changes by {found.change:+.3g}{meanwhile}",
        ((at, lowest), *series.tail(3)),
        (
            f"use the checkpoint of about step {at}",
            "fewer epochs (total_train_epochs), or more data",
            "a smaller learning rate, or an adapter (actor.use_lora)",
        ),
        f"the same run with total_train_steps={at + 1}: it must end at its best",
        "own default: by 5 % of the best and twice the scatter, over two windows or more; Theil-Sen slope with block bootstrap",
    )


def preferences_are_chance(run: Run) -> Alarm | None:
    """D08: the chosen side does not win more often than the other."""
    accuracy = run.series.get("preference_accuracy")
    if accuracy is None or not accuracy.finite.sustained(lambda value: value <= CHANCE):
        return None
    series = accuracy.finite
    return Alarm(
        "D08",
        "preferences are guessed",
        "error",
        accuracy.name,
        f"median {series.last:.3g} in the last {series.window} steps: no better than {CHANCE}",
        series.tail(),
        (
            "read some pairs: is `chosen` the better side, and are both answers to the same prompt?",
            "a larger learning rate; for DPO a larger actor.beta",
            "do pairs differ where max_length does not cut them?",
        ),
        "train on 32 pairs again and again: their accuracy must reach 1",
        "the level of a coin",
    )


def chosen_answers_lose_probability(run: Run) -> Alarm | None:
    """D09: DPO drives both sides down, and the chosen one below the reference."""
    chosen = run.series.get("chosen_reward")
    if chosen is None or not chosen.finite.sustained(lambda value: value < 0):
        return None
    found = trend(chosen.finite)
    if found is None or not found.falls:
        return None
    return Alarm(
        "D09",
        "chosen answers become less likely, too",
        "warning",
        chosen.name,
        f"it changes by {found.change:+.3g} over the run and is {chosen.finite.last:.3g} at the end; above 0 the policy "
        "likes them more than its reference does",
        chosen.finite.tail(),
        (
            "a smaller learning rate, or a larger actor.beta",
            "fine-tune on the chosen answers first (SFT)",
            "actor.loss_type=ipo, which stops at a margin",
        ),
        "the same run with a tenth of the learning rate: does the accuracy rise without the fall?",
        "likelihood displacement (2410.08847)",
        {"actor.loss_type": "ipo"},
    )


RULES = (loss_does_not_fall, held_out_loss_rises, preferences_are_chance, chosen_answers_lose_probability)
