"""Metrics with an absolute limit: bad if the medians of both last windows are beyond it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.onset import Worse, onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import SYNCHRONOUS
from areal_debug.doctor.series import Series

NAME_THE_CAUSE = "check whether the engine's logprobs are right: areal-debug consistency RECORD"


@dataclass(frozen=True)
class Threshold:
    """A limit on the median of a window.

    `is_severe` makes a warning an error; `limit` is the text of the limit. `target` is the value
    that the metric should have: its distance to it is what gets worse; None: its value does.
    """

    id: str
    quantity: str
    title: str
    limit: str
    is_bad: Callable[[float], bool]
    is_severe: Callable[[float], bool]
    advice: tuple[str, ...]
    experiment: str
    source: str
    overrides: dict[str, Any] = field(default_factory=dict)
    worse: Worse = "up"
    target: float | None = None


def beyond(threshold: Threshold, run: Run) -> Alarm | None:
    """Return the alarm of a threshold, or None."""
    series = run.series.get(threshold.quantity)
    if series is None or not series.finite.sustained(threshold.is_bad):
        return None
    last, judged = series.finite.last, series.finite
    if threshold.target is not None:
        judged = Series(series.name, judged.steps, abs(judged.values - threshold.target))
    return Alarm(
        threshold.id,
        threshold.title,
        "error" if threshold.is_severe(last) else "warning",
        series.name,
        f"median {last:.4g} in the last {series.finite.window} steps ({threshold.limit})",
        series.finite.tail(),
        threshold.advice,
        threshold.experiment,
        threshold.source,
        threshold.overrides,
        onset(judged, threshold.worse),
    )


def never(value: float) -> bool:
    """Return False: the alarm stays a warning."""
    return False


THRESHOLDS = (
    Threshold(
        "D11",
        "behave_imp_weight",
        "behaviour importance weights deviate from 1",
        "more than 0.05 from 1",
        lambda value: abs(value - 1) > 0.05,
        never,
        (
            NAME_THE_CAUSE,
            "a smaller rollout.max_head_offpolicyness",
            "bound the weights: actor.rejection_sampling {level: token, action: mask, upper: 5.0}",
        ),
        "the synchronous baseline: a deviation that remains is not due to staleness",
        "AReaL, best practices; the limit is our own default",
        SYNCHRONOUS,
        target=1.0,
    ),
    Threshold(
        "D14",
        "approx_kl",
        "updates move the policy too far",
        "more than 0.05",
        lambda value: abs(value) > 0.05,
        never,
        ("a smaller learning rate", "fewer minibatches", "a smaller actor.eps_clip"),
        "the same steps from a record with half the learning rate: areal-debug replay RECORD actor.optimizer.lr=...",
        "approximate KL of 0.02 to 0.05 an update is the usual limit (Spinning Up, CleanRL)",
        target=0.0,
    ),
    Threshold(
        "D20",
        "no_eos",
        "too many completions are cut off",
        "more than 0.05 end without EOS",
        lambda value: value > 0.05,
        lambda value: value > 0.5,
        (
            "a larger gconfig.max_new_tokens",
            "filter prompts whose answers are too long",
            "an overlong penalty (actor.overlong_reward_penalty)",
            "does the model know when to stop? fine-tune on answers that end in EOS first",
        ),
        "the same prompts with twice gconfig.max_new_tokens: how many end then?",
        "AReaL, best practices: no_eos_ratios above 0.05",
    ),
    Threshold(
        "D25",
        "effective_samples",
        "small effective sample size after importance weighting",
        "less than 0.5 of them",
        lambda value: value < 0.5,
        lambda value: value < 0.3,
        (NAME_THE_CAUSE, "less staleness", "truncate the weights"),
        "the synchronous baseline",
        "verl: below 0.3 is severe; on-policy runs stay above 0.99",
        SYNCHRONOUS,
        worse="down",
    ),
    Threshold(
        "D26",
        "filtered",
        "rejection sampling drops too much",
        "more than 0.05",
        lambda value: value > 0.05,
        lambda value: value > 0.2,
        (f"fix the cause of the logprob mismatch, not the threshold; {NAME_THE_CAUSE}", "less staleness"),
        "the synchronous baseline: tokens dropped there show a mismatch, not staleness",
        "own default (5 %, 20 %); SkyRL reports collapse at about 45 %",
        SYNCHRONOUS,
    ),
)
