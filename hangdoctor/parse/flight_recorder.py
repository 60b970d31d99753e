"""Flight Recorder dumps: the operations a rank enqueued on each group, in order, with their states.

Both forms that torch writes, pickle and JSON, have the same keys. gloo leaves every state at
`scheduled` and only sets `retired`, so a retired entry counts as completed.
"""

import json
import re
from functools import lru_cache
from typing import Any

from areal_core.safety.unpickle import UnsafePickle
from hangdoctor.errors import UnreadableDump
from hangdoctor.model import CollectiveRecord, RasRank
from hangdoctor.parse.plain_pickle import load_plain


def is_flight_recorder(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("entries"), list) and "version" in document


def parse_flight_recorder(data: bytes, rank: int) -> tuple[CollectiveRecord, ...]:
    """Return the records of one rank's dump, oldest first. Raises `UnreadableDump`."""
    if data[:1] in (b"{", b"["):
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UnreadableDump(f"not JSON: {error}") from error
    else:
        try:
            document = load_plain(data)
        except UnsafePickle as error:
            raise UnreadableDump(f"not the plain pickle of a Flight Recorder dump: {error}") from error
    return records_from(document, rank)


def records_from(document: Any, rank: int) -> tuple[CollectiveRecord, ...]:
    """Return the records of a decoded dump. Raises `UnreadableDump` with the missing key."""
    if not is_flight_recorder(document):
        raise UnreadableDump("a Flight Recorder dump is an object with 'version' and 'entries'")
    try:
        return tuple(record_from(entry, rank) for entry in document["entries"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise UnreadableDump(f"Flight Recorder entry without {error}") from error


@lru_cache(maxsize=4096)
def shared(value: tuple[Any, ...]) -> Any:
    """Return the same object for equal values: most of all ranks' records are equal."""
    return value


def record_from(entry: dict[str, Any], rank: int) -> CollectiveRecord:
    """Return one entry of a dump as a record. Raises `KeyError` and others for an entry of the
    wrong shape.
    """
    group = entry.get("process_group") or (str(entry.get("pg_id", "")), "")
    name, is_p2p = str(entry["profiling_name"]), bool(entry.get("is_p2p", False))
    operation = name.split(":", 1)[-1].split(" ")[0]
    return CollectiveRecord(
        rank=rank,
        group=f"{group[0]}:{group[1]}" if group[1] and group[1] != "undefined" else str(group[0]),
        operation=operation,
        sequence=int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id", entry.get("seq_id", 0))),
        is_p2p=is_p2p,
        state="completed" if entry.get("retired") else str(entry["state"]),
        input_sizes=sizes(entry.get("input_sizes", ())),
        input_dtypes=shared(tuple(map(str, entry.get("input_dtypes", ())))),
        created_ns=int(entry["time_created_ns"]) if entry.get("time_created_ns") else None,
    )


def sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return tensor sizes as tuples of integers."""
    return shared(tuple(tuple(map(int, size)) for size in value))


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
            ranks = [m["rank"] for m in RANK.finditer(count["rest"])]
            found += [ras_rank(name, rank, count["count"], "RUNNING") for rank in ranks or [None]]
        for missing in MISSING.finditer(block):
            found += [ras_rank(name, m["rank"], None, "MISSING") for m in RANK.finditer(missing["ranks"])]
    return tuple(dict.fromkeys(found))


def ras_rank(communicator: str, rank: str | None, count: str | None, status: str) -> RasRank:
    return RasRank(communicator, int(rank[:9]) if rank else None, int(count[:18]) if count else None, status)


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
        total = sum(map(int, counts.values())) if counts else rank.get("operation_count")
        status = rank.get("status")
        state = "RUNNING" if not isinstance(status, str) else status
        found.append(RasRank(name, int(rank["rank"]), None if total is None else int(total), state))
    return found
