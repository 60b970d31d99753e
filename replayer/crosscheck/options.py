"""What a trainer's options mean for the numbers of a step, in one vocabulary for all trainers.

`Options` holds the values that decide rewards, advantages, loss and gradient. Configurations of our
trainer, TRL and verl are read into it (`their_configs.py`), and `option_table.py` lists the values
that a search tries. A value that a configuration leaves to its trainer is that trainer's default.
"""

from dataclasses import dataclass, fields
from math import inf
from typing import Any

STAGES = ("rewards", "mask", "kl", "advantages", "loss", "gradient")


@dataclass(frozen=True)
class Options:
    """Options of one step. Levels are "group", "batch" or None.

    Attributes:
        mask: tokens of the completion that count: the loss mask, or a variant of it.
        overlong: max_new_tokens, length of the zone and factor of DAPO's penalty.
        truncated: reward of truncated completions: "kept" or "zero".
        kl_place: the KL in the reward is added to "rewards", before they are normalised, or to
            "advantages".
        lone: advantage of the only row of a group: "zero", or "reward", its own reward.
        inside_root: eps is added to the variance instead of the standard deviation.
        length: "kept", or "divided" by the number of the row's tokens in the mask.
        token_*: normalisation of the advantages over tokens, after that over rows.
        old_logprobs: denominator of the ratio: "rollout", "trainer" (recomputed before the step),
            or "current" (the ratio is 1).
        correction: of tokens for the sampling policy, trainer / rollout: None, or "truncated" or
            "masked" above `correction_cap`, "tokens" or "sequences".
        clip_high: None is clip_low; dual_clip: None is off.
        kl_weight: a token's KL in the loss is multiplied by its "ratio", or not (None).
        norm: which gradient norm is reported: "before" clipping or "after" it, at `max_norm`.
    """

    reward_bias: float = 0.0
    reward_scaling: float = 1.0
    reward_clip: float = inf
    overlong: tuple[int, int, float] | None = None
    truncated: str = "kept"
    mask: str = "loss mask"
    kl_reward_coef: float = 0.0
    kl_reward_estimator: str = "k1"
    kl_place: str = "advantages"
    grouping: str = "prompt"
    mean: str | None = "group"
    leave_one_out: bool = False
    std: str | None = "group"
    unbiased: bool = True
    eps: float = 1e-5
    inside_root: bool = False
    lone: str = "zero"
    length: str = "kept"
    discount: float = 1.0
    gae_lambda: float = 1.0
    token_mean: str | None = None
    token_std: str | None = None
    token_leave_one_out: bool = False
    token_unbiased: bool = True
    token_eps: float = 1e-5
    token_inside_root: bool = False
    old_logprobs: str = "rollout"
    correction: str | None = None
    correction_cap: float | None = None
    ratio_level: str = "token"
    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: str = "token-mean"
    max_length: int = 1
    empty_rows: str = "left out"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_weight: str | None = None
    norm: str = "before"
    max_norm: float = inf


STAGE_OF = (
    dict.fromkeys(("reward_bias", "reward_scaling", "reward_clip", "overlong", "truncated"), "rewards")
    | {"mask": "mask"}
    | dict.fromkeys(("kl_reward_coef", "kl_reward_estimator", "kl_place"), "kl")
    | dict.fromkeys(
        (
            *("grouping", "mean", "leave_one_out", "std", "unbiased", "eps", "inside_root", "lone"),
            *("length", "discount", "gae_lambda", "token_mean", "token_std", "token_leave_one_out"),
            *("token_unbiased", "token_eps", "token_inside_root"),
        ),
        "advantages",
    )
    | dict.fromkeys(
        (
            *("old_logprobs", "correction", "correction_cap", "ratio_level", "clip_low", "clip_high"),
            *("dual_clip", "aggregation", "max_length", "empty_rows", "kl_coef", "kl_estimator", "kl_weight"),
        ),
        "loss",
    )
    | dict.fromkeys(("norm", "max_norm"), "gradient")
)

PHRASES = {
    "reward_bias": "the number added to rewards",
    "reward_scaling": "the factor on rewards",
    "reward_clip": "the bound on rewards",
    "overlong": "the penalty of overlong completions (length, zone, factor)",
    "truncated": "the reward of truncated completions",
    "mask": "the tokens that count",
    "kl_reward_coef": "the weight of the KL in the reward",
    "kl_reward_estimator": "the estimator of the KL in the reward",
    "kl_place": "what the KL in the reward is added to",
    "grouping": "the rows of a group",
    "mean": "the level of the mean that is subtracted",
    "leave_one_out": "leaving a row out of its own mean",
    "std": "the level of the standard deviation that divides",
    "unbiased": "the division by n - 1 in the standard deviation",
    "eps": "the number added to the standard deviation",
    "inside_root": "adding that number to the variance instead",
    "lone": "the advantage of the only row of a group",
    "length": "the advantage of long rows",
    "discount": "the discount",
    "gae_lambda": "lambda of GAE",
    "token_mean": "the level of the mean over tokens",
    "token_std": "the level of the standard deviation over tokens",
    "token_leave_one_out": "leaving a token out of its own mean",
    "token_unbiased": "the division by n - 1 in the standard deviation over tokens",
    "token_eps": "the number added to the standard deviation over tokens",
    "token_inside_root": "adding that number to the variance over tokens instead",
    "old_logprobs": "the log-probs that the ratio divides by",
    "correction": "the correction for the sampling policy",
    "correction_cap": "the largest correction for the sampling policy",
    "ratio_level": "the level of the importance ratio",
    "clip_low": "the lower clip range",
    "clip_high": "the upper clip range",
    "dual_clip": "the dual clip",
    "aggregation": "the aggregation of the loss",
    "max_length": "the length that divides the loss of a sequence",
    "empty_rows": "rows without a token that counts",
    "kl_coef": "the weight of the KL in the loss",
    "kl_estimator": "the estimator of the KL in the loss",
    "kl_weight": "the weight of a token's KL in the loss",
    "norm": "the gradient norm that is reported, before or after clipping",
    "max_norm": "the largest gradient norm",
}


@dataclass(frozen=True)
class Change:
    """An option whose value in the record differs from the expected one."""

    option: str
    expected: Any
    recorded: Any


def changes(expected: Options, recorded: Options) -> tuple[Change, ...]:
    """Return the options that differ."""
    pairs = [
        (field.name, getattr(expected, field.name), getattr(recorded, field.name))
        for field in fields(Options)
    ]
    return tuple(Change(name, left, right) for name, left, right in pairs if left != right)


def sentence(found: tuple[Change, ...], others: tuple[tuple[Change, ...], ...], source: str) -> str:
    """Describe changes: "the number added to the standard deviation is 1e-06, TRL has 0.0001"."""
    text = "; ".join(
        f"{PHRASES[change.option]} is {shown(change.recorded)}, {source} {shown(change.expected)}"
        for change in found
    )
    if not others:
        return text
    fits = "; ".join(
        ", ".join(f"{PHRASES[change.option]} {shown(change.recorded)}" for change in other)
        for other in others
    )
    return f"{text} (what fits as well: {fits})"


def shown(value: Any) -> str:
    """Format a value of an option: numbers short, None as "none", truths as "on" and "off"."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
