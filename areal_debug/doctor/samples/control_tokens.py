"""S10: control tokens inside completions become frequent, or generation continues past its end."""

import re

import numpy as np

from areal_debug.doctor.samples.evidence import Finding, finding, has_support, lower_bound, share
from areal_debug.doctor.samples.phrases import terminal_tokens
from areal_debug.doctor.samples.read import FIRST_WORD, Rows

CONTROL = re.compile(
    r"<\|[^|<>]{1,40}\|>|</?s>|<(?:pad|bos|eos|unk)>|\[(?:INST|/INST|PAD|CLS|SEP)\]|</?tool_(?:call|response)>"
)
MOST_KINDS = 512
RISE, LATE, PAST_END = 5.0, 0.05, 0.05


def control_token_spike(rows: Rows) -> Finding | None:
    """S10: late completions have control tokens inside five times as often as early ones."""
    kinds = control_ids(rows)
    if not len(kinds):
        return None
    inside = np.isin(rows.ids, kinds) & ~rows.ends
    flagged = np.bincount(rows.row_of_token[inside], minlength=len(rows)) > 0
    before, after = share(flagged, rows.early), share(flagged, rows.late)
    low = lower_bound((flagged & rows.late).sum(), rows.late.sum())
    rises = len(np.unique(rows.step)) > 3 and after >= LATE and after >= RISE * before and low > before
    past_end = end_is_passed(rows)
    if rises and has_support(rows, flagged & rows.late):
        title, shown = "inside", flagged & rows.late
    elif has_support(rows, past_end) and share(past_end, rows.lengths > 0) >= PAST_END:
        title, shown = "past_end", past_end
    else:
        return None
    counts = np.bincount(np.searchsorted(kinds, rows.ids[inside & shown[rows.row_of_token]]))
    common = rows.decode([int(kinds[counts.argmax()])]) if counts.any() else ""
    found = f"{before:.1%} of the early and {after:.1%} of the late completions have one inside, mostly {common!r}"
    if shown is past_end:
        flagged = past_end
        found = f"{share(past_end, rows.lengths > 0):.1%} of the completions have tokens after their end"
    return finding("S10", found, rows, flagged, rows.lengths > 0, title=title)


def control_ids(rows: Rows) -> np.ndarray:
    """Return the ids of control tokens that occur, ascending; none without a tokenizer."""
    if not rows.has_text:
        return np.zeros(0, np.int64)
    ids = np.unique(rows.ids).tolist()
    found = [token for token in ids if CONTROL.fullmatch(rows.decode([token]).strip())]
    return np.array(found, np.int64)


def end_is_passed(rows: Rows) -> np.ndarray:
    """Return [n] bool: the token that ends most completions is followed by a sampled one."""
    terminal = terminal_tokens(rows)
    chosen = rows.ended & (rows.lengths > 0)
    ends = rows.ids[rows.bounds[1:][chosen] - 1]
    values, counts = np.unique(ends, return_counts=True)
    if not len(terminal) or not len(values) or counts.max() < 0.5 * chosen.sum() or values[0] >= FIRST_WORD:
        return np.zeros(len(rows), bool)
    passed = (rows.ids == values[counts.argmax()]) & ~rows.ends
    return np.bincount(rows.row_of_token[passed], minlength=len(rows)) > 0
