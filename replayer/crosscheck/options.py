"""What a trainer's options mean for the numbers of a step, in one vocabulary for all trainers.

`Options` holds the values that decide rewards, advantages, loss and gradient. Configurations of our
trainer, TRL, verl, slime and miles are read into it (`their_configs.py`), and the rows of `KNOWN`
list the values that a search tries. A value that a configuration leaves to its trainer is
that trainer's default.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from math import inf, isclose
from operator import itemgetter
from types import MappingProxyType
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
        teacher_coef: weight of log p - log p_teacher, which is subtracted from a token's advantage.
        token_*: normalisation of the advantages over tokens, after that over rows.
        token_sets: the tokens that are normalised together: all, or those of each rank.
        context_parallel: ranks that hold the tokens of a row; `micro_batches`: parts of equal size
            into which the rows of an update are cut.
        old_logprobs: denominator of the ratio: "rollout", "trainer" (recomputed before the step),
            or "current" (the ratio is 1).
        correction: of tokens for the sampling policy, trainer / rollout: None, or "truncated" or
            "masked" above `correction_cap`, "tokens" or "sequences".
        clip_high: None is clip_low; dual_clip: None is off.
        kl_weight: a token's KL in the loss is multiplied by its "ratio", or not (None).
        policy_mask: tokens whose policy loss is added up, a variant of the loss mask, and kl_mask
            those
            whose KL is; by default `mask`, by whose tokens both are divided.
        kl_logprobs: the log-probs whose KL to the reference is in the loss.
        loss_scale: factor on the loss, gradient_scale on its gradient alone.
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
    teacher_coef: float = 0.0
    token_mean: str | None = None
    token_std: str | None = None
    token_leave_one_out: bool = False
    token_unbiased: bool = True
    token_eps: float = 1e-5
    token_inside_root: bool = False
    token_sets: str = "all tokens"
    context_parallel: int = 1
    micro_batches: int = 1
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
    policy_mask: str = "the tokens that count"
    kl_mask: str = "the tokens that count"
    kl_logprobs: str = "current"
    entropy_coef: float = 0.0
    loss_scale: float = 1.0
    gradient_scale: float = 1.0
    norm: str = "before"
    max_norm: float = inf


@dataclass(frozen=True)
class Known:
    """An option: the stage that it decides, its name in a sentence, usual values."""

    stage: str
    phrase: str
    values: tuple[Any, ...] = ()


EPS = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
LEVELS = ("group", "batch", None)
EXCHANGED = " of the exchanged arguments"
ESTIMATORS = ("k1", "k2", "k3", "abs", *(name + EXCHANGED for name in ("k1", "k3")))
SCALES = tuple(
    sorted({x for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128) for x in (1 / n, float(n))})
)
CLIPS = (0.1, 0.15, 0.18, 0.2, 0.25, 0.28, 0.3, 0.4, 0.5, 3e-4, 4e-4, 1e9)
WEIGHTS = (0.0, 1e-4, 1e-3, 3e-3, 5e-3, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.2, 0.5, 1.0)

MASKS = (
    "loss mask",
    "shifted by +1",
    "shifted by -1",
    "without the last token",
    "without the first token",
    "without truncated rows",
    "everything after the prompt",
    "all tokens",
)
COUNTED = "the tokens that count"
CORRECTIONS = (None, "truncated tokens", "masked tokens", "truncated sequences", "masked sequences")
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
    "token-mean of each rank",
    "token-mean of each micro-batch",
)
OF_RANKS = ("each context-parallel rank, in zigzag", "each context-parallel rank, in blocks")
TOKEN_SETS = (
    *("all tokens", "the tokens of each rank"),
    *(f"the tokens {by}of {ranks}" for ranks in OF_RANKS for by in ("", "by their inputs ")),
)
KNOWN = {
    "reward_bias": Known("rewards", "the number added to rewards", (0.0, -0.5, 0.5, 1.0, -1.0)),
    "reward_scaling": Known("rewards", "the factor on rewards", (1.0, 0.1, 0.5, 2.0, 5.0, 10.0)),
    "reward_clip": Known("rewards", "the bound on rewards", (inf, 0.5, 1.0, 5.0, 10.0, 20.0)),
    "overlong": Known("rewards", "the penalty of overlong completions (length, zone, factor)", (None,)),
    "truncated": Known("rewards", "the reward of truncated completions", ("kept", "zero")),
    "mask": Known("mask", "the tokens that count", MASKS),
    "kl_reward_coef": Known("kl", "the weight of the KL in the reward", WEIGHTS),
    "kl_reward_estimator": Known("kl", "the estimator of the KL in the reward", ESTIMATORS),
    "kl_place": Known("kl", "what the KL in the reward is added to", ("advantages", "rewards")),
    "grouping": Known("advantages", "the rows of a group", ("prompt", "consecutive rows", "every n-th row")),
    "mean": Known("advantages", "the level of the mean that is subtracted", LEVELS),
    "leave_one_out": Known("advantages", "leaving a row out of its own mean", (False, True)),
    "std": Known("advantages", "the level of the standard deviation that divides", LEVELS),
    "unbiased": Known("advantages", "the division by n - 1 in the standard deviation", (True, False)),
    "eps": Known("advantages", "the number added to the standard deviation", EPS),
    "inside_root": Known("advantages", "adding that number to the variance instead", (False, True)),
    "lone": Known("advantages", "the advantage of the only row of a group", ("zero", "reward")),
    "length": Known("advantages", "the advantage of long rows", ("kept", "divided")),
    "discount": Known("advantages", "the discount", (1.0, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9)),
    "gae_lambda": Known("advantages", "lambda of GAE", (1.0, 0.99, 0.98, 0.97, 0.95, 0.9)),
    "teacher_coef": Known("advantages", "the weight of the teacher's term, for distillation", (0.0,)),
    "token_mean": Known("advantages", "the level of the mean over tokens", LEVELS),
    "token_std": Known("advantages", "the level of the standard deviation over tokens", LEVELS),
    "token_leave_one_out": Known("advantages", "leaving a token out of its own mean", (False, True)),
    "token_unbiased": Known("advantages", "the division by n - 1 in the standard deviation over tokens", (True, False)),
    "token_eps": Known("advantages", "the number added to the standard deviation over tokens", EPS),
    "token_inside_root": Known("advantages", "adding that number to the variance over tokens instead", (False, True)),
    "token_sets": Known("advantages", "what advantages are normalised over", TOKEN_SETS),
    "old_logprobs": Known("loss", "the log-probs that the ratio divides by", ("rollout", "trainer", "current")),
    "correction": Known("loss", "the correction for the sampling policy", CORRECTIONS),
    "correction_cap": Known("loss", "the largest correction for the sampling policy", (None, 1.5, 2.0, 3.0, 5.0, 10.0)),
    "ratio_level": Known("loss", "the level of the importance ratio", ("token", "sequence", "sequence sum")),
    "clip_low": Known("loss", "the lower clip range", CLIPS),
    "clip_high": Known("loss", "the upper clip range", (None, *CLIPS)),
    "dual_clip": Known("loss", "the dual clip", (None, 1.5, 2.0, 3.0, 4.0, 5.0, 10.0)),
    "aggregation": Known("loss", "the aggregation of the loss", AGGREGATIONS),
    "max_length": Known("loss", "the length that divides the loss of a sequence"),
    "empty_rows": Known("loss", "rows without a token that counts", ("left out", "counted")),
    "kl_coef": Known("loss", "the weight of the KL in the loss", WEIGHTS),
    "kl_estimator": Known("loss", "the estimator of the KL in the loss", ESTIMATORS),
    "kl_weight": Known("loss", "the weight of a token's KL in the loss", (None, "ratio")),
    "policy_mask": Known("loss", "the mask of the policy's loss, not of its divisor,", (COUNTED, *MASKS)),
    "kl_mask": Known("loss", "the mask of the tokens whose KL is in the loss", (COUNTED, *MASKS)),
    "kl_logprobs": Known("loss", "the log-probs whose KL is in the loss", ("current", "trainer", "rollout")),
    "entropy_coef": Known("loss", "the weight of the entropy in the loss", WEIGHTS),
    "loss_scale": Known("loss", "the factor on the loss", SCALES),
    "gradient_scale": Known("gradient", "the factor on the gradient", SCALES),
    "norm": Known("gradient", "the gradient norm that is reported, before or after clipping", ("before", "after")),
    "max_norm": Known("gradient", "the largest gradient norm"),
}  # fmt: skip


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


def sentence(
    found: tuple[Change, ...],
    others: tuple[tuple[Change, ...], ...],
    source: str,
    counts: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Describe changes: "the number added to the standard deviation is 1e-06, TRL has 0.0001".

    `counts` are options of the trainer that count micro-batches, ranks or rows, which explain a
    factor.
    """
    text = "; ".join(
        f"{KNOWN[change.option].phrase} is {shown(change.recorded)}, {source} {shown(change.expected)}"
        for change in found
    )
    for change in found:
        numbers = [
            value for value in (change.recorded, change.expected) if isinstance(value, float) and value
        ]
        if change.option in (*FACTORS, *WEIGHTED) and len(numbers) == 2:
            factor = max(numbers[0] / numbers[1], numbers[1] / numbers[0])
            why = [name for name, count in counts.items() if isclose(factor, count, rel_tol=1e-9)]
            verb = "divided" if abs(numbers[0]) < abs(numbers[1]) else "multiplied"
            text += (
                f": {verb} by {factor:g} ({' or '.join(why)}) once more" if why else f": {verb} by {factor:g}"
            )
    if not others:
        return text
    fits = "; ".join(
        ", ".join(f"{KNOWN[change.option].phrase} {shown(change.recorded)}" for change in other)
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


SEARCH_S = 20.0  # of pairs of changes, per stage

Misfit = Callable[[Options], float]  # at most 1 where options explain a record


@dataclass(frozen=True)
class Explanation:
    """Changes of options that explain recorded values; `others`: further ones, as small.

    `by_chance`: several options were changed to fit a single number.
    """

    changes: tuple[Change, ...] = ()
    others: tuple[tuple[Change, ...], ...] = ()
    by_chance: bool = False


FACTORS = ("loss_scale", "gradient_scale")
WEIGHTED = ("kl_reward_coef", "kl_coef", "entropy_coef", "teacher_coef")


def single_changes(
    base: Options, stages: Sequence[str], counts: Collection[int] = ()
) -> Iterator[dict[str, Any]]:
    """Yield what may have another value; `counts` may have divided or multiplied a weight."""
    for name, known in KNOWN.items():
        if known.stage in stages:
            own, values = getattr(base, name), known.values
            if name in WEIGHTED and own:
                values = (*values, *(x for n in counts for x in (own / n, own * n)), -own)
            yield from ({name: value} for value in dict.fromkeys(values) if value != own)


def explain(
    base: Options,
    preferred: Options,
    stages: Sequence[str],
    misfit: Misfit,
    *,
    is_number: bool = False,
    pairs: bool = True,
    counts: Collection[int] = (),
) -> Explanation:
    """Find the smallest changes of `base` that explain a record: one, then several.

    Args:
        preferred: what the record's own configuration says; the fewest of its values that explain
            the record come before pairs of the table's.
        stages: whose options may change; those of the last one come first where several explain it.
        is_number: the recorded value is a single number, which a pair of options fits by chance.
        pairs: also try pairs of the table's changes.
        counts: numbers of micro-batches or ranks, by which a weight may have been divided.
    """
    singles = list(single_changes(base, stages, counts))
    fits = [(misfit(replace(base, **change)), change) for change in singles]
    found = [
        (next(iter(change)) in FACTORS, KNOWN[next(iter(change))].stage != stages[-1], size, change)
        for size, change in fits
        if size <= 1
    ]
    factors = [one for one in found if one[0]]
    if len(factors) > 1:  # the number is too near to its error
        found = [one for one in found if not one[0]]
    if found:
        ordered = [
            changes(base, replace(base, **change)) for *_, change in sorted(found, key=itemgetter(0, 1, 2))
        ]
        return Explanation(ordered[0], tuple(ordered[1:]))
    own = {c.option: c.recorded for c in changes(base, preferred) if KNOWN[c.option].stage in stages}
    if own and misfit(replace(base, **own)) <= 1:
        for name in list(own):
            fewer = {option: value for option, value in own.items() if option != name}
            if misfit(replace(base, **fewer)) <= 1:
                own = fewer
        return Explanation(changes(base, replace(base, **own)))
    until = time.monotonic() + SEARCH_S
    for left, right in combinations(singles if pairs else [], 2):
        if time.monotonic() > until:
            break
        if left.keys() != right.keys() and misfit(replace(base, **left, **right)) <= 1:
            return Explanation(changes(base, replace(base, **left, **right)), by_chance=is_number)
    return Explanation()
