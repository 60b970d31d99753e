"""The symptom of `--shrink`: an expression over what a step computes, such as `loss is nan`."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from replayer.errors import WrongFilter
from replayer.expression import Expression, parse_expression

OPTION = "--shrink"


class Statistics(dict[str, float]):
    """The statistics of a step, by name or by the unambiguous end of a name."""

    def __missing__(self, name: str) -> float:
        found = [full for full in self if full.endswith(f"/{name}")]
        if len(found) != 1:
            known = (
                ", ".join(found[:3] or [full for full in self if str(name) in full][:3]) or "see stats.jsonl"
            )
            raise ValueError(f"{'several' if found else 'no'} statistics are named {name!r} ({known})")
        return self[found[0]]


@dataclass(frozen=True)
class Numbers:
    """What a step computed on all ranks.

    Attributes:
        loss, grad_norm: of the minibatches, as in the statistics. stats: by name.
        rewards, lengths: of each row; `lengths` are tokens in the loss mask. advantages, logprobs:
            of each token in the loss mask; `logprobs` are those of the weights before the step.
        error: how the step ended, as `TYPE: message`; "" if it did not fail.
    """

    loss: float = math.nan
    grad_norm: float = math.nan
    stats: Mapping[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_rows: int = 0
    num_tokens: int = 0
    error: str = ""


NAMES = tuple(member.name for member in fields(Numbers))


@dataclass(frozen=True)
class Symptom:
    """A parsed symptom. `like` are the numbers of the complete step, once it has run."""

    text: str
    expression: Expression
    like: Numbers | None = None

    def uses(self, name: str) -> bool:
        """Return whether the symptom depends on a name."""
        return self.expression.uses(name)

    def occurs(self, numbers: Numbers) -> bool:
        """Return whether the numbers show the symptom. Raises WrongFilter.

        An error is the symptom only if it is of the type of the complete step's.
        """
        if numbers.error and not self.uses("error"):
            return False
        if self.like is not None and kind_of(numbers.error) != kind_of(self.like.error):
            return False
        values = vars(numbers) | {"stats": Statistics(numbers.stats)}
        return self.expression.matches(values)


def kind_of(error: str) -> str:
    return error.partition(":")[0]


def parse_symptom(text: str) -> Symptom:
    """Parse the value of `--shrink`. Raises WrongFilter."""
    expression = parse_expression(text, NAMES, OPTION)
    if not any(expression.uses(name) for name in NAMES):
        raise WrongFilter(f"{OPTION} {text!r} does not depend on the step: use {', '.join(NAMES)}")
    return Symptom(text, expression)


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
