"""The text of every token of a step: one table of distinct texts, and an index per token.

A token's text is what it adds after another token, so leading spaces are kept. Tokens that contain
a part of a character only have text together: runs of them are decoded in place. Redaction replaces
tokens, so that neither text nor id of what was redacted remains.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np

from recorder.samples import token_texts

Decode = Callable[[list[int]], str]
BROKEN = "\ufffd"  # text of an incomplete character
BLOCK = "█"


@dataclass(frozen=True)
class TokenText:
    """Token `i` is entry `index[i]` of the tables. A redacted token has the id -1."""

    index: np.ndarray  # uint32 [tokens]
    texts: list[str]
    ids: list[int]


def text_of_tokens(ids: np.ndarray, bounds: np.ndarray, decode: Decode | None) -> TokenText:
    """Decode flat `ids` [tokens], rows from `bounds[i]` to `bounds[i + 1]`.

    Without `decode`, the texts are ids in angle brackets.
    """
    unique, index = np.unique(ids, return_inverse=True)
    known = [int(token) for token in unique]
    if decode is None:
        return TokenText(index.astype(np.uint32), [f"⟨{token}⟩" for token in known], known)
    texts = texts_after_another(known, decode)
    partial = np.array([BROKEN in text for text in texts], dtype=bool)
    found = TokenText(index.astype(np.uint32), texts, known)
    return (
        join_partial_tokens(found, np.flatnonzero(partial[index]), bounds, decode) if partial.any() else found
    )


def texts_after_another(tokens: Sequence[int], decode: Decode) -> list[str]:
    anchor = next((t for t in tokens if (text := decode([t])).strip() and BROKEN not in text), None)
    if anchor is None:
        return [decode([token]) for token in tokens]
    before = len(decode([anchor]))
    return [decode([anchor, token])[before:] for token in tokens]


def join_partial_tokens(
    found: TokenText, places: np.ndarray, bounds: np.ndarray, decode: Decode
) -> TokenText:
    index, texts, ids = found.index.copy(), list(found.texts), list(found.ids)
    entries: dict[tuple[int, str], int] = {}
    rows = np.searchsorted(bounds, places, side="right")
    for _, run in groupby(
        enumerate(zip(places.tolist(), rows.tolist(), strict=True)), lambda p: (p[1][0] - p[0], p[1][1])
    ):
        where = [place for _, (place, _) in run]
        run_ids = [ids[index[place]] for place in where]
        for place, token, text in zip(where, run_ids, token_texts(run_ids, decode), strict=True):
            entry = entries.setdefault((token, text), len(texts))
            if entry == len(texts):
                texts.append(text)
                ids.append(token)
            index[place] = entry
    return TokenText(index, texts, ids)


def redact_tokens(found: TokenText, bounds: np.ndarray, patterns: Sequence[re.Pattern[str]]) -> TokenText:
    """Replace every token that overlaps a match by a block; drop unused table entries."""
    hidden = np.zeros(len(found.index), dtype=bool)
    for begin, end in pairwise(bounds):
        pieces = [found.texts[entry] for entry in found.index[begin:end]]
        ends = list(accumulate(map(len, pieces)))
        text = "".join(pieces)
        for pattern in patterns:
            for match in pattern.finditer(text):
                first = np.searchsorted(ends, match.start(), side="right")
                last = np.searchsorted(ends, match.end(), side="left")
                hidden[begin + first : begin + last + (match.end() > match.start())] = True
    index = np.where(hidden, len(found.texts), found.index)
    used, compact = np.unique(index, return_inverse=True)
    texts, ids = [*found.texts, BLOCK], [*found.ids, -1]
    return TokenText(compact.astype(np.uint32), [texts[i] for i in used], [ids[i] for i in used])


def redact_text(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    """Replace every match in a text by a block."""
    for pattern in patterns:
        text = pattern.sub(BLOCK, text)
    return text
