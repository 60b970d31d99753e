"""S12 and S13: end reasons that contradict the last token, and samples that are copies."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from areal_core.safety.received import read_received
from areal_debug.doctor.samples.evidence import Finding, finding
from areal_debug.doctor.samples.read import FIRST_WORD, Rows
from recorder import Record

FEWEST, LEAST_SHARE = 4, 0.02  # rows that contradict, and their share of those with the reason
OWN_END = 0.9  # of the places of a token at which a row ends: then it is an end token, too
MOST_ALIKE = 0.5  # of the contradicting rows end with one token: a stop string ends so
COPIED_NATS = 12.0  # once in 160,000 pairs by chance


def end_tokens(record: Record) -> frozenset[int]:
    """Return the end tokens that the model's own files and the record's options name."""
    found: set[int] = set()
    folder = Path(record.header.model["path"] or "")
    for name in ("config.json", "generation_config.json") if record.header.model["path"] else ():
        try:
            document = json.loads(read_received(folder / name))
        except (OSError, ValueError):
            continue
        found |= set(ids_named(document, "eos_token_id"))
    return frozenset(found | set(ids_named(record.header.config, "stop_token_ids")))


def ids_named(document: object, name: str) -> Iterator[int]:
    if isinstance(document, dict):
        for key, value in document.items():
            if key == name:
                yield from (
                    one for one in (value if isinstance(value, list) else [value]) if type(one) is int
                )
            else:
                yield from ids_named(value, name)


def reasons_contradict(rows: Rows) -> Finding | None:
    """S12: rows ended with "stop" and their last token is an ordinary one."""
    known = end_tokens(rows.record)
    if not known or not len(rows.ids) or rows.ids.max() >= FIRST_WORD:
        return None
    last = np.where(rows.last >= 0, rows.last, -1)
    judged = rows.stopped & (last >= 0)
    is_end = np.isin(last, [*known, *own_ends(rows, judged)])
    flagged = judged & ~is_end
    if not enough(flagged, judged) or not np.isin(last[judged], [*known]).any():
        return None
    common = np.unique(last[flagged], return_counts=True)[1].max()
    if common > MOST_ALIKE * flagged.sum():
        return None
    found = (
        f"{int(flagged.sum())} of {int(judged.sum())} completions have the end reason stop and their last token is no "
        f"end token; the other {int((judged & is_end).sum())} end with one"
    )
    return finding("S12", found, rows, flagged, judged)


def enough(flagged: np.ndarray, judged: np.ndarray) -> bool:
    return int(flagged.sum()) >= FEWEST and float(flagged.sum()) >= LEAST_SHARE * float(judged.sum())


def own_ends(rows: Rows, judged: np.ndarray) -> np.ndarray:
    """Return the tokens that nearly always end a row, which no file need name."""
    ids, counts = np.unique(rows.last[judged], return_counts=True)
    total = np.array([(rows.ids == one).sum() for one in ids.tolist()])
    return ids[(counts >= FEWEST) & (counts >= OWN_END * total)]


def surprises(rows: Rows) -> np.ndarray:
    """Return the nats of each row's tokens, [n]."""
    nats = -np.nan_to_num(rows.logprobs.astype(np.float64))
    return np.bincount(rows.row_of_token, nats, len(rows))


def are_copies(rows: Rows) -> Finding | None:
    """S13: samples of one prompt in one step are equal, where chance makes them different."""
    flagged, surprise = np.zeros(len(rows), bool), surprises(rows)
    among = (rows.lengths > 0) & (rows.content != 0) & (surprise > COPIED_NATS)
    seen: dict[tuple[int, int, bytes], list[int]] = {}
    for row in np.flatnonzero(among).tolist():
        seen.setdefault((int(rows.step[row]), int(rows.content[row]), rows.tokens(row).tobytes()), []).append(
            row
        )
    for members in seen.values():
        flagged[members] = len(members) > 1
    if not enough(flagged, among):
        return None
    found = (
        f"{int(flagged.sum())} of {int(among.sum())} completions are copies of another one of their prompt and step, "
        f"of {surprise[flagged].min():.0f} nats or more: equal seeds, or one answer counted twice"
    )
    return finding("S13", found, rows, flagged, among)
