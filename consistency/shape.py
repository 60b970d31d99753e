"""The shape of a disagreement: where in a sequence it begins, whether it rises or jumps, which sequences have it at all."""

from dataclasses import dataclass

import numpy as np

from consistency.tokens import Bools, Floats, Ints, TokenTable

NUM_BINS = 30
TOKENS_A_BIN = 30
SHORTEST_PART = 5


@dataclass(frozen=True)
class Trend:
    """Mean |D| over positions: R squared of a line and of one step, the step's place, and the levels of first and last quarter."""

    line: float
    step: float
    step_place: float
    first: float
    last: float


def trend(position: Ints, size: Floats) -> Trend | None:
    """The trend of |D| with position, or None where there are too few tokens to tell."""
    num_bins = min(NUM_BINS, len(position) // TOKENS_A_BIN)
    if num_bins < 8:
        return None
    order = np.argsort(position, kind="stable")
    parts = np.array_split(order, num_bins)
    x, y = (np.array([column[part].mean() for part in parts]) for column in (position, size))
    spread = float(((y - y.mean()) ** 2).sum()) or 1.0
    slope = np.polyfit(np.log1p(x), y, 1)
    straight = np.polyfit(x, y, 1)
    line = (
        1
        - min(((y - np.polyval(fit, z)) ** 2).sum() for fit, z in ((slope, np.log1p(x)), (straight, x)))
        / spread
    )
    misses = [
        ((y[:k] - y[:k].mean()) ** 2).sum() + ((y[k:] - y[k:].mean()) ** 2).sum() for k in range(1, num_bins)
    ]
    place = int(np.argmin(misses)) + 1
    quarter = num_bins // 4
    return Trend(
        line=float(line),
        step=float(1 - min(misses) / spread),
        step_place=float(position[parts[place][0]]),
        first=float(y[:quarter].mean()),
        last=float(y[-quarter:].mean()),
    )


def onset(position: Ints, difference: Floats, level: float) -> int | None:
    """The position from which on |D| is bad, when everything before is clean: at least five positions at either side."""
    size = np.minimum(np.abs(difference), 5.0)
    names, means, count = means_by(position, size)
    bad = np.flatnonzero((means > 2 * level) & (count >= SHORTEST_PART))
    if not len(bad) or bad[0] < SHORTEST_PART or len(names) - bad[0] < SHORTEST_PART:
        return None
    before, after = size[position < names[bad[0]]], size[position >= names[bad[0]]]
    return int(names[bad[0]]) if before.mean() < 1.5 * level and after.mean() > 3 * level else None


@dataclass(frozen=True)
class Breaks:
    """Each sequence cut where its |D| changes most, all [sequences].

    Tokens before the cut, its absolute position, mean |D| before, mean and median after it, and of the whole.
    """

    before_count: Ints
    place: Ints
    before: Floats
    after: Floats
    after_median: Floats
    mean: Floats
    sequence: Ints


def breaks(table: TokenTable) -> Breaks:
    """Where the |D| of each sequence changes most, with at least five tokens on both sides; the mean alone for shorter ones."""
    size = np.minimum(np.abs(table.difference), 5.0)
    names, starts = np.unique(table.sequence, return_index=True)
    columns: list[tuple[int, int, float, float, float, float]] = []
    for start, end in zip(starts, [*starts[1:], len(size)], strict=True):
        part, whole = size[start:end], float(size[start:end].mean())
        if len(part) < 2 * SHORTEST_PART:
            columns.append((0, int(table.position[start]), whole, whole, whole, whole))
            continue
        sums, counts = np.cumsum(part)[:-1], np.arange(1, len(part))
        left, right = sums / counts, (part.sum() - sums) / (len(part) - counts)
        gain = counts * (len(part) - counts) * (left - right) ** 2
        inner = slice(SHORTEST_PART - 1, len(part) - SHORTEST_PART)
        cut = int(np.argmax(gain[inner])) + SHORTEST_PART - 1
        columns.append(
            (
                cut + 1,
                int(table.position[start + cut + 1]),
                float(left[cut]),
                float(right[cut]),
                float(np.median(part[cut + 1 :])),
                whole,
            )
        )
    count, place, before, after, median, mean = (np.array(column) for column in zip(*columns, strict=True))
    return Breaks(count, place, before, after, median, mean, names)


def explained_by_key(keys: Ints, values: Floats) -> float:
    """Share of the variance of `values` that a mean per key predicts, learned on every other token and judged on the rest."""
    names, inverse = np.unique(keys, return_inverse=True)
    learn = np.arange(len(keys)) % 2 == 0
    count = np.bincount(inverse[learn], minlength=len(names))
    mean = np.bincount(inverse[learn], weights=values[learn], minlength=len(names)) / np.maximum(count, 1)
    judged = ~learn & (count[inverse] > 0)
    if judged.sum() < 50:
        return 0.0
    rest = values[judged] - values[learn].mean()
    return float(
        1 - ((values[judged] - mean[inverse[judged]]) ** 2).sum() / max(float((rest**2).sum()), 1e-300)
    )


def means_by(keys: Ints, size: Floats) -> tuple[Ints, Floats, Ints]:
    """Distinct keys, mean of `size` and number of tokens of each."""
    names, inverse = np.unique(keys, return_inverse=True)
    count = np.bincount(inverse)
    return names, np.bincount(inverse, weights=size) / count, count


def run_lengths(flags: Bools, sequence: Ints) -> Ints:
    """Lengths of the runs of true values inside sequences, int64 [runs]."""
    begins = flags & np.concatenate([[True], ~flags[:-1] | (np.diff(sequence) != 0)])
    return np.bincount(np.cumsum(begins)[flags])[1:]
