"""S12 to S15: end reasons that contradict the last token, copies, tokens at the edges of a row."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from areal_core.safety.received import read_received
from areal_debug.doctor.samples.evidence import Finding, finding, has_support, share
from areal_debug.doctor.samples.read import FIRST_WORD, Rows
from recorder import Record

FEWEST, LEAST_SHARE = 4, 0.02  # rows that contradict, and their share of those with the reason
OWN_END = 0.9  # of the places of a token at which a row ends: then it is an end token, too
FEW_SURE = 0.01  # of the tokens but ends, that have the log-prob 0: a policy that is sure has more
ANSWER = 3  # tokens before the last one, that an answer must have had in the loss mask
MOST_ALIKE = 0.5  # of the contradicting rows end with one token: a stop string ends so
COPIED_NATS = 12.0  # once in 160,000 pairs by chance
NEARLY_ALL, NEARLY_HALF = 0.9, 0.45  # of the rows: of every one, or of all but a last batch


def end_tokens(record: Record) -> frozenset[int]:
    """Return the end tokens that the model's own files and the record's options name."""
    return tokens_named(record, "eos_token_id") | set(ids_named(record.header.config, "stop_token_ids"))


def tokens_named(record: Record, name: str) -> frozenset[int]:
    """Return the ids that the model's own files have under a name."""
    found: set[int] = set()
    folder = Path(record.header.model["path"] or "")
    for file in ("config.json", "generation_config.json") if record.header.model["path"] else ():
        try:
            document = json.loads(read_received(folder / file))
        except (OSError, ValueError):
            continue
        found |= set(ids_named(document, name))
    return frozenset(found)


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
    ids, counts = np.unique(last[judged], return_counts=True)
    total = np.array([(rows.ids == one).sum() for one in ids.tolist()])
    own = ids[(counts >= FEWEST) & (counts >= OWN_END * total)]  # end nearly always; no file need name them
    is_end = np.isin(last, [*known, *own])
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


def surprises(rows: Rows) -> np.ndarray:
    """Return the nats of each row's tokens, [n]."""
    nats = -np.nan_to_num(rows.logprobs.astype(np.float64))
    return np.bincount(rows.row_of_token, nats, len(rows))


def are_copies(rows: Rows) -> Finding | None:
    """S13: samples of a prompt and step are equal beyond chance, or ranks have equal rows of data."""
    flagged, surprise = np.zeros(len(rows), bool), surprises(rows)
    among = (rows.lengths > 0) & (rows.content != 0) & (rows.is_data | (surprise > COPIED_NATS))
    seen: dict[tuple[int, int, bytes], list[int]] = {}
    for row in np.flatnonzero(among).tolist():
        key = int(rows.step[row]), int(rows.content[row]), rows.tokens(row).tobytes()
        seen.setdefault(key, []).append(row)
    for members in seen.values():
        flagged[members] = len(members) > 1
    if not enough(flagged, among):
        return None
    count = f"{int(flagged.sum())} of {int(among.sum())}"
    if not (flagged & rows.is_data).any():
        found = (
            f"{count} completions are copies of another one of their prompt and step, of "
            f"{surprise[flagged].min():.0f} nats or more: equal seeds, or one answer counted twice"
        )
        return finding("S13", found, rows, flagged, among, title="sampled")
    ranks = [len(set(rows.rank[of])) for of in seen.values() if len(of) > 1]
    is_of_ranks = float(np.mean(ranks)) > 1.5
    found = f"{count} rows are the same as another one of their step" + ", on another rank" * is_of_ranks
    if not has_support(rows, flagged) or share(flagged, among) <= NEARLY_HALF:
        return None
    return finding("S13", found, rows, flagged, among, title="ranks" if is_of_ranks else "data")


def mask_leaves_out(rows: Rows) -> Finding | None:
    """S14: nearly every completion lacks its end, its first or all but its end token in the loss mask, or all it sampled."""
    ends = [*end_tokens(rows.record)]
    unended, is_last = np.isin(rows.unended, ends), np.isin(rows.last, ends)
    answered = (rows.prompt_length > 0) & (rows.lengths > 0)
    alone, late = is_last & (rows.lengths == 1), answered & (rows.first - rows.prompt_length >= ANSWER)
    is_sure = rows.logprobs == 0
    appended = is_last & is_sure[rows.bounds[1:] - 1] & (is_sure[~rows.ends].sum() <= FEW_SURE * len(is_sure))
    for title, flagged, among, found in (
        ("unsampled", rows.unsampled, rows.lengths > 0, "log-probs of the engine are outside of the loss mask alone in {}"),
        ("appended", appended, is_last, "the end token of {} has the log-prob 0, as of a token that was not sampled"),
        ("end", unended, unended | is_last, "the last token of {} is not in the loss mask, and its neighbour is"),
        ("first", answered & (rows.skipped >= 0), answered, "the first token of {} is not in the loss mask, and its neighbour is"),
        ("only", late & alone, answered & (late | ~alone), "of {} only the end is in the loss mask"),
    ):  # fmt: skip
        if has_support(rows, flagged) and share(flagged, among) > NEARLY_ALL:
            alike = np.unique(rows.skipped[flagged], return_counts=True)[1].max()
            if title != "first" or alike <= MOST_ALIKE * flagged.sum():  # else of a template
                counts = f"{int(flagged.sum())} of {int(among.sum())} completions"
                return finding("S14", found.format(counts), rows, flagged, among, title=title)
    return None


def begins_twice(rows: Rows) -> Finding | None:
    """S15: nearly every row begins with two begin tokens."""
    flagged = np.isin(rows.doubled, [*tokens_named(rows.record, "bos_token_id")])
    if not has_support(rows, flagged) or flagged.mean() < NEARLY_ALL:
        return None
    found = f"{int(flagged.sum())} of {len(rows)} rows begin with token {rows.doubled[flagged][0]} twice"
    return finding("S15", found, rows, flagged, rows.lengths > 0)
