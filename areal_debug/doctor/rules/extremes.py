"""A mean outside of its smallest and largest value, a loss that is a multiple of the held-out one."""

import re

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import FEWEST_STEPS, binned

MEAN = re.compile(r"(?<![A-Za-z])(?:mean|avg)(?![A-Za-z])")
TOLERANCE = 1e-3  # of the size of the values
MOST = 0.5  # of the steps
FEWEST_MULTIPLES, MULTIPLE, ALIKE = 3, 3.0, 1.5  # evaluations; times the held-out loss; largest over smallest


def statistics_contradict(run: Run) -> Alarm | None:
    """D45: in most steps a mean is larger than the maximum, or smaller than the minimum."""
    for name, mean in run.by_name.items():
        for word, sign in (("max", 1), ("min", -1)):
            other = run.by_name.get(MEAN.sub(word, name))
            if other is None or other.name == name:
                continue
            one, two = mean.finite, other.finite
            steps, left, right = np.intersect1d(one.steps, two.steps, return_indices=True)
            means, extremes = one.values[left], two.values[right]
            tolerance = mean.resolution + other.resolution + TOLERANCE * (np.abs(means) + np.abs(extremes))
            beyond = sign * (means - extremes) > tolerance
            is_rare = not len(steps) or beyond.mean() <= MOST
            if is_rare or (len(steps) < FEWEST_STEPS and not beyond.all()):
                continue
            first = int(np.argmax(beyond))
            at, value = int(steps[first]), float(means[first])
            found = (
                f"in {int(beyond.sum())} of {len(steps)} steps the mean is beyond {other.name}: "
                f"{value:.4g} and {extremes[first]:.4g} at step {at}"
            )
            return alarm("D45", mean, found=found, evidence=((at, value),), since=at)
    return None


def loss_is_multiplied(run: Run) -> Alarm | None:
    """D45: the training loss is a multiple of the held-out loss, at each evaluation the same."""
    loss, held_out = run.finite("loss"), run.finite("eval_loss")
    if run.kind == "learning" or min(len(loss.values), len(held_out.values)) < FEWEST_MULTIPLES:
        return None
    times = np.interp(held_out.steps, *binned(loss)) / np.maximum(held_out.values, 1e-12)
    if times.min() < MULTIPLE or times.max() > ALIKE * times.min():
        return None
    found = f"{loss.name} is {times.min():.3g} to {times.max():.3g} times {held_out.name} in all {len(times)} evaluations"
    return alarm("D45", loss, found=found, variant="multiplied", since=int(loss.steps[0]))


RULES = (statistics_contradict, loss_is_multiplied)
