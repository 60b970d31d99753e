"""From flagged rows to an alarm: its curve over steps, its onset, and the samples that prove it."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from areal_core.safety.printable import printable
from areal_debug.doctor.alarm import Alarm, Sample, alarm, findings
from areal_debug.doctor.samples.read import Rows
from areal_debug.doctor.series import Series
from areal_debug.eval.estimates import wilson

MOST_SAMPLES = 10
EXCERPT = 100  # characters
FEWEST_ROWS, FEWEST_PROMPTS = 10, 5  # that prove a finding


class Finding(NamedTuple):
    """An alarm, and the curve that its `metric` names."""

    alarm: Alarm
    curve: Series


def has_support(rows: Rows, flagged: np.ndarray) -> bool:
    """Return whether flagged rows [n] are enough, and of enough prompts, to accuse a run."""
    return int(flagged.sum()) >= FEWEST_ROWS and len(np.unique(rows.prompts[flagged])) >= FEWEST_PROMPTS


def lower_bound(hits: float, total: float) -> float:
    """Return the lower end of the 95 % interval of a share."""
    return wilson(float(hits / total), int(total))[0] if total else 0.0


def share(flags: np.ndarray, among: np.ndarray) -> float:
    """Return the share of flagged rows among some."""
    return float(flags[among].mean()) if among.any() else 0.0


def onset_of(curve: Series) -> int | None:
    """Return the step from which on a share is clearly larger; None if it was so from the start.

    The split with the largest sum of squares between its sides, if the sides differ by more than
    four standard errors and the later one is at least twice the earlier one. Unlike `onset.onset`,
    which dates the bend of a metric that is known to change, it also decides whether there is one.
    """
    values, best, at = curve.values, 0.0, 0
    for split in range(2, len(values) - 1):
        before, after = values[:split], values[split:]
        between = len(before) * len(after) / len(values) * (after.mean() - before.mean()) ** 2
        if after.mean() > before.mean() and between > best:
            best, at = between, split
    if at == 0:
        return None
    before, after = values[:at], values[at:]
    error = np.sqrt(before.var() / len(before) + after.var() / len(after))
    is_clear = after.mean() - before.mean() > 4 * error and after.mean() >= 2 * before.mean()
    return int(curve.steps[at]) if is_clear else None


def samples_of(
    rows: Rows, flagged: np.ndarray, excerpt: Callable[[int], str] | None = None
) -> tuple[Sample, ...]:
    """Return up to ten flagged rows, evenly spaced over the record and of different prompts."""
    found = np.flatnonzero(flagged)
    found = found[np.sort(np.unique(rows.prompts[found], return_index=True)[1])]
    if len(found) < MOST_SAMPLES:
        found = np.flatnonzero(flagged)
    found = found[np.unique(np.linspace(0, len(found) - 1, MOST_SAMPLES).round().astype(int))]
    text_of = excerpt or (lambda row: rows.text(row))
    return tuple(
        Sample(int(rows.step[row]), int(rows.prompt[row]), int(rows.sample[row]), shortened(text_of(row)))
        for row in found.tolist()
    )


def shortened(text: str) -> str:
    """Return the beginning and the end of a text, on one line, with control codes shown."""
    if len(text) > EXCERPT:
        text = f"{text[: EXCERPT // 2]} ... {text[-EXCERPT // 2 :]}"
    return printable(text)


def around(text: str, phrase: str) -> str:
    """Return what surrounds a phrase in a text; the text if it is not in it."""
    at = text.rfind(phrase) if phrase else -1
    return text if at < 0 else text[max(0, at - EXCERPT // 2) : at + len(phrase) + EXCERPT // 4]


def finding(
    id: str,
    found: str,
    rows: Rows,
    flagged: np.ndarray,
    among: np.ndarray,
    excerpt: Callable[[int], str] | None = None,
    *,
    title: str = "",
    severity: str = "",
) -> Finding:
    """Build an alarm with its curve, evidence, onset and samples; its row names the curve."""
    steps, number = np.unique(rows.step[among], return_inverse=True)
    shares = np.bincount(number, flagged[among], len(steps)) / np.bincount(number, minlength=len(steps))
    curve = Series(f"record/{findings()[id]['metric']}", steps, shares)
    largest = np.sort(np.argsort(-curve.values, kind="stable")[:5])
    made = alarm(
        *(id, curve),
        found=f"{found} ({rows.extent})",
        variant="given" if rows.is_data.all() else "",
        title=title,
        severity=severity,
        evidence=curve.at(largest),
        since=onset_of(curve),
    )
    return Finding(replace(made, samples=samples_of(rows, flagged, excerpt)), curve)
