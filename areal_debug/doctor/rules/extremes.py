"""A mean outside of the smallest and the largest value that are logged beside it."""

import re

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import FEWEST_STEPS, Series

MEAN = re.compile(r"(?<![A-Za-z])(?:mean|avg)(?![A-Za-z])")
TOLERANCE = 1e-3  # of the size of the values
MOST = 0.5  # of the steps


def statistics_contradict(run: Run) -> Alarm | None:
    """D45: in most steps a mean is larger than the maximum, or smaller than the minimum."""
    for name, mean in run.by_name.items():
        for word, sign in (("max", 1), ("min", -1)):
            other = run.by_name.get(MEAN.sub(word, name))
            if other is None or other.name == name:
                continue
            steps, beyond = where_beyond(mean.finite, other.finite, sign)
            if len(steps) < FEWEST_STEPS or beyond.mean() <= MOST:
                continue
            at = int(steps[np.argmax(beyond)])
            place = np.searchsorted(mean.steps, at), np.searchsorted(other.steps, at)
            values = float(mean.values[place[0]]), float(other.values[place[1]])
            return alarm(
                "D45",
                mean,
                found=(
                    f"in {int(beyond.sum())} of {len(steps)} steps the mean is beyond {other.name}: "
                    f"{values[0]:.4g} and {values[1]:.4g} at step {at}"
                ),
                evidence=((at, values[0]),),
                since=at,
            )
    return None


def where_beyond(mean: Series, extreme: Series, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that both have, and whether the mean is beyond the extreme [n] bool."""
    steps, left, right = np.intersect1d(mean.steps, extreme.steps, return_indices=True)
    size = np.abs(mean.values[left]) + np.abs(extreme.values[right])
    tolerance = mean.resolution + extreme.resolution + TOLERANCE * size
    return steps, sign * (mean.values[left] - extreme.values[right]) > tolerance


RULES = (statistics_contradict,)
