"""A mean outside of the smallest and the largest value that are logged beside it."""

import re

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import FEWEST_STEPS, Floats, Ints, Series

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
            steps, means, extremes = shared(mean.finite, other.finite)
            tolerance = mean.resolution + other.resolution + TOLERANCE * (np.abs(means) + np.abs(extremes))
            beyond = sign * (means - extremes) > tolerance
            is_rare = not len(steps) or beyond.mean() <= MOST
            if is_rare or (len(steps) < FEWEST_STEPS and not beyond.all()):
                continue
            first = int(np.argmax(beyond))
            at, value = int(steps[first]), float(means[first])
            return alarm(
                "D45",
                mean,
                found=(
                    f"in {int(beyond.sum())} of {len(steps)} steps the mean is beyond {other.name}: "
                    f"{value:.4g} and {extremes[first]:.4g} at step {at}"
                ),
                evidence=((at, value),),
                since=at,
            )
    return None


def shared(one: Series, other: Series) -> tuple[Ints, Floats, Floats]:
    """Return the steps that both have, and the values of each there, all [n]."""
    steps, left, right = np.intersect1d(one.steps, other.steps, return_indices=True)
    return steps, one.values[left], other.values[right]


RULES = (statistics_contradict,)
