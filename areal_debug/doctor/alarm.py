"""The result of a rule that found a problem."""

from dataclasses import dataclass, field
from typing import Any

Evidence = tuple[tuple[int, float], ...]  # (step, value)


@dataclass(frozen=True)
class Alarm:
    """One problem.

    `severity` is "error" (the run is useless as it is) or "warning". `metric` is the name that the
    run logs, `evidence` are steps and values of it. `advice` is in the order in which to try it;
    `experiment` is the one run that would confirm the alarm, `overrides` are the options to change
    for it; `source` is the reference for the threshold.
    """

    id: str
    title: str
    severity: str
    metric: str
    found: str
    evidence: Evidence
    advice: tuple[str, ...]
    experiment: str
    source: str
    overrides: dict[str, Any] = field(default_factory=dict)
