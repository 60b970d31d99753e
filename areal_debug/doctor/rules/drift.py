"""Distance to the reference policy: how fast it grows, and at which positions."""

import re
from collections.abc import Iterable

import numpy as np

from areal_debug.doctor.alarm import Alarm, alarm
from areal_debug.doctor.onset import onset
from areal_debug.doctor.read import Run
from areal_debug.doctor.series import Series

FAR, ABSURD = 1.0, 100.0  # nats a token; no log-probs are so far apart on average, only single tokens
TOKENS = 100.0  # of a completion, over which TRL's `objective/kl` and the KL of KTO are sums
GROWTH = 10.0
WORTH_A_LOOK = 0.5  # nat a token
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
    is_absurd = series.holds(lambda value: value > ABSURD * scale)
    at_once = (
        is_far
        and gains is not None
        and not gains.rises
        and series.last > GROWTH * series.values[: series.window].min()
    )
    begins, also = onset(series, "up", in_ratios=True), ""
    late = reward.since(begins).trend
    outruns = series.last > WORTH_A_LOOK * scale and (
        late is None or not late.rises or begins > series.steps[series.window]
    )
    if (
        not (series.rose(GROWTH) and (is_far or outruns))
        and not (at_once or is_absurd)
        and not series.throughout(lambda value: value > FAR * scale)
    ):
        return None
    if len(before := reward.values[reward.steps < begins]) and len(after := reward.since(begins).values):
        also = f"; the median reward is {np.median(before):.3g} before step {begins}, {np.median(after):.3g} from there on"
    return alarm(
        "D29",
        series,
        found=series.change + also,
        severity="error" if is_far else "warning",
        title="far" if series.is_short or not (series.rose(GROWTH) or at_once) else "explodes",
        since=begins,
    )


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


RULES = (divergence_explodes, one_position_drifts)
