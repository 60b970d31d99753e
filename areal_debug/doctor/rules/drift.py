"""Distance to the reference policy: how fast it grows, and at which positions."""

import re
from collections.abc import Iterable

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import Series

FAR = 1.0  # nat a token
TOKENS = 100.0  # of a completion, over which TRL's `objective/kl` and the KL of KTO are sums
GROWTH = 10.0
LEAST_NEGATIVE = 0.01  # nat: an estimate over few samples may be a little below 0
WORTH_A_LOOK = 0.2  # nat a token
SPEEDS_UP = 4.0  # growth in the last third of the run over that in the first
POSITION = re.compile(r"kl\w*(?:pos|bucket)\w*[/_.-](\d+)$", re.I)
AHEAD = 4.0  # KL of one position over the median of the others


def divergence_explodes(run: Run) -> Alarm | None:
    """D29: the KL divergence to the reference is multiplied, whatever the reward does.

    It may be multiplied within the first window: then the reward must not have risen.
    """
    series, reward = run.finite("reference_kl"), run.finite("reward")
    gains = reward.trend
    scale = TOKENS if series.name.startswith("objective/") or run.kind == "preferences" else 1.0
    is_far = series.sustained(lambda value: value > FAR * scale)
    at_once = (
        is_far
        and gains is not None
        and not gains.rises
        and series.last > GROWTH * series.values[: series.window].min()
    )
    outruns = series.last > WORTH_A_LOOK * scale and outruns_reward(series, reward)
    if (
        not (series.rose(GROWTH) and (is_far or outruns))
        and not at_once
        and not series.throughout(lambda value: value > FAR * scale)
    ):
        return None
    begins, also = onset(series, "up", in_ratios=True), ""
    if len(before := reward.values[reward.steps < begins]) and len(after := reward.since(begins).values):
        also = f"; the median reward is {np.median(before):.3g} before step {begins}, {np.median(after):.3g} from there on"
    return alarm(
        "D29",
        series,
        found=series.change + also,
        severity="error" if is_far else "warning",
        title="far" if series.is_short else "explodes",
        since=begins,
    )


def divergence_is_negative(run: Run) -> Alarm | None:
    """D44: the KL to the reference is below 0, which no divergence of own samples is."""
    series = run.finite("reference_kl")
    limit = -max(LEAST_NEGATIVE, 3 * series.noise)
    if not series.sustained(lambda value: value < limit):
        return None
    found = series.trend
    falls = found is not None and found.falls
    return alarm(
        "D44",
        series,
        found=series.change,
        severity="error" if falls else "warning",
        title="falls" if falls else "negative",
        since=onset(series, "down"),
    )


def outruns_reward(series: Series, reward: Series) -> bool:
    """Return whether KL speeds up in the last third of the run, and the reward does not with it."""
    early, _, late = thirds(series)
    if late < SPEEDS_UP * max(early, series.noise):
        return False
    if len(reward.values) < 3:
        return True
    gained = thirds(reward)
    total, grown = sum(gained), early + late
    return total <= 0 or late / grown > gained[2] / total + 0.3


def thirds(series: Series) -> tuple[float, float, float]:
    count, half = len(series.values), max(2, series.window // 2)
    at = [0, count // 3, 2 * count // 3, count]
    levels = [float(np.median(series.values[max(0, i - half) : i + half])) for i in at[:-1]] + [series.last]
    return levels[1] - levels[0], levels[2] - levels[1], levels[3] - levels[2]


def one_position_drifts(run: Run) -> Alarm | None:
    """D30: the KL to the reference grows at some positions and not at the others."""
    positions = by_position(run)
    if len(positions) < 3:
        return None
    last = {number: series.last for number, series in positions.items()}
    ahead = max(last, key=lambda number: last[number])
    series = positions[ahead]
    others = float(np.median([value for number, value in last.items() if number != ahead]))
    before = float(np.median([one.first for number, one in positions.items() if number != ahead]))
    if not series.rose(AHEAD) or series.last < AHEAD * others:
        return None
    if series.last / max(others, 1e-12) < AHEAD / 2 * series.first / max(before, 1e-12):
        return None  # it was ahead from the beginning
    return alarm(
        "D30",
        series,
        found=(
            f"KL at position {ahead} of {len(positions)}: {series.change}; the median of the others is {others:.3g}"
        ),
        since=onset(series, "up", in_ratios=True),
        look="read what stands there: "
        + ("an opening phrase" if ahead == min(positions) else "where answers end, or what follows")
        + " that the reward pays for?",
    )


def by_position(run: Run) -> dict[int, Series]:
    found: Iterable[tuple[int, Series]] = (
        (int(match[1]), series.finite)
        for name, series in run.by_name.items()
        if (match := POSITION.search(name)) is not None
    )
    return {number: series for number, series in sorted(found, key=lambda one: one[0]) if len(series.values)}


RULES = (divergence_explodes, divergence_is_negative, one_position_drifts)
