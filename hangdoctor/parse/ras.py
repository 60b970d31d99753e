"""NCCL RAS reports: the ranks of a communicator that launched fewer operations or do not respond.

Text is the output of `ncclras -v` (NCCL 2.24 and later), JSON that of `ncclras -f json` (2.28.7 and
later). Text names ranks one by one only where they are outliers, so a communicator's healthy
majority may have no entry here.
"""

import re
from typing import Any

from hangdoctor.errors import UnreadableDump
from hangdoctor.model import RasRank

COMMUNICATOR = re.compile(r"^#(?P<id>\d+-\d+) \((?P<hash>[0-9a-f]+)\) (?P<kind>[A-Z_, ]+)", re.M)
COUNT = re.compile(
    r"(?P<number>\d+) ranks? ha(?:s|ve) launched up to operation (?P<count>\d+)(?P<rest>[^\n]*(?:\n\s+Rank \d+[^\n]*)*)"
)
RANK = re.compile(r"Rank (?P<rank>\d+) -- ")
LAUNCHED = re.compile(
    r"Rank (?P<rank>\d+) -- [^\n]*?(?:launched up to operation|operation count) (?P<count>\d+)"
)
MISSING = re.compile(r"The missing ranks?:(?P<ranks>(?:\s*\n\s+Rank \d+[^\n]*)+)")


def is_ras_text(text: str) -> bool:
    """True if a text is a report of `ncclras -v`."""
    head = text[:100_000]
    return "Job summary" in head and "Communicators" in head and "NCCL" in head


def parse_ras_text(text: str) -> tuple[RasRank, ...]:
    """Return the ranks that the errors and warnings of a RAS report name."""
    found: list[RasRank] = []
    marks = list(COMMUNICATOR.finditer(text))
    for mark, end in zip(marks, [*(m.start() for m in marks[1:]), len(text)], strict=False):
        block, name = text[mark.end() : end], mark["hash"]
        found += [ras_rank(name, m["rank"], m["count"], "RUNNING") for m in LAUNCHED.finditer(block)]
        for count in COUNT.finditer(block):
            found += [
                ras_rank(name, m["rank"], count["count"], "RUNNING") for m in RANK.finditer(count["rest"])
            ]
        for missing in MISSING.finditer(block):
            found += [ras_rank(name, m["rank"], None, "MISSING") for m in RANK.finditer(missing["ranks"])]
    return tuple(dict.fromkeys(found))


def ras_rank(communicator: str, rank: str, count: str | None, status: str) -> RasRank:
    return RasRank(communicator, int(rank[:9]), int(count[:18]) if count else None, status)


def is_ras(document: Any) -> bool:
    return isinstance(document, dict) and "communicators" in document and "entries" not in document


def ras_from(document: Any) -> tuple[RasRank, ...]:
    """Return every rank of every communicator in a RAS JSON report. Raises `UnreadableDump`."""
    communicators = document["communicators"]
    if isinstance(communicators, dict):  # newer reports put a summary next to the list
        communicators = communicators.get("comms") or communicators.get("list") or []
    try:
        return tuple(rank for entry in communicators for rank in ranks_of(entry))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnreadableDump(f"RAS report without {error}") from error


def ranks_of(entry: dict[str, Any]) -> list[RasRank]:
    """Return the ranks of one communicator of a RAS JSON report."""
    name = str(entry.get("hash") or entry.get("comm_hash") or entry.get("id") or "?")
    found = [RasRank(name, int(rank["rank"]), None, "MISSING") for rank in entry.get("missing_ranks", ())]
    for rank in entry.get("ranks", ()):
        counts = rank.get("collective_operation_counts") or rank.get("coll_op_counts") or {}
        by_kind = tuple(sorted((str(kind), int(number)) for kind, number in counts.items()))
        total = sum(number for _, number in by_kind) if by_kind else rank.get("operation_count")
        status = rank.get("status")
        state = "RUNNING" if not isinstance(status, str) else status
        found.append(RasRank(name, int(rank["rank"]), None if total is None else int(total), state, by_kind))
    return found
