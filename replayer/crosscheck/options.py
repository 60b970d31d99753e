"""What a trainer's options mean for the numbers of a step, in one vocabulary for all trainers.

`Options` holds the values that decide rewards, advantages, loss and gradient. Configurations of our
trainer and of others are read into it (`their_configs.py`), and `options.toml` lists the values
that a search tries. A value that a configuration leaves to its trainer is that trainer's default.
"""

import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, isclose
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

COUNTED = "the tokens that count"
STAGES = ("rewards", "mask", "kl", "advantages", "values", "loss", "gradient")


@dataclass(frozen=True)
class Options:
    """Options of one step, each described in `options.toml`. Levels are "group", "batch" or None.

    token_*: normalisation of the advantages over tokens, after that over rows.
    micro_batches: parts of equal size into which the rows of an update are cut.
    """

    objective: str = "policy"
    labels_ahead: int = 1
    beta: float = 0.0
    pair_scores: str = "the sum over tokens"
    pair_order: str = "the chosen one first"
    pair_reference: str = "the reference"
    pair_loss: str = "sigmoid"
    pair_target: float = 0.0
    pair_nll: float = 0.0
    label_smoothing: float = 0.0
    reward_bias: float = 0.0
    reward_scaling: float = 1.0
    reward_clip: float = inf
    overlong: tuple[int, int, float] | None = None
    truncated: str = "kept"
    overlong_paid: tuple[int, int, float] | None = None
    reward_terms: str = "with their weights"
    mask: str = "loss mask"
    kl_reward_coef: float = 0.0
    kl_reward_mask: str = COUNTED
    kl_reward_estimator: str = "k1"
    kl_place: str = "advantages"
    grouping: str = "prompt"
    normalised: str = "all rows"
    baseline: str = "each row"
    mean: str | None = "group"
    leave_one_out: bool = False
    group_size: str = "of each group"
    std: str | None = "group"
    unbiased: bool = True
    std_of: str = "all rows"
    eps: float = 1e-5
    inside_root: bool = False
    lone: str = "zero"
    again: str | None = None
    length: str = "kept"
    discount: float = 1.0
    gae_lambda: float = 1.0
    gae_tokens: str = COUNTED
    values_at: str = "their own tokens"
    reward_place: str = "the last token"
    bootstrap: str = "no rows"
    teacher_coef: float = 0.0
    token_mean: str | None = None
    token_std: str | None = None
    token_leave_one_out: bool = False
    token_unbiased: bool = True
    token_eps: float = 1e-5
    token_inside_root: bool = False
    token_sets: str = "all tokens"
    token_mean_of: str = "the tokens that count"
    context_parallel: int = 1
    micro_batches: int = 1
    generation_batches: int = 1
    value_mask: str = COUNTED
    value_aggregation: str = "token-mean"
    value_scale: float = 1.0
    old_logprobs: str = "rollout"
    correction: str | None = None
    correction_cap: float | None = None
    correction_of: str = "trainer"
    ratio_level: str = "token"
    clip_low: float = 0.2
    clip_high: float | None = None
    clipped: str = "the larger loss"
    dual_clip: float | None = None
    dual_clip_of: str = "negative advantages"
    aggregation: str = "token-mean"
    max_length: int = 1
    empty_rows: str = "left out"
    divisor: int | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_weight: str | None = None
    policy_mask: str = COUNTED
    kl_mask: str = COUNTED
    kl_aggregation: str = "that of the loss"
    kl_logprobs: str = "current"
    kl_gradient: str = "in that of the loss"
    correction_gradient: str = "not in that of the loss"
    entropy_coef: float = 0.0
    balance_coef: float | None = 0.0
    loss_scale: float = 1.0
    gradient_scale: float = 1.0
    gradient_of: str = "all micro-batches"
    shards: int = 1
    norm: str = "before"
    max_norm: float = inf


@dataclass(frozen=True)
class Known:
    """An option: the stage that it decides, its name in a sentence, usual values."""

    stage: str
    phrase: str
    values: tuple[Any, ...]


