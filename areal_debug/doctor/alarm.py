"""The result of a rule that found a problem; what it says is a row of `findings.toml`."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from areal_debug.doctor.series import Series

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


@cache
def findings() -> dict[str, dict[str, Any]]:
    """Return the rows of `findings.toml` by id."""
    return tomllib.loads((Path(__file__).parent / "findings.toml").read_text(encoding="utf-8"))


def alarm(
    id: str,
    series: Series,
    *,
    found: str,
    severity: str = "",
    variant: str = "",
    title: str = "",
    evidence: Sequence[tuple[int, float]] | None = None,
    since: int | None = None,
    cost: str = "",
    **fields: object,
) -> Alarm:
    """Build an alarm from its row of `findings.toml`.

    Args:
        series: the metric; its last values are the evidence if no other is given.
        severity: by default that of the row, or else "warning".
        variant: which of the row's variants, if it has some.
        title: which of the row's titles, if it has several.
        since: the onset.
        fields: values of the fields in the row's texts.
    """
    row = findings()[id]
    row, fields = row | row.get("variants", {}).get(variant, {}), fields | {"since": since}
    return Alarm(
        id,
        row["titles"][title] if title else row["title"].format(**fields),
        severity or row.get("severity", "warning"),
        series.name,
        found,
        series.tail() if evidence is None else tuple(evidence),
        tuple(advice.format(**fields) for advice in row["advice"]),
        row.get("experiment", "").format(**fields),
        row.get("source", ""),
        dict(row.get("overrides", {})),
        since,
        cost,
    )
