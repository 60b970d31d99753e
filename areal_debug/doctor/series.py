"""One metric over the steps of a run, with robust statistics: medians of windows, and a trend."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FEWEST_STEPS = 8  # with fewer steps a trend is not significant
MOST_BINS = 80  # of a fitted curve
MOST_POINTS = 120  # of a trend: the number of pairs is quadratic
NUM_RESAMPLES = 100
WINDOWS = 10


@dataclass(frozen=True)
class Series:
    """Values float64 [n] at `steps` int64 [n], ascending. `name` is the name in the source.

    `resolution` is the last digit that the source prints, 0 if values are not rounded: a value of 0
    may then be any value below half of it. `unit` is "row" if the source names no steps.
    """

    name: str
    steps: Ints
    values: Floats
    resolution: float = 0.0
    unit: str = "step"

    @cached_property
    def finite(self) -> "Series":
        """The series without NaN and infinities."""
        kept = np.isfinite(self.values)
        return Series(self.name, self.steps[kept], self.values[kept], self.resolution)

    @cached_property
    def trend(self) -> "Trend | None":
        """The change over the run; None for short series. Many rules ask for it: computed once."""
        return theil_sen(self)

    @cached_property
    def window(self) -> int:
        """Number of steps in one window."""
        return min(max(5, len(self.values) // WINDOWS), max(1, len(self.values)))

    @cached_property
    def end_window(self) -> int:
        """Number of steps in each of the last two windows: few where the level changed just before.

        It did if each of the last `FEWEST_STEPS` is beyond the level before by four times the noise
        and the spread around that level.
        """
        late, before = self.values[-FEWEST_STEPS:], self.values[:-FEWEST_STEPS][-2 * self.window :]
        if len(before) < FEWEST_STEPS:
            return self.window
        off = np.abs(before - np.median(before))
        beyond = (late - np.median(before)) / max(4 * self.noise, 4 * float(np.median(off)) / 0.6745, 1e-12)
        return FEWEST_STEPS // 2 if beyond.min() > 1 or beyond.max() < -1 else self.window

    @property
    def first(self) -> float:
        """Median of the first window; NaN without values."""
        return float(np.median(self.values[: self.window])) if len(self.values) else math.nan

    @property
    def last(self) -> float:
        """Median of the last window; NaN without values."""
        return float(np.median(self.values[-self.end_window :])) if len(self.values) else math.nan

    def sustained(self, is_bad: Callable[[float], bool]) -> bool:
        """Return whether the medians of both last windows are bad; False for short series."""
        width = self.end_window
        earlier = self.values[-2 * width : -width]
        return not self.is_short and is_bad(self.last) and is_bad(float(np.median(earlier)))

    @property
    def is_short(self) -> bool:
        """Whether there are too few steps for a trend: then only what holds in each is judged."""
        return len(self.values) < FEWEST_STEPS

    @property
    def is_late_level(self) -> bool:
        """Whether nothing changes, and more steps went before than there are: it may have, earlier."""
        if not len(self.steps) or self.steps[0] <= self.steps[-1] - self.steps[0]:
            return False
        return self.trend is None or not (self.trend.rises or self.trend.falls)

    def throughout(self, is_bad: Callable[[float], bool]) -> bool:
        """Return whether each of a few steps, or the only one, is bad; False for many."""
        return self.is_short and len(self.values) > 0 and all(map(is_bad, self.values.tolist()))

    def holds(self, is_bad: Callable[[float], bool]) -> bool:
        """Return whether both last windows are bad, or each of a few steps."""
        return self.sustained(is_bad) or self.throughout(is_bad)

    @cached_property
    def noise(self) -> float:
        """Standard deviation of a step around its neighbours; outliers do not change it.

        At least the resolution.
        """
        if len(self.values) < 2:
            return self.resolution
        # 0.954: median absolute difference of two normal values, in standard deviations.
        return max(self.resolution, float(np.median(np.abs(np.diff(self.values)))) / 0.954)

    @cached_property
    def deviation(self) -> float:
        """The same with outliers: where most rewards are 0, `noise` is 0 and no scale."""
        if len(self.values) < 2:
            return self.noise
        return max(self.noise, float(np.std(np.diff(self.values))) / 2**0.5)

    def since(self, step: int) -> "Series":
        """Return the steps from `step` on."""
        kept = self.steps >= step
        return Series(self.name, self.steps[kept], self.values[kept], self.resolution)

    def rose(self, factor: float) -> bool:
        """Return whether both last windows are `factor` times the first, beyond the noise.

        False for short series.
        """
        level = max(factor * self.first, self.first + 4 * self.noise)
        return self.sustained(lambda value: value > level)

    def fell(self, factor: float) -> bool:
        """Return whether both last windows are `factor` times the first, beyond the noise.

        False for short series.
        """
        level = min(factor * self.first, self.first - 4 * self.noise)
        return self.sustained(lambda value: value < level)

    @property
    def ending(self) -> str:
        """The last level in words."""
        if len(self.values) == 1:
            return f"{self.last:.4g} in the only step"
        return f"median {self.last:.4g} in the last {self.end_window} steps"

    @property
    def change(self) -> str:
        """The last and the first level in words."""
        return self.ending + (f", {self.first:.4g} at first" if len(self.values) > 1 else "")

    @property
    def is_zero(self) -> bool:
        """Whether both last windows, or all of few steps, are exactly 0; False if rounded."""
        return self.resolution == 0 and self.holds(lambda value: value == 0.0)

    def at(self, places: Iterable[int]) -> tuple[tuple[int, float], ...]:
        """Return steps and values at indices, for evidence."""
        return tuple((int(self.steps[i]), float(self.values[i])) for i in places)

    def tail(self, count: int = 5) -> tuple[tuple[int, float], ...]:
        """Return the last values with their steps, for evidence."""
        return self.at(range(len(self.values))[-count:])


NOTHING = Series("", np.zeros(0, np.int64), np.zeros(0))


def medians_between(values: Floats, left: Ints, right: Ints) -> Floats:
    """Return the median of values[left:right] for each pair, as np.median has it, NaN of none.

    O(n log n) for n values and pairs, whatever the widths: windows of a tenth of a run at every
    step took time and memory that grew with its square. The ranks of values are divided bit by bit,
    the highest first, into those with 0 and those with 1 (a wavelet matrix); counts of zeros before
    each place lead to the rank with a given number of smaller ones in each interval.
    """
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values))
    size = right - left
    ends = [left, left], [right, right]  # of both middle values
    starts, stops = (np.concatenate(end) for end in ends)
    wanted, found = np.concatenate([(size - 1) // 2, size // 2]), np.zeros(2 * len(size), np.int64)
    for bit in reversed(range(len(values).bit_length())):
        is_one = (ranks >> bit) & 1 == 1
        zeros = np.concatenate([[0], np.cumsum(~is_one)])
        before, until = zeros[starts], zeros[stops]
        goes_up = wanted >= until - before
        wanted -= np.where(goes_up, until - before, 0)
        found |= goes_up.astype(np.int64) << bit
        starts = np.where(goes_up, zeros[-1] + starts - before, before)
        stops = np.where(goes_up, zeros[-1] + stops - until, until)
        ranks = np.concatenate([ranks[~is_one], ranks[is_one]])
    middle = values[order][np.minimum(found, len(values) - 1)].reshape(2, -1)
    return np.where(size > 0, middle.mean(axis=0), np.nan)


def running_medians(values: Floats, width: int) -> Floats:
    """Return the median of each `width` consecutive values [n - width + 1]."""
    starts = np.arange(len(values) - width + 1)
    return medians_between(values, starts, starts + width)


def binned(series: Series, most: int = MOST_BINS) -> tuple[Floats, Floats]:
    """Return medians of at most `most` bins: float64 steps [b] and values [b].

    An outlier is ignored: each value is first replaced by the median of itself and its neighbours.
    """
    padded = np.pad(series.values, 1, mode="edge")
    smooth = np.median(sliding_window_view(padded, 3), axis=1)
    count = min(most, max(len(series.values) // 3, min(len(series.values), 24)))
    bins = np.array_split(np.arange(len(series.values)), count)
    return (
        np.array([series.steps[one[0]] for one in bins], np.float64),
        np.array([np.median(smooth[one]) for one in bins]),
    )


@dataclass(frozen=True)
class Trend:
    """The change over the complete run with its 95 % interval, in the metric's own unit.

    `scatter` is the standard deviation of steps around the trend. A metric rises or falls only if
    the interval excludes 0 and the change exceeds the scatter.
    """

    change: float
    low: float
    high: float
    scatter: float

    def describe(self, num_steps: int) -> str:
        """Describe the change in words."""
        interval = f"95 % interval {self.low:+.3g} to {self.high:+.3g}"
        return f"over {num_steps} steps it changes by {self.change:+.3g} ({interval})"

    @property
    def rises(self) -> bool:
        return self.low > 0 and self.change > self.scatter

    @property
    def falls(self) -> bool:
        return self.high < 0 and -self.change > self.scatter


def theil_sen(series: Series) -> Trend | None:
    """Compute the Theil-Sen slope times the length of the run, with a block-bootstrap interval.

    None below `FEWEST_STEPS`. Sources: H. Theil (1950), P. K. Sen (1968); resampling blocks of
    residuals preserves the correlation of neighbouring steps (H. Kuensch, 1989).
    """
    if len(series.values) < FEWEST_STEPS:
        return None
    points = np.linspace(0, len(series.values) - 1, min(MOST_POINTS, len(series.values))).astype(np.int64)
    x, y = series.steps[points].astype(np.float64), series.values[points]
    span = float(x[-1] - x[0]) or 1.0
    left, right = np.triu_indices(len(x), 1)
    distance = x[right] - x[left]

    def slope(values: Floats) -> float:
        return float(np.median((values[right] - values[left]) / distance))

    best = slope(y)
    residual = y - best * x
    residual -= np.median(residual)
    block = max(1, round(len(x) ** (1 / 3)))
    generator = np.random.default_rng(0)
    starts = generator.integers(0, len(x) - block + 1, (NUM_RESAMPLES, -(-len(x) // block)))
    index = (starts[:, :, None] + np.arange(block)).reshape(NUM_RESAMPLES, -1)[:, : len(x)]
    slopes = [slope(best * x + residual[row]) for row in index]
    low, high = np.quantile(slopes, (0.025, 0.975))
    # 0.6745: median absolute value of a normal distribution
    scatter = max(series.resolution, float(np.median(np.abs(residual))) / 0.6745)
    return Trend(best * span, float(low) * span, float(high) * span, scatter)
