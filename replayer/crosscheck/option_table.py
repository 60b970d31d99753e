"""The search for the values of options that explain a record."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import itemgetter
from typing import Any

from replayer.crosscheck.options import KNOWN, Change, Options, changes

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


def single_changes(base: Options, stages: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name, known in KNOWN.items():
        if known.stage in stages:
            yield from ({name: value} for value in known.values if value != getattr(base, name))


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
    found = [
        (KNOWN[next(iter(change))].stage != stages[-1], size, change) for size, change in fits if size <= 1
    ]
    if found:
        ordered = [
            changes(base, replace(base, **change)) for *_, change in sorted(found, key=itemgetter(0, 1))
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
