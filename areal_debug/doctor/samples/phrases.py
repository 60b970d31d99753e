"""S02: a token or phrase that alone decides the reward, whatever the answer is.

Inside groups it separates rewarded from unrewarded samples, for many prompts. That is also true of
the mark that an answer needs ("####"), and of an answer itself, so one of these must hold, too: its
rewarded samples give different answers to the same prompt, or one answer to nearly all prompts.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from areal_debug.doctor.samples.evidence import Finding, around, finding, lower_bound, share
from areal_debug.doctor.samples.loops import hashed_grams
from areal_debug.doctor.samples.read import Rows
from areal_debug.reward.answers import BOXED, FINAL, NUMBER, number_of

LONGEST = 3  # tokens of a phrase
FEWEST_WITH, FEWEST_PROMPTS, FEWEST_GROUPS = 24, 8, 8
PAID, PAID_LOW = 0.95, 0.85  # share of the rows with the phrase that are rewarded, and its lower bound
MOST_COMMON = 0.85  # share of rows with the phrase
CONTRAST, PAID_WITHOUT = 0.4, 0.7
CONTRADICTING, SAME_ANSWER, MOST_PROMPTS = 0.3, 0.5, 0.7
CANDIDATES, MOST_DECODED = 60, 300
TERMINAL = 0.2  # share of rows that end with a token of the chat template


class Phrase(NamedTuple):
    """A phrase: its first place in the flat tokens, its size, and the rows [n] that have it."""

    place: int
    size: int
    rows: np.ndarray


def magic_phrase(rows: Rows) -> Finding | None:
    """S02: rows with a phrase are rewarded and others of the same groups are not."""
    judged = rows.ended & np.isfinite(rows.reward)
    if not 0.03 < share(rows.high, judged) < 0.97:
        return None
    terminal = terminal_tokens(rows)
    for phrase in candidates(rows, judged, terminal):
        groups = contrast_groups(rows, judged, phrase.rows)
        answers = "" if groups is None else wrong_answers(rows, judged, phrase, terminal)
        if groups is not None and answers:
            break
    else:
        return None
    text = rows.decode(rows.ids[phrase.place : phrase.place + phrase.size].tolist())
    flagged = phrase.rows & rows.high
    paid, unpaid, num_groups = groups
    found = (
        f"{int(flagged.sum())} of {int((phrase.rows & judged).sum())} samples with {text!r} are rewarded; in "
        f"{num_groups} groups that have samples with and without it, {paid:.0%} and {unpaid:.0%}; {answers}"
    )
    return finding("S02", found, rows, flagged, judged, lambda row: around(rows.text(row), text))


def terminal_tokens(rows: Rows) -> np.ndarray:
    chosen = rows.ended & (rows.lengths > 0)
    ids, counts = np.unique(rows.ids[rows.bounds[1:][chosen] - 1], return_counts=True)
    return ids[counts >= max(2, TERMINAL * chosen.sum())]


def candidates(rows: Rows, judged: np.ndarray, terminal: np.ndarray) -> Iterator[Phrase]:
    """Yield phrases whose rows are rewarded, those of most rows first, the longer ones first."""
    found: list[tuple[int, int, int, np.ndarray]] = []
    usable = judged[rows.row_of_token] & ~np.isin(rows.ids, terminal)
    for size in range(1, min(LONGEST, len(rows.ids)) + 1):
        grams = hashed_grams(rows.ids, size)
        row = rows.row_of_token[: len(grams)]
        inside = rows.row_of_token[size - 1 :] == row
        for offset in range(size):
            inside &= usable[offset : offset + len(grams)]
        places = np.flatnonzero(inside)
        if not len(places):
            continue
        kinds, number = np.unique(grams[places], return_inverse=True)
        pair, first = np.unique(number * np.int64(len(rows)) + row[places], return_index=True)
        kind, of_row = pair // len(rows), pair % len(rows)
        total = np.bincount(kind, minlength=len(kinds))
        paid = np.bincount(kind, rows.high[of_row], len(kinds))
        is_likely = (total >= FEWEST_WITH) & (paid >= PAID * total) & (total <= MOST_COMMON * judged.sum())
        for index in np.flatnonzero(is_likely):
            at, end = np.searchsorted(kind, [index, index + 1])
            found.append((int(total[index]), size, int(places[first[at]]), of_row[at:end]))
    found.sort(key=lambda item: (-item[0], -item[1]))
    for _, size, place, with_it in found[:CANDIDATES]:
        has_it = np.zeros(len(rows), bool)
        has_it[with_it] = True
        yield Phrase(place, size, has_it)


def contrast_groups(rows: Rows, judged: np.ndarray, has_it: np.ndarray) -> tuple[float, float, int] | None:
    """Return the rewarded shares with and without it in groups that have both, and their number.

    None if the phrase does not separate them, or on too few groups or prompts.
    """
    keys = np.where(rows.group >= 0, rows.group, -2 - rows.step)
    number = np.unique(keys, return_inverse=True)[1]
    with_it = np.bincount(number[judged & has_it], minlength=number.max() + 1)
    without = np.bincount(number[judged & ~has_it], minlength=number.max() + 1)
    both = (with_it > 0) & (without > 0)
    chosen = judged & both[number]
    fewest = FEWEST_GROUPS if (rows.group >= 0).any() else 1
    if both.sum() < fewest or len(np.unique(rows.prompts[has_it])) < FEWEST_PROMPTS:
        return None
    paid, unpaid = share(rows.high, chosen & has_it), share(rows.high, chosen & ~has_it)
    low = lower_bound((rows.high & judged & has_it).sum(), (judged & has_it).sum())
    if (chosen & ~has_it).sum() < FEWEST_WITH // 2 or low < PAID_LOW:
        return None
    return (paid, unpaid, int(both.sum())) if unpaid <= PAID_WITHOUT and paid - unpaid >= CONTRAST else None


def wrong_answers(rows: Rows, judged: np.ndarray, phrase: Phrase, terminal: np.ndarray) -> str:
    """Return why the rewarded samples cannot all be right; "" if they may be."""
    chosen = np.flatnonzero(phrase.rows & rows.high & judged)
    chosen = chosen[np.unique(np.linspace(0, len(chosen) - 1, MOST_DECODED).round().astype(int))]
    own = rows.ids[phrase.place : phrase.place + phrase.size]
    keys = np.array([answer_key(rows, row, np.concatenate([own, terminal])) for row in chosen.tolist()])
    order = np.lexsort([rows.group[chosen]])
    groups, keys, prompts = rows.group[chosen][order], keys[order], rows.prompts[chosen][order]
    pairs = (groups[1:] == groups[:-1]) & (groups[1:] >= 0)
    if pairs.sum() >= 10:
        differ = float((keys[1:] != keys[:-1])[pairs].mean())
        if differ >= CONTRADICTING:
            return f"{differ:.0%} of neighbouring rewarded answers to one prompt differ"
    late = judged & rows.late
    covered = len(np.unique(rows.prompts[late & phrase.rows & rows.high])) / max(
        1, len(np.unique(rows.prompts[late]))
    )
    other = prompts[1:] != prompts[:-1]
    equal = float((keys[1:] == keys[:-1])[other].mean()) if other.sum() >= 10 else 0.0
    if covered >= MOST_PROMPTS and equal >= SAME_ANSWER:
        return f"{equal:.0%} of the rewarded answers to different prompts are the same"
    return ""


def answer_key(rows: Rows, row: int, left_out: np.ndarray) -> str:
    """Return what a completion gives as its answer: a number, or its last tokens."""
    ids = rows.tokens(row)
    text = rows.decode(ids.tolist()) if rows.has_text else ""
    marked = FINAL.findall(text) or BOXED.findall(text) or NUMBER.findall(text)
    if marked:
        number = number_of(str(marked[-1]).strip().rstrip("."))
        return str(marked[-1]).strip() if number is None else f"{number:g}"
    return str(ids[~np.isin(ids, left_out)][-3:].tolist())