OF_TRAJECTORIES = "one row of each trajectory"
EXCHANGED = " of the exchanged arguments"
CISPO = "the clipped ratio, as a weight of the log-prob"
OF_RANKS = ("each context-parallel rank, in zigzag", "each context-parallel rank, in blocks")
OPEN: dict[str, Any] = {"baseline": OF_TRAJECTORIES, "normalised": "rows with a token that counts"}
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def usual(values: Sequence[Any]) -> Iterator[Any]:
    """Yield values of the table, with those of a list in the place of its name."""
    for value in values:
        if isinstance(value, str) and value.startswith("@"):
            yield from usual(TABLE["values"][value[1:]])
        else:
            yield None if value == "none" else value


KNOWN = {
    name: Known(row["stage"], row["phrase"], tuple(usual(row["values"])))
    for name, row in TABLE["options"].items()
}


@dataclass(frozen=True)
class Change:
    """An option whose value in the record differs from the expected one."""

    option: str
    expected: Any
    recorded: Any


def changes(expected: Options, recorded: Options) -> tuple[Change, ...]:
    left, right = vars(expected), vars(recorded)
    return tuple(Change(name, left[name], right[name]) for name in left if left[name] != right[name])


def sentence(
    found: tuple[Change, ...],
    others: tuple[tuple[Change, ...], ...],
    source: str,
    counts: Mapping[str, int] = MappingProxyType({}),
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Describe changes: "the number added to the standard deviation is 1e-06, TRL has 0.0001".

    `counts` are options of the trainer that count micro-batches, ranks or rows, which explain a
    factor; `sizes` are numbers of rows and tokens, which explain a divisor.
    """
    text = "; ".join(
        f"{KNOWN[change.option].phrase} is {shown(change.recorded)}, {source} {shown(change.expected)}"
        for change in found
    )
    for change in found:
        numbers = [
            value for value in (change.recorded, change.expected) if isinstance(value, float) and value
        ]
        if change.option == "divisor" and change.recorded in sizes.values():
            text += (
                f", the number of {' or '.join(n for n, size in sizes.items() if size == change.recorded)}"
            )
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
    """Changes of options that explain recorded values; `others`: further ones, as small."""

    changes: tuple[Change, ...] = ()
    others: tuple[tuple[Change, ...], ...] = ()


FACTORS = ("loss_scale", "gradient_scale", "value_scale")
WEIGHTED = ("kl_reward_coef", "kl_coef", "entropy_coef", "balance_coef", "teacher_coef", "beta")


def explain(
    base: Options,
    preferred: Options,
    stages: Sequence[str],
    misfit: Misfit,
    *,
    pairs: bool = True,
    counts: Collection[int] = (),
) -> Explanation:
    """Find the smallest changes of `base` that explain a record: one, then several.

    Args:
        preferred: what the record's own configuration says; the fewest of its values that explain
            the record come before pairs of the table's.
        stages: whose options may change; those of the last one come first where several explain it.
        pairs: also try pairs of the table's changes, which fit a single number by chance.
        counts: numbers of micro-batches or ranks, by which a weight may have been divided.
    """
    singles: list[tuple[str, Any]] = []
    for name, known in KNOWN.items():
        own, values = getattr(base, name), known.values
        if name in WEIGHTED and own:
            values = (*values, *(x for n in counts for x in (own / n, own * n)), -own)
        if known.stage in stages:
            singles += [(name, value) for value in dict.fromkeys(values) if value != own]
    singles.sort(key=lambda single: KNOWN[single[0]].stage != stages[-1])  # likelier pairs first
    found: dict[tuple[str, float], tuple[bool, bool, float, tuple[Change, ...]]] = {}
    for name, value in singles:
        other = replace(base, **{name: value})
        if (size := misfit(other)) <= 1:
            is_far = KNOWN[name].stage != stages[-1]
            # with the same result to the last bit they are one, such as ranks where there is one
            found.setdefault((name, size), (name in FACTORS, is_far, size, changes(base, other)))
    fits = sorted(found.values(), key=itemgetter(0, 1, 2))
    if sum(is_factor for is_factor, *_ in fits) > 1:  # the number is too near to its error
        fits = [fit for fit in fits if not fit[0]]
    if fits:
        return Explanation(fits[0][-1], tuple(fit[-1] for fit in fits[1:]))
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
        both = replace(base, **dict([left, right]))
        if left[0] != right[0] and misfit(both) <= 1:
            return Explanation(changes(base, both))
    return Explanation()
