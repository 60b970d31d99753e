"""S03 and S04: rewards that follow the length of a completion, or that truncated ones get."""

import numpy as np

from areal_debug.doctor.samples.evidence import FEWEST_PROMPTS, Finding, finding, has_support, share
from areal_debug.doctor.samples.read import Rows

FEWEST_GROUPS, FEWEST_OF_GROUP = 30, 3
SPREAD_TOKENS, SPREAD = 8, 0.2  # of the lengths in a group: tokens, and share of their mean
DECIDES, FAVOURS, IN_UPPER_HALF, GROWTH = 0.8, 0.5, 0.3, 1.25
TRUNCATED_PAID, MOST_TRUNCATED = 0.3, 0.9


def length_is_paid(rows: Rows) -> Finding | None:
    """S03: in a group the longer samples have the larger rewards."""
    judged = rows.ended & np.isfinite(rows.reward) & (rows.group >= 0)
    found = rank_correlation(rows, judged)
    if found is None:
        return None
    correlation, num_groups, used = found
    is_long = rows.by_group(judged, lambda of: rows.lengths[of] >= np.median(rows.lengths[of]))
    upper = rank_correlation(rows, judged & is_long)
    growth = rows.lengths[rows.late].mean() / max(1.0, rows.lengths[rows.early].mean())
    grows = growth >= GROWTH and upper is not None and upper[0] >= IN_UPPER_HALF
    if correlation < DECIDES and not (correlation >= FAVOURS and grows):
        return None
    is_best = rows.by_group(used, lambda of: rows.reward[of] == rows.reward[of].max())
    longest = used & (rows.lengths >= np.quantile(rows.lengths[used], 0.8)) & is_best
    shown = (
        f"rank correlation of length and reward inside {num_groups} groups is {correlation:.2f}, and the mean length "
        f"became {growth:.2f} times that of the beginning"
    )
    return finding(
        "S03", shown, rows, longest, used, severity="error" if correlation >= DECIDES else "warning"
    )


def rank_correlation(rows: Rows, among: np.ndarray) -> tuple[float, int, np.ndarray] | None:
    """Return the rank correlation of length and reward inside groups, their number, and their rows.

    Groups whose rewards or lengths are alike are left out. None if too few are left.
    """
    lengths, rewards, used = [], [], np.zeros(len(rows), bool)
    for members in rows.groups(among):
        length, reward = rows.lengths[members], rows.reward[members]
        is_varied = np.ptp(length) >= max(SPREAD_TOKENS, SPREAD * length.mean()) and np.ptp(reward) > 0
        if len(members) < FEWEST_OF_GROUP or not is_varied:
            continue
        used[members] = True
        lengths.append(centred_ranks(length))
        rewards.append(centred_ranks(reward))
    if len(lengths) < FEWEST_GROUPS or len(np.unique(rows.prompts[used])) < FEWEST_PROMPTS:
        return None
    left, right = np.concatenate(lengths), np.concatenate(rewards)
    return float(left @ right / np.sqrt((left @ left) * (right @ right))), len(lengths), used


def centred_ranks(values: np.ndarray) -> np.ndarray:
    _, number, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts + 1) / 2
    centred: np.ndarray = ranks[number] - ranks[number].mean()
    return centred


def truncated_is_paid(rows: Rows) -> Finding | None:
    """S04: completions that were cut off at the length limit get the full reward."""
    known = np.isfinite(rows.truncated) & np.isfinite(rows.reward)
    cut = known & (rows.truncated == 1)
    if not rows.is_binary or not known.any() or share(cut, known) > MOST_TRUNCATED:
        return None
    paid = cut & rows.high
    if not has_support(rows, paid) or share(rows.high, cut) < TRUNCATED_PAID:
        return None
    shown = (
        f"{int(paid.sum())} of {int(cut.sum())} completions that reached the length limit have the full reward "
        f"({share(rows.high, cut):.0%}; of the finished ones {share(rows.high, known & ~cut):.0%})"
    )
    return finding("S04", shown, rows, paid, cut, lambda row: rows.text(row)[-80:])
