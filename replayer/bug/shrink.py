"""Find the fewest rows, then tokens, that still show a symptom: delta debugging.

rows ─> halves, then smaller parts, are removed while the symptom stays (ddmin) ─> tokens of each row, from its end ─> rows again

A. Zeller, R. Hildebrandt, "Simplifying and isolating failure-inducing input", 2002: the result is
minimal in that no single row, and no single token, can be left out. Nothing is drawn at random, so
the same input gives the same result.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A row of a rank's batch, and the positions of its tokens that are left.

    Attributes:
        name: `PROMPT.SAMPLE`. fixed: the number of tokens at its start that stay.
    """

    rank: int
    row: int
    name: str
    tokens: tuple[int, ...]
    fixed: int = 1


Rows = tuple[Row, ...]


class Stopped(Exception):
    """No further attempt may be made: time is over, or the user has interrupted."""


@dataclass
class Shrinker:
    """Removes rows and tokens while a symptom occurs.

    Args:
        occurs: runs the step on rows and returns whether the symptom occurs; raises Stopped.
        on_smaller: called with each smaller set of rows that has the symptom.

    Attributes:
        best: the fewest rows and tokens so far. num_runs: how often the step was run.
        is_minimal: whether nothing more can be left out.
    """

    best: Rows
    occurs: Callable[[Rows], bool]
    on_smaller: Callable[[Rows], None]
    num_runs: int = 0
    is_minimal: bool = False
    known: dict[Rows, bool] = field(default_factory=dict)

    def shrink(self) -> Rows:
        """Return the fewest rows and tokens, or the best so far if no further run may be made."""
        try:
            self.fewest_rows()
            for number in range(len(self.best)):
                self.fewest_tokens(number)
            self.fewest_rows()
            self.is_minimal = True
        except Stopped:
            pass
        return self.best

    def fewest_rows(self) -> None:
        minimise(self.best, lambda rows: bool(rows) and self.attempt(tuple(rows)))

    def fewest_tokens(self, number: int) -> None:
        row = self.best[number]
        fixed, others = row.tokens[: row.fixed], row.tokens[row.fixed :]

        def without(kept: Sequence[int]) -> bool:
            shorter = replace(row, tokens=(*fixed, *kept))
            return self.attempt((*self.best[:number], shorter, *self.best[number + 1 :]))

        if others and not without(()):
            minimise(others, without)

    def attempt(self, rows: Rows) -> bool:
        """Return whether the symptom occurs on rows, and keep them if they are fewer."""
        if rows not in self.known:
            self.num_runs += 1
            self.known[rows] = self.occurs(rows)
        if self.known[rows] and rows != self.best:
            self.best = rows
            self.on_smaller(rows)
        return self.known[rows]


def minimise(items: Sequence[T], occurs: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Return a smallest part of items, in order, for which `occurs` is true: ddmin.

    It is true of all items; the last ones are left out first.
    """
    num_parts = 2
    while len(items) > 1:
        parts = divide(items, min(num_parts, len(items)))
        smaller = next((part for part in parts if num_parts == 2 and occurs(part)), None)
        if smaller is None:
            rests = (
                [item for other in parts if other is not part for item in other] for part in reversed(parts)
            )
            smaller = next((rest for rest in rests if len(parts) > 2 and occurs(rest)), None)
            num_parts = max(num_parts - 1, 2) if smaller is not None else 2 * len(parts)
        if smaller is not None:
            items = smaller
        elif len(parts) == len(items):
            break
    return items


def divide(items: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """Divide items into consecutive parts of nearly equal sizes."""
    edges = [len(items) * number // num_parts for number in range(num_parts + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(edges)]
