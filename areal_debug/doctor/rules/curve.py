"""A curve fitted to the reward: where it levels off, and how much there is left to gain."""

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.read import Run
from areal_debug.doctor.rules.groups import MOST_ALIKE, share_alike
from areal_debug.doctor.rules.learning import is_at_its_top, is_share, is_solved, rises
from areal_debug.doctor.series import Floats, Series, binned

FLAT_SHARE = 0.5  # of the run
REACHED, LEFT = 0.95, 0.4  # of the gain; of what a reward between 0 and 1 has left to gain
LEAST_STEPS = 40


def fit_curve(series: Series) -> tuple[float, float, int]:
    """Fit a sigmoid, or an exponential approach, to medians of bins by least squares.

    Centre and width are searched on a grid, level and gain are solved for. Returns where the curve
    begins, its ceiling, and the step at which 95 % of the gain were made. Source of the shape:
    ScaleRL (2510.13786), reward against compute.
    """
    x, y = binned(series)
    at = (x - x[0]) / max(x[-1] - x[0], 1.0)
    curves: list[Floats] = [1 - np.exp(-at / tau) for tau in np.geomspace(0.03, 1.5, 24)]
    for middle in np.linspace(0.0, 1.0, 21):
        curves += [1 / (1 + np.exp(-(at - middle) / width)) for width in np.geomspace(0.02, 0.4, 10)]
    shapes = np.stack(curves)
    centred = shapes - shapes.mean(axis=1, keepdims=True)
    gains = centred @ (y - y.mean()) / np.maximum((centred**2).sum(axis=1), 1e-12)
    best = int(np.argmax(gains**2 * (centred**2).sum(axis=1)))
    fitted = y.mean() + gains[best] * centred[best]
    target = fitted[0] + REACHED * (fitted[-1] - fitted[0])
    reached = int(np.argmax((fitted >= target) if gains[best] > 0 else (fitted <= target)))
    return float(fitted[0]), float(fitted[-1]), int(x[reached])


def reward_levels_off(run: Run) -> Alarm | None:
    """D05: the reward rose, reached its ceiling early, and gained nothing in half of the run."""
    series = run.finite("reward")
    if len(series.values) < LEAST_STEPS or is_solved(run) or is_at_its_top(series):
        return None
    if share_alike(run).sustained(lambda value: value > MOST_ALIKE):
        return None  # the reason is known: D22
    low, ceiling, reached = fit_curve(series)
    gain, idle = ceiling - low, int(series.steps[-1] - reached)
    late, error = series.since(reached).trend, series.deviation * (2 / series.window) ** 0.5  # of two windows
    if gain <= 4 * error or late is None or idle < FLAT_SHARE * (series.steps[-1] - series.steps[0]):
        return None
    left = LEFT * (1 - ceiling) if is_share(series) and not rises(run, "eval_reward") else 0.0
    if abs(late.change) > 0.1 * max(gain, left) or late.high > 0.25 * max(gain, left):
        return None
    return alarm(
        "D05",
        series,
        title="reached",
        found=(
            f"the fitted curve rises from {low:.3g} to a ceiling of {ceiling:.3g}; {100 * REACHED:.0f} % of that was "
            f"reached at step {reached}, and the {idle} steps since then changed it by {late.change:+.2g}"
        ),
        evidence=((reached, low + REACHED * gain), *series.tail(3)),
        since=reached,
    )


RULES = (reward_levels_off,)
