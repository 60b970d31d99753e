"""The symptom of `--shrink`: an expression over what a step computes, such as `loss is nan`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replayer.errors import WrongFilter
from replayer.expression import Expression, parse_expression

OPTION = "--shrink"
DIFFERS = "replay != recorded"
NAMES = (
    "loss",
    "grad_norm",
    "stats",
    "rewards",
    "advantages",
    "row_losses",
    "logprobs",
    "lengths",
    "num_rows",
    "num_tokens",
    "difference",
    "error",
)


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
        row_losses: of each row alone, before the step; empty unless they were asked for.
        difference: the largest one between a log-prob or value of a token and its recorded one.
        error: how the step ended, as `TYPE: message`; "" if it did not fail.
    """

    loss: float = math.nan
    grad_norm: float = math.nan
    stats: Mapping[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    row_losses: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_rows: int = 0
    num_tokens: int = 0
    difference: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Symptom:
    """A parsed symptom. `like` are the numbers of the complete step, once it has run."""

    text: str
    expression: Expression | None
    like: Numbers | None = None

    def uses(self, name: str) -> bool:
        """Return whether the symptom depends on a name."""
        return name == "difference" if self.expression is None else self.expression.uses(name)

    def occurs(self, numbers: Numbers) -> bool:
        """Return whether the numbers show the symptom. Raises WrongFilter.

        An error is the symptom only if it is of the type of the complete step's; a difference only
        if it is at least half of that step's, because other rows round differently.
        """
        if numbers.error and not self.uses("error"):
            return False
        if self.like is not None and kind_of(numbers.error) != kind_of(self.like.error):
            return False
        if self.expression is None:
            least = 0.0 if self.like is None else self.like.difference / 2
            return numbers.difference > 0 and not numbers.difference < least
        values = vars(numbers) | {"stats": Statistics(numbers.stats)}
        return self.expression.matches(values)


def kind_of(error: str) -> str:
    """Return the type of an error."""
    return error.partition(":")[0]


def parse_symptom(text: str) -> Symptom:
    """Parse the value of `--shrink`. Raises WrongFilter."""
    if text.split() == DIFFERS.split():
        return Symptom(DIFFERS, None)
    expression = parse_expression(text, NAMES, OPTION)
    if not any(expression.uses(name) for name in NAMES):
        raise WrongFilter(f"{OPTION} {text!r} does not depend on the step: use {', '.join(NAMES)}")
    return Symptom(text, expression)


def shown(value: Any) -> str:
    """Format a number of a step."""
    return f"{value:.6g}"
