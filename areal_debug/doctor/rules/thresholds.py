"""Metrics with an absolute limit: bad if the medians of both last windows are beyond it."""

from functools import partial
from typing import Any

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm, findings
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.learning import is_learning, rises
from areal_debug.doctor.series import Series

FEWEST_LATE, STILL_RISING = 5, 0.01


def is_beyond(row: dict[str, Any], limit: float | None, value: float) -> bool:
    """Return whether a value is beyond a limit, in the direction of a row of `findings.toml`."""
    if limit is None:
        return False
    if "off" in row:
        return abs(value - row["target"]) > limit
    if "at_most" in row:
        return value <= limit
    return value < limit if "below" in row else value > limit


def is_near(row: dict[str, Any], run: Run) -> bool:
    """Return whether the mean of the second half is below `near`: at chance level half of the steps are.

    Not if it rises within that half, by more than a hundredth and twice the error of its mean.
    """
    values = run.finite(row["quantity"]).values
    late = values[len(values) // 2 :]
    if len(late) < FEWEST_LATE or late.mean() > row.get("near", -np.inf):
        return False
    gained = late[len(late) // 2 :].mean() - late[: len(late) // 2].mean()
    return bool(gained <= max(STILL_RISING, 2 * late.std() / len(late) ** 0.5))


def beyond(id: str, run: Run) -> Alarm | None:
    """Return the alarm of a row with a limit, or None."""
    row = findings()[id]
    if run.config.get("actor.ppo_n_minibatches") == 1:
        row = row | row.get("one_minibatch", {})
    if is_learning(run):
        row = row | row.get("learning", {}) | (row.get("validated", {}) if rises(run, "eval_reward") else {})
    series = run.finite(row["quantity"])
    limit = next((row[name] for name in ("above", "below", "at_most", "off") if name in row), None)
    severe = partial(is_beyond, row, row.get("severe"))
    rose = row.get("rose")
    has_risen = rose is not None and series.rose(rose["times"]) and series.last > rose["above"]
    is_beyond_limit = series.sustained(partial(is_beyond, row, limit)) or series.throughout(severe)
    if not (
        is_beyond_limit or has_risen or is_near(row, run) or ("fell" in row and series.fell(row["fell"]))
    ) or not run.series.keys() >= {*row["needs"]}:
        return None
    judged = series
    if "target" in row:
        judged = Series(series.name, series.steps, abs(series.values - row["target"]))
    return alarm(
        id,
        series,
        found=f"{series.change} ({row['limit']})",
        severity="error" if severe(series.last) and not series.is_short else "warning",
        since=onset(
            judged, "down" if {"below", "at_most", "fell"} & {*row} else "up", row.get("in_ratios", False)
        ),
    )


RULES = tuple(partial(beyond, id) for id, row in findings().items() if "quantity" in row)
