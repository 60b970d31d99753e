"""S01: completions that repeat themselves, in a loop or by saying the same phrases again."""

import numpy as np

from areal_debug.doctor.samples.evidence import FEWEST_ROWS, Finding, finding, has_support, lower_bound, share
from areal_debug.doctor.samples.read import Rows

LONGEST_PERIOD = 32
FEWEST_TOKENS = 24  # of a loop
REPEATS = 4
NGRAM, NGRAM_OF_BYTES, FEWEST_NGRAMS, DISTINCT = 4, 12, 60, 0.35
SMALL_VOCABULARY = 1000  # tokens of characters or bytes, of which any text repeats short sequences
LATE_SHARE, REWARDED_SHARE = 0.10, 0.02


def repeats_itself(rows: Rows) -> Finding | None:
    """S01: a tenth of the late completions are loops, or loops are rewarded as often as others."""
    long_enough = rows.lengths >= FEWEST_TOKENS
    if long_enough.sum() < 5 * FEWEST_ROWS:
        return None
    loops = (is_loop(rows) | has_few_phrases(rows)) & long_enough
    late = loops & rows.late
    late_low = lower_bound(late.sum(), (rows.late & long_enough).sum())
    is_late = (
        has_support(rows, late)
        and late_low >= LATE_SHARE / 2
        and share(loops, rows.late & long_enough) >= LATE_SHARE
    )
    paid = loops & rows.high
    is_paid = (
        has_support(rows, paid)
        and share(loops, long_enough) >= REWARDED_SHARE
        and share(rows.high, loops) >= max(0.3, share(rows.high, long_enough & ~loops))
    )
    if not is_late and not is_paid:
        return None
    title = "paid" if is_paid else "loops"
    found = (
        f"{share(loops, rows.late & long_enough):.0%} of the late completions are loops, "
        f"{share(rows.high, loops):.0%} of all loops are rewarded and {share(rows.high, long_enough & ~loops):.0%} of the others"
    )
    return finding(
        "S01",
        found,
        rows,
        paid if is_paid else late,
        long_enough,
        title=title,
        severity="error" if is_paid else "warning",
    )


def is_loop(rows: Rows) -> np.ndarray:
    """Return [n] bool: a period is repeated four times or more, over a quarter of the row."""
    found = np.zeros(len(rows), bool)
    row, ids = rows.row_of_token, rows.ids
    for period in range(1, min(LONGEST_PERIOD, len(ids) - 1) + 1):
        equal = (ids[period:] == ids[:-period]) & (row[period:] == row[:-period])
        edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.view(np.int8), [0]])))
        begins, lengths = edges[::2], edges[1::2] - edges[::2]
        # runs of one row alone: `equal` is false across rows only where the period crosses them
        of_row = row[np.minimum(begins + period, len(row) - 1)]
        inside = np.minimum(lengths, rows.bounds[of_row + 1] - begins - period)
        covered = inside + period
        is_long = (covered >= np.maximum(FEWEST_TOKENS, REPEATS * period)) & (
            4 * covered >= rows.lengths[of_row]
        )
        found[of_row[is_long]] = True
    return found


def has_few_phrases(rows: Rows) -> np.ndarray:
    """Return [n] bool: at most a third of a completion's sequences of four tokens are distinct."""
    size = NGRAM if len(np.unique(rows.ids)) > SMALL_VOCABULARY else NGRAM_OF_BYTES
    if len(rows.ids) < size:
        return np.zeros(len(rows), bool)
    grams = hashed_grams(rows.ids, size)
    row = rows.row_of_token[: len(grams)]
    inside = rows.row_of_token[size - 1 :] == row
    row, kind = row[inside], np.unique(grams[inside], return_inverse=True)[1]
    distinct = np.unique(row * np.int64(len(grams)) + kind) // len(grams)
    total = np.bincount(row, minlength=len(rows))
    return (total >= FEWEST_NGRAMS) & (np.bincount(distinct, minlength=len(rows)) <= DISTINCT * total)


def hashed_grams(ids: np.ndarray, size: int) -> np.ndarray:
    """Return a hash, int64 [tokens - size + 1], of each sequence of `size` tokens."""
    mixed = np.zeros(len(ids) - size + 1, np.uint64)
    for offset in range(size):
        mixed = (mixed ^ ids[offset : len(ids) - size + 1 + offset].astype(np.uint64)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        mixed ^= mixed >> np.uint64(29)
    return mixed.astype(np.int64)
