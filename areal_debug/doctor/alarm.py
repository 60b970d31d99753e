"""The result of a rule that found a problem."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

Evidence = tuple[tuple[int, float], ...]  # (step, value)


class Sample(NamedTuple):
    """One sample of a record that proves an alarm, with the text that shows it."""

    step: int
    prompt: int
    sample: int
    text: str


@dataclass(frozen=True)
class Alarm:
    """One problem.

    `severity` is "error" (the run is useless as it is) or "warning". `metric` is the name that the
    run logs, `evidence` are steps and values of it. `advice` is in the order in which to try it;
    `experiment` is the one run that would confirm the alarm, `overrides` are the options to change
    for it; `source` is the reference for the threshold. `onset` is the step at which the problem
    began (the first one if it was there from the beginning, None if no series shows it), and `cost`
    is what it has cost so far (empty if unknown). `samples` are rows of a record that prove it.
    """

    id: str
    title: str
    severity: str
    metric: str
    found: str
    evidence: Evidence
    advice: tuple[str, ...]
    experiment: str
    source: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    onset: int | None = None
    cost: str = ""
    samples: tuple[Sample, ...] = ()
