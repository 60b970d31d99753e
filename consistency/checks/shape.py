"""The shape of |D|: slope over positions, and the affected sequences."""

from dataclasses import dataclass

import numpy as np

from consistency.tokens import Bools, Floats, Ints, TokenTable

NUM_BINS = 30
TOKENS_PER_BIN = 30
MIN_SEGMENT = 5
MIN_RUN = 3  # tokens; a shorter run can be chance


def trend(position: Ints, size: Floats) -> tuple[float, float, float] | None:
    """Fit a line to |D| over position: R squared, mean of the first and of the last quarter.

    None with too few tokens.
    """
    num_bins = min(NUM_BINS, len(position) // TOKENS_PER_BIN)
    if num_bins < 8:
        return None
    order = np.argsort(position, kind="stable")
    bins = np.array_split(order, num_bins)
    x, y = (np.array([column[members].mean() for members in bins]) for column in (position, size))
    spread = float(((y - y.mean()) ** 2).sum()) or 1.0
    fits = [(np.polyfit(z, y, 1), z) for z in (np.log1p(x), x)]
    line = 1 - min(((y - np.polyval(fit, z)) ** 2).sum() for fit, z in fits) / spread
    quarter = num_bins // 4
    return float(line), float(y[:quarter].mean()), float(y[-quarter:].mean())


@dataclass(frozen=True)
class Breaks:
    """The cut of each sequence at the largest change of |D|, all [sequences].

    `place` counts from the first sampled token; mean |D| before it, mean and median after it, and the mean of
    the sequence.
    """

    place: Ints
    before: Floats
    after: Floats
    after_median: Floats
    mean: Floats


def breaks(table: TokenTable) -> Breaks:
    """Cut each sequence at the largest change of |D|, with at least five tokens on both sides.

    Shorter sequences are not cut: all their fields hold the mean.
    """
    size = np.minimum(np.abs(table.difference), 5.0)
    _, starts = np.unique(table.sequence, return_index=True)
    columns: list[tuple[int, float, float, float, float]] = []
    for start, end in zip(starts, [*starts[1:], len(size)], strict=True):
        sizes, overall = size[start:end], float(size[start:end].mean())
        if len(sizes) < 2 * MIN_SEGMENT:
            columns.append((0, overall, overall, overall, overall))
            continue
        sums, counts = np.cumsum(sizes)[:-1], np.arange(1, len(sizes))
        left, right = sums / counts, (sizes.sum() - sums) / (len(sizes) - counts)
        gain = counts * (len(sizes) - counts) * (left - right) ** 2
        inner = slice(MIN_SEGMENT - 1, len(sizes) - MIN_SEGMENT)
        cut = int(np.argmax(gain[inner])) + MIN_SEGMENT - 1
        place, first = table.position[start + cut + 1], table.position[start]
        broken, mid = int(place - first), float(np.median(sizes[cut + 1 :]))
        columns.append((broken, float(left[cut]), float(right[cut]), mid, overall))
    return Breaks(*(np.array(column) for column in zip(*columns, strict=True)))


def explained_by_key(keys: Ints, values: Floats) -> float:
    """Return the share of the variance of `values` that a mean per key predicts.

    The means are fitted on every other token and evaluated on the rest.
    """
    names, inverse = np.unique(keys, return_inverse=True)
    fitted = np.arange(len(keys)) % 2 == 0
    count = np.bincount(inverse[fitted], minlength=len(names))
    mean = np.bincount(inverse[fitted], weights=values[fitted], minlength=len(names)) / np.maximum(count, 1)
    evaluated = ~fitted & (count[inverse] > 0)
    if evaluated.sum() < 50:
        return 0.0
    rest = values[evaluated] - values[fitted].mean()
    return float(
        1 - ((values[evaluated] - mean[inverse[evaluated]]) ** 2).sum() / max(float((rest**2).sum()), 1e-300)
    )


def run_lengths(flags: Bools, sequence: Ints) -> Ints:
    """Return the lengths of the runs of true values within sequences, int64 [runs]."""
    begins = flags & np.concatenate([[True], ~flags[:-1] | (np.diff(sequence) != 0)])
    return np.bincount(np.cumsum(begins)[flags])[1:]
