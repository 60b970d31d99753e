"""What a rule says when something is wrong."""

from dataclasses import dataclass, field
from typing import Any

Evidence = tuple[tuple[int, float], ...]  # (step, value)


@dataclass(frozen=True)
class Alarm:
    """`severity` is "error" (the run is worth nothing as it is) or "warning".

    `metric` is the name that the run logs, `evidence` steps and values of it. `advice` is in the order of trying; `experiment` is the one
    run that would confirm the alarm, `overrides` what to change for it; `source` says where the threshold comes from.
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
