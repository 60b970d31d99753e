"""Differences between two documents, member by member."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One member that differs; None if absent."""

    where: str
    recorded: Any
    current: Any


def find_differences(recorded: Any, current: Any) -> tuple[Difference, ...]:
    """List the differences between two JSON-like documents, sorted by path.

    Items of lists are compared by their position. NaNs are equal.
    """
    found = differing_members(recorded, current, ())
    return tuple(sorted(found, key=lambda difference: difference.where))


def differing_members(recorded: Any, current: Any, path: tuple[str, ...]) -> Iterator[Difference]:
    """Yield the members that differ below `path`; one that a side lacks is `ABSENT` there."""
    if isinstance(recorded, dict) and isinstance(current, dict):
        for name in recorded | current:
            sides = recorded.get(name, ABSENT), current.get(name, ABSENT)
            yield from differing_members(*sides, (*path, str(name)))
    elif isinstance(recorded, list | tuple) and isinstance(current, list | tuple):
        for place, sides in enumerate(zip_longest(recorded, current, fillvalue=ABSENT)):
            yield from differing_members(*sides, (*path, str(place)))
    elif recorded != current and not is_nan(recorded) & is_nan(current):
        values = (None if value is ABSENT else value for value in (recorded, current))
        yield Difference(".".join(path), *values)


def is_nan(value: Any) -> bool:
    """Return whether a value is a float that is not a number."""
    return isinstance(value, float) and math.isnan(value)
