"""Metrics that have a level of their own: bad when the medians of both last windows are beyond it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areal_debug.doctor.alarm import Alarm
from areal_debug.doctor.reading import Run
from areal_debug.doctor.rules.learning import SYNCHRONOUS

NAME_THE_CAUSE = "find out whether the engine's logprobs are right: areal-debug consistency RECORD"


@dataclass(frozen=True)
class Threshold:
    """`is_bad` gets the median of a window; `is_grave` makes a warning an error; `limit` says the level in words."""

    id: str
    quantity: str
    title: str
    limit: str
    is_bad: Callable[[float], bool]
    is_grave: Callable[[float], bool]
    advice: tuple[str, ...]
    experiment: str
    source: str
    overrides: dict[str, Any] = field(default_factory=dict)


def beyond(threshold: Threshold, run: Run) -> Alarm | None:
    """The alarm of a threshold."""
    series = run.series.get(threshold.quantity)
    if series is None or not series.finite.sustained(threshold.is_bad):
        return None
    last = series.finite.last
    return Alarm(
        threshold.id,
        threshold.title,
        "error" if threshold.is_grave(last) else "warning",
        series.name,
        f"median {last:.4g} in the last {series.finite.window} steps ({threshold.limit})",
        series.finite.tail(),
        threshold.advice,
        threshold.experiment,
        threshold.source,
        threshold.overrides,
    )


def never(value: float) -> bool:
    """A warning stays a warning."""
    return False


def always(value: float) -> bool:
    """The run is worth nothing as it is."""
    return True


THRESHOLDS = (
    Threshold(
        "D11",
        "behave_imp_weight",
        "behaviour weights are off 1",
        "more than 0.05 off 1",
        lambda value: abs(value - 1) > 0.05,
        never,
        (
            NAME_THE_CAUSE,
            "a smaller rollout.max_head_offpolicyness",
            "bound the weights: actor.rejection_sampling {level: token, action: mask, upper: 5.0}",
        ),
        "the synchronous baseline: what is left of the deviation there is no staleness",
        "AReaL, best practices; the limit is our own default",
        SYNCHRONOUS,
    ),
    Threshold(
        "D12",
        "clip_ratio",
        "more than half of the tokens are clipped",
        "more than 0.5",
        lambda value: value > 0.5,
        always,
        ("a smaller learning rate", "fewer minibatches", "the same dtype in engine and trainer"),
        "one step with actor.optimizer.lr=0: what is clipped then is a difference of precision, not of policy",
        "miles: above 0.5 lower the learning rate; Hugging Face (2026-04): phantom clipping",
    ),
    Threshold(
        "D14",
        "approx_kl",
        "updates move the policy too far",
        "more than 0.05",
        lambda value: abs(value) > 0.05,
        never,
        ("a smaller learning rate", "fewer minibatches", "a smaller actor.eps_clip"),
        "the same steps from a record with half the learning rate: areal-debug replay RECORD --set actor.optimizer.lr=...",
        "approximate KL of 0.02 to 0.05 an update is the usual limit (Spinning Up, CleanRL)",
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
        "D22",
        "zero_variance_groups",
        "most groups have one and the same reward",
        "more than 0.5 of them",
        lambda value: value > 0.5,
        lambda value: value > 0.8,
        (
            "leave such groups out: actor.dynamic_sampling",
            "harder prompts if rewards are high, easier ones if they are low",
            "more samples a prompt (gconfig.n_samples)",
        ),
        "the same run with dynamic sampling",
        "TRL, frac_reward_zero_std; DAPO (2503.14476), section 3.2",
        {"actor.dynamic_sampling": True},
    ),
    Threshold(
        "D25",
        "effective_samples",
        "few samples count after importance weighting",
        "less than 0.5 of them",
        lambda value: value < 0.5,
        lambda value: value < 0.3,
        (NAME_THE_CAUSE, "less staleness", "truncate the weights"),
        "the synchronous baseline",
        "verl: below 0.3 is severe; on-policy runs stay above 0.99",
        SYNCHRONOUS,
    ),
    Threshold(
        "D26",
        "filtered",
        "rejection sampling drops too much",
        "more than 0.05",
        lambda value: value > 0.05,
        lambda value: value > 0.2,
        (f"mend what makes the logprobs differ, not the threshold; {NAME_THE_CAUSE}", "less staleness"),
        "the synchronous baseline: what is dropped there is a mismatch, not staleness",
        "own default (5 %, 20 %); SkyRL reports collapse at about 45 %",
        SYNCHRONOUS,
    ),
    Threshold(
        "D28",
        "explained_variance",
        "the critic explains nothing",
        "below 0, worse than a constant",
        lambda value: value < 0,
        never,
        ("a larger learning rate of the critic, or warm it up first", "group normalisation without a critic"),
        "train the critic alone on recorded steps",
        "Stable Baselines 3 and TRL: explained variance must go towards 1",
    ),
)
