"""Differences between two documents, member by member."""

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

    NaNs are equal. Items of lists are compared by position.
    """
    return tuple(sorted(differing_members("", recorded, current), key=lambda difference: difference.where))


def differing_members(where: str, recorded: Any, current: Any) -> Iterator[Difference]:
    """Yield what differs at a path and below it."""
    if recorded == current or (recorded != recorded and current != current):
        return
    if isinstance(recorded, dict) and isinstance(current, dict):
        for name in recorded.keys() | current.keys():
            sides = (side.get(name, ABSENT) for side in (recorded, current))
            yield from differing_members(f"{where}.{name}" if where else str(name), *sides)
    elif isinstance(recorded, list | tuple) and isinstance(current, list | tuple):
        for index, items in enumerate(zip_longest(recorded, current, fillvalue=ABSENT)):
            yield from differing_members(f"{where}.{index}" if where else str(index), *items)
    else:
        yield Difference(where, *(None if side is ABSENT else side for side in (recorded, current)))
