"""The step at which a metric began to change for the worse: a robust change-point."""

from typing import Literal

import numpy as np

from areal_debug.doctor.series import FEWEST_STEPS, Floats, Series, binned

Worse = Literal["up", "down"]

JUMPED = 4.0  # times the noise, from one step to the next
BEYOND = 1.0  # times the noise: two steps in a row are outside of the range before
DEPARTED = 3.0  # times the deviation of bins from the line before
SAME_CURVE = 0.03  # of the rise of the next bins
LEAST_GAIN = 0.4  # share of the squared deviation from one line that bends must explain
LEAST_SHARE = 0.1  # of the change for the worse that the first bend must cause


def onset(series: Series, worse: Worse, in_ratios: bool = False) -> int:
    """Return the step from which a metric changes for the worse, or its first step.

    A continuous line with at most two bends is fitted to medians of bins by least squares over all
    pairs of bends; a jump is two bends next to each other, a ramp that ends is two as well. The
    onset is the first bend towards the worse, or the step of a jump beside it: bins are wide, and
    all metrics that one event moves must name the same step. The first step is returned if bends
    explain little more than one straight line: then the metric changes from the beginning.

    Args:
        in_ratios: fit the logarithm, for metrics whose factor counts (KL, norms, lengths, times).
    """
    kept = series.finite
    first = int(series.steps[0]) if len(series.steps) else 0
    if len(kept.values) < FEWEST_STEPS:
        return first
    values = kept.values
    if in_ratios:
        sizes = np.abs(values[values != 0.0])
        usual = min(np.median(sizes), np.median(sizes[: series.window])) if len(sizes) else 0.0
        values = np.log(np.maximum(np.abs(values), 0.05 * usual + 1e-12))
    if worse == "down":
        values = -values
    turned = Series(series.name, kept.steps, values)
    x, y = binned(turned)
    start, end, gain = best_bends(x, y)
    slopes = slopes_of(x, y, start, end)
    if gain < LEAST_GAIN:
        return first
    rise = max(0.0, slopes[1]) * (x[end] - x[start]) + max(0.0, slopes[2]) * (x[-1] - x[end])
    bends_up = slopes[1] > max(2 * slopes[0], 0.0) and slopes[1] * (x[end] - x[start]) >= LEAST_SHARE * rise
    early = float(np.dot(slopes[:2], np.diff(x[[0, start, end]])))  # before the second bend
    if not bends_up and (
        slopes[2] <= max(1.5 * early / (x[end] - x[0]), 0.0) or early > slopes[2] * (x[-1] - x[end])
    ):
        return first
    bend = start if bends_up else end
    before, after = bend - 1, min(bend + 2, len(x) - 1)
    jumps = np.where((kept.steps[1:] >= x[before]) & (kept.steps[1:] <= x[after]), np.diff(values), 0.0)
    at = int(np.argmax(jumps))
    # from the level before, to which it does not return: no single outlier, and no step of a ramp
    is_jump = jumps[at] > max(JUMPED * turned.noise, 2 * (values[at] - y[before]))
    departed = departure(x, y, bend)
    if is_jump and y[after] - y[before] > 0.5 * jumps[at] > 0.25 * (y[after] - y[departed]):
        return int(kept.steps[at + 1])
    # not before the values leave the range that they had just before the bend
    bent = int(np.searchsorted(kept.steps, x[departed]))
    beyond = values[bent:] > np.median(values[max(0, bent - FEWEST_STEPS) : bent]) + BEYOND * turned.noise
    return int(kept.steps[bent + np.argmax(beyond[:-1] & beyond[1:])])


def departure(x: Floats, y: Floats, bend: int) -> int:
    """Return the bin from which on all values up to a bend are above the line that they were on.

    A curve that grows ever faster has left its level long before the bend that fits it best. The
    line is that of the first half before the bend; after it the values must not fall, and they must
    rise before the bend as well.
    """
    half = bend // 2
    if half < 3:
        return bend
    slope, level = np.polyfit(x[:half], y[:half], 1)
    left = y - slope * x - level
    error = float(np.std(left[:half])) * (half / (half - 2)) ** 0.5
    inside, after = np.flatnonzero(left[: bend + 1] <= DEPARTED * error)[-1], min(bend + 2, len(x) - 1)
    if left[bend - 1] - left[bend - 3] < SAME_CURVE * (left[after] - left[bend - 1]):
        return bend
    return min(bend, int(max(inside + 1, half + np.argmin(y[half : bend + 1]))))


def best_bends(x: Floats, y: Floats) -> tuple[int, int, float]:
    """Return the two bends (indices, ascending) of the best continuous line, and what they explain.

    The third value is the share of the squared deviation from one straight line that the bends
    remove, in [0, 1].
    """
    line = np.stack([np.ones_like(x), x - x.mean()])
    line /= np.linalg.norm(line, axis=1, keepdims=True)
    inner = np.arange(1, len(x) - 1)
    hinges = np.maximum(0.0, x[None, :] - x[inner, None])
    hinges -= hinges @ line.T @ line
    hinges /= np.linalg.norm(hinges, axis=1, keepdims=True)
    left = y - y @ line.T @ line
    total = float(left @ left)
    if total <= 1e-24 * max(1.0, float(y @ y)):
        return int(inner[0]), int(inner[-1]), 0.0
    along, cosine = hinges @ left, hinges @ hinges.T
    i, j = np.triu_indices(len(inner), 1)
    # squared length of the projection onto two unit vectors with this cosine
    explained = (along[i] ** 2 + along[j] ** 2 - 2 * cosine[i, j] * along[i] * along[j]) / np.maximum(
        1 - cosine[i, j] ** 2, 1e-9
    )
    best = int(np.argmax(explained))
    return int(inner[i[best]]), int(inner[j[best]]), float(explained[best]) / total


def slopes_of(x: Floats, y: Floats, start: int, end: int) -> tuple[float, float, float]:
    basis = np.stack([np.ones_like(x), x, np.maximum(0, x - x[start]), np.maximum(0, x - x[end])], axis=1)
    fitted = np.linalg.lstsq(basis, y, rcond=None)[0]
    first, second, third = np.cumsum(fitted[1:])
    return float(first), float(second), float(third)
