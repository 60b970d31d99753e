"""S09: engine and trainer disagree more and more along a completion, or at its first token."""

import numpy as np

from areal_debug.doctor.samples.evidence import Finding, finding, has_support
from areal_debug.doctor.samples.read import Rows

BINS, FEWEST_OF_BIN = 8, 200
GROWTH, LARGE = 4.0, 0.05  # ratio of the last and first bin; nats
FIRST_RATIO, FIRST_LARGE = 10.0, 0.1


def differs_by_position(rows: Rows) -> Finding | None:
    """S09: the mean difference of log-probs of the last eighth is four times that of the first."""
    usable = np.isfinite(rows.difference)
    if usable.sum() < BINS * FEWEST_OF_BIN or not rows.difference[usable].any():
        return None
    position = (np.arange(len(rows.ids)) - rows.bounds[rows.row_of_token])[usable]
    size = np.abs(rows.difference[usable].astype(np.float64))
    of_first = size[position == 0]
    later = float(np.median(size[position > 0])) if (position > 0).any() else 0.0
    edges = np.unique(np.quantile(position, np.linspace(0, 1, BINS + 1)[1:-1]))
    means = [
        float(size[number].mean())
        for bin_ in range(len(edges) + 1)
        if len(number := np.flatnonzero(np.searchsorted(edges, position, side="left") == bin_))
        >= FEWEST_OF_BIN
    ]
    rises = (np.diff(means) > 0).sum() >= len(means) - 2  # nearly always
    if len(means) > 3 and means[-1] >= max(LARGE, GROWTH * means[0]) and rises:
        title = "grows"
        found = f"the mean difference of log-probs grows from {means[0]:.3g} to {means[-1]:.3g} along the completion"
        row = rows.row_of_token[usable]
        total = np.bincount(row, np.abs(rows.difference[usable]), len(rows))
        flagged = total / np.maximum(1, np.bincount(row, minlength=len(rows))) >= means[-1] / 2
    elif len(of_first) >= FEWEST_OF_BIN and of_first.mean() >= max(FIRST_LARGE, FIRST_RATIO * later, 1e-5):
        title = "first"
        found = f"the mean difference of log-probs is {of_first.mean():.3g} there, in the median {later:.3g} after it"
        flagged = np.zeros(len(rows), bool)
        flagged[rows.row_of_token[usable][position == 0][of_first >= of_first.mean() / 2]] = True
    else:
        return None
    if not has_support(rows, flagged):
        return None
    return finding("S09", found, rows, flagged, rows.lengths > 0, title=title)
