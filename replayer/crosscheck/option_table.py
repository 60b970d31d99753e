"""The values of options that occur in practice, and the search for those that explain a record."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from operator import itemgetter
from typing import Any

from replayer.crosscheck.options import STAGE_OF, Change, Options, changes

SEARCH_S = 20.0  # of pairs of changes, per stage
EPS = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
LEVELS = ("group", "batch", None)
ESTIMATORS = ("k1", "k2", "k3", "abs")
CLIPS = (0.1, 0.15, 0.18, 0.2, 0.25, 0.28, 0.3, 0.4, 0.5, 3e-4, 4e-4, 1e9)
WEIGHTS = (0.0, 1e-4, 1e-3, 3e-3, 5e-3, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.2, 0.5, 1.0)

TABLE: dict[str, tuple[Any, ...]] = {
    "reward_bias": (0.0, -0.5, 0.5, 1.0, -1.0),
    "reward_scaling": (1.0, 0.1, 0.5, 2.0, 5.0, 10.0),
    "reward_clip": (inf, 0.5, 1.0, 5.0, 10.0, 20.0),
    "overlong": (None,),
    "truncated": ("kept", "zero"),
    "mask": (
        "loss mask", "shifted by +1", "shifted by -1", "without the last token", "without the first token",
        "without truncated rows", "everything after the prompt", "all tokens",
    ),
    "kl_reward_coef": WEIGHTS,
    "kl_reward_estimator": ESTIMATORS,
    "kl_place": ("advantages", "rewards"),
    "grouping": ("prompt", "consecutive rows", "every n-th row"),
    "mean": LEVELS,
    "leave_one_out": (False, True),
    "std": LEVELS,
    "unbiased": (True, False),
    "eps": EPS,
    "inside_root": (False, True),
    "lone": ("zero", "reward"),
    "length": ("kept", "divided"),
    "discount": (1.0, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9),
    "gae_lambda": (1.0, 0.99, 0.98, 0.97, 0.95, 0.9),
    "token_mean": LEVELS,
    "token_std": LEVELS,
    "token_leave_one_out": (False, True),
    "token_unbiased": (True, False),
    "token_eps": EPS,
    "token_inside_root": (False, True),
    "old_logprobs": ("rollout", "trainer", "current"),
    "correction": (None, "truncated tokens", "masked tokens", "truncated sequences", "masked sequences"),
    "correction_cap": (None, 1.5, 2.0, 3.0, 5.0, 10.0),
    "ratio_level": ("token", "sequence", "sequence sum"),
    "clip_low": CLIPS,
    "clip_high": (None, *CLIPS),
    "dual_clip": (None, 1.5, 2.0, 3.0, 4.0, 5.0, 10.0),
    "aggregation": (
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum",
        "token-mean of each rank",
    ),
    "empty_rows": ("left out", "counted"),
    "kl_coef": WEIGHTS,
    "kl_estimator": ESTIMATORS,
    "kl_weight": (None, "ratio"),
    "norm": ("before", "after"),
}  # fmt: skip

Misfit = Callable[[Options], float]  # at most 1 where options explain a record


@dataclass(frozen=True)
class Explanation:
    """Changes of options that explain recorded values; `others`: further ones, as small.

    `by_chance`: several options were changed to fit a single number.
    """

    changes: tuple[Change, ...] = ()
    others: tuple[tuple[Change, ...], ...] = ()
    by_chance: bool = False


def single_changes(base: Options, stages: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name, values in TABLE.items():
        if STAGE_OF[name] in stages:
            yield from ({name: value} for value in values if value != getattr(base, name))


def explain(
    base: Options,
    preferred: Options,
    stages: Sequence[str],
    misfit: Misfit,
    *,
    is_number: bool = False,
    pairs: bool = True,
) -> Explanation:
    """Find the smallest changes of `base` that explain a record: one, then several.

    Args:
        preferred: what the record's own configuration says; the fewest of its values that explain
            the record come before pairs of the table's.
        stages: whose options may change; those of the last one come first where several explain it.
        is_number: the recorded value is a single number, which a pair of options fits by chance.
        pairs: also try pairs of the table's changes.
    """
    singles = list(single_changes(base, stages))
    fits = [(misfit(replace(base, **change)), change) for change in singles]
    found = [(STAGE_OF[next(iter(change))] != stages[-1], size, change) for size, change in fits if size <= 1]
    if found:
        ordered = [
            changes(base, replace(base, **change)) for *_, change in sorted(found, key=itemgetter(0, 1))
        ]
        return Explanation(ordered[0], tuple(ordered[1:]))
    own = {c.option: c.recorded for c in changes(base, preferred) if STAGE_OF[c.option] in stages}
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
