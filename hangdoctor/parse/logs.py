"""Log files: the lines of a tail that matter for a hang, and the exceptions in it.

Watchdog and scheduler messages are matched by their fixed words; everything else of a log is
ignored.
"""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import islice

from hangdoctor.errors import UnreadableDump
from hangdoctor.model import CollectiveRecord, ErrorFile, LogTail
from hangdoctor.parse.location import object_from
from hangdoctor.tables import message

MAX_LINES = 400
ZEROS = str.maketrans("123456789", "0" * 9)
RELEVANT = message("logs", "relevant")
WATCHDOG = message("logs", "watchdog")
# Follows a time-out: how far this rank has come in the group.
PROGRESS = message("logs", "progress")
FINGERPRINT = message("job_log", "fingerprint")
RUNNING = "log of collectives"
LOGGED = ("watchdog", RUNNING)  # what ranks wrote themselves: a line may be missing, and the group of it
TIME_OUTS = ("Watchdog caught collective operation timeout", "detected by watchdog at work", "blocking wait.")
# A pager or a mail breaks the watchdog's line before these words.
WRAPPED = re.compile(r"Work\w*CCL\(|by watchdog at work:|last (?:enqueued|completed) (?:\w*CCL )?work:")


def parse_log(name: str, rank: int | None, text: str) -> LogTail:
    """Return the lines of a log that matter, and its last five."""
    if has_timeouts(text):
        text = unwrapped(text)
    lines = [line[:1000] for line in text.split("\n") if line.strip()]
    both = zip(reversed(lines[:-5]), reversed(shapes_of(lines[:-5])), strict=True)
    relevant = [*islice((line for line, shape in both if matters(shape)), MAX_LINES)][::-1]
    return LogTail(name, rank, tuple(relevant + lines[-5:]))


def unwrapped(text: str) -> str:
    """Return a text whose lines do not break within a message of the watchdog."""
    parts, end = list[str](), 0
    for match in WRAPPED.finditer(text):
        before, end = text[end : match.start()], match.start()
        bare = before.rstrip()
        parts.append(f"{bare} " if "\n" in before[len(bare) :] else before)
    return "".join([*parts, text[end:]])


def shapes_of(lines: list[str]) -> list[str]:
    """Return lines with zeros for digits: in these most lines of a log differ."""
    return "\n".join(lines).translate(ZEROS).split("\n") if lines else []


@lru_cache(maxsize=4096)
def matters(shape: str) -> bool:
    return RELEVANT.search(shape) is not None


def has_timeouts(text: str) -> bool:
    return any(words in text for words in TIME_OUTS)


def watchdog_timeouts(log: LogTail) -> list[tuple[int, int, str]]:
    """Return (rank, number, operation) of each time-out; torch before 1.13 wrote no number, here 0."""
    matches = (WATCHDOG.search(line) for line in log.lines)
    return [(written_by(m, log), number_of(m), m["op"].lower()) for m in matches if m]


def only_absent(ranks: Collection[int]) -> tuple[int, ...]:
    """Return the one rank below the highest that is not among `ranks`; empty where it is not one."""
    others = tuple(set(range(max(ranks, default=0))) - set(ranks))
    return others if len(others) == 1 else ()


def number_of(match: re.Match[str]) -> int:
    return int((match["seq"] or "0")[:18])


def first_match(logs: Iterable[LogTail], words: re.Pattern[str]) -> tuple[LogTail, re.Match[str]] | None:
    """Return the first log with a line of these words, and the match in it."""
    found = ((log, words.search(line)) for log in logs for line in log.lines)
    return next(((log, match) for log, match in found if match), None)


def written_by(match: re.Match[str], log: LogTail) -> int:
    """Return the global rank that wrote a message: its own number counts within the group."""
    known = match["global"] or match["rank"]
    return log.rank if log.rank is not None else int(known[:7])


def watchdog_records(logs: Iterable[LogTail]) -> tuple[CollectiveRecord, ...]:
    """Return the first time-out of each rank and group as records, where they can be compared.

    Ranks that timed out on different numbers are compared only where those behind are known to
    have enqueued less: a watchdog reports the first operation that is late, not the last one.
    """
    groups: dict[tuple[int, int], tuple[str, int]] = {}
    timeouts: dict[tuple[int, int], re.Match[str]] = {}
    for log in logs:
        for line in log.lines:
            if match := PROGRESS.search(line):
                name = match["name"] or match["guid"] or "default"
                at = (written_by(match, log), int(match["seq"][:18]))
                groups.setdefault(at, (name, int(match["enqueued"][:18])))
            elif match := WATCHDOG.search(line):
                timeouts.setdefault((written_by(match, log), number_of(match)), match)
    found: dict[str, dict[int, CollectiveRecord]] = {}
    enqueued: dict[tuple[str, int], int] = {}
    known = {name for name, _ in groups.values()}
    usual = known.pop() if len(known) == 1 else "default"  # of ranks that did not write their group
    for (rank, sequence), match in timeouts.items():
        group, count = groups.get((rank, sequence), (usual, -1))
        if rank not in found.setdefault(group, {}):
            found[group][rank] = timeout_record(match, rank, group)
            enqueued[(group, rank)] = count
    comparable: list[CollectiveRecord] = []
    for group, ranks in found.items():
        top = max(record.sequence for record in ranks.values())
        if not top and len({record.operation for record in ranks.values()}) == 1:
            continue  # one operation, and which call of it nobody says
        late = [rank for rank, record in ranks.items() if record.sequence < top]
        if all(0 <= enqueued[(group, rank)] < top for rank in late):
            comparable += ranks.values()
    return tuple(comparable)


def running_records(logs: Iterable[LogTail]) -> tuple[CollectiveRecord, ...]:
    """Return the collectives that ranks logged before they ran them; the group is not known."""
    matches = [match for log in logs for line in log.lines if (match := FINGERPRINT.search(line))]
    found = {(int(m["logged"]), int(m["seq"] or 0)): m for m in matches if m["logged"]}
    return tuple(fingerprint_record(m, *of, RUNNING) for of, m in found.items())


def fingerprint_record(match: re.Match[str], rank: int, number: int, source: str) -> CollectiveRecord:
    shape, dtype = match["shape"], match["dtype"]
    return CollectiveRecord(
        rank,
        "unnamed" if source == RUNNING else "default",
        match["op"].lower(),
        number,
        False,
        "started",
        (tuple(int(n) for n in re.findall(r"\d+", shape)),) if shape is not None else (),
        input_dtypes=(dtype,) if dtype else (),
        source=source,
    )


def completed_by_others(logs: Iterable[LogTail]) -> tuple[int, int, tuple[int, ...]] | None:
    """Return (rank, number, others) where a rank waits in a collective that other ranks of the
    group have completed, or None: then their collectives of one number were different ones.

    Only the default group, and groups with a number of their own, are known to be the same.
    """
    waits: dict[str, dict[int, int]] = {}
    done: dict[str, dict[int, int]] = {}
    for log in logs:
        for match in filter(None, map(PROGRESS.search, log.lines)):
            group = match["guid"] or match["name"] or ""
            if match["completed"] and (match["guid"] or "default" in group):
                rank = written_by(match, log)
                waits.setdefault(group, {}).setdefault(rank, int(match["seq"][:18]))
                done.setdefault(group, {})[rank] = int(match["completed"])
    for group, ranks in waits.items():
        for rank, number in sorted(ranks.items()):
            others = tuple(sorted(r for r, last in done[group].items() if last >= number > done[group][rank]))
            if others:
                return rank, number, others
    return None


def timeout_record(match: re.Match[str], rank: int, group: str) -> CollectiveRecord:
    operation = match["op"].lower()
    sizes = ((int(match["numel_in"][:18]),),) if match["numel_in"] else ()
    is_p2p = operation in ("send", "recv")
    return CollectiveRecord(
        rank,
        group,
        operation,
        number_of(match),
        is_p2p,
        "started",
        sizes,
        source="watchdog",
    )


def parse_error_file(data: bytes, rank: int | None) -> ErrorFile:
    """Parse a torchelastic error file, `{"message": {"message": .., "extraInfo": {..}}}`.

    Raises `UnreadableDump`.
    """
    document = object_from(data, "a torchelastic error file")
    if "message" not in document:
        raise UnreadableDump("a torchelastic error file is an object with 'message'")
    message = document["message"]
    if not isinstance(message, dict):
        return ErrorFile(rank, str(message)[:2000], None)
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stamp = str(extra.get("timestamp", ""))
    return ErrorFile(
        rank,
        str(message.get("message", ""))[:2000],
        float(stamp) if re.fullmatch(r"\d{1,12}(\.\d+)?", stamp) else None,
        str(extra.get("py_callstack", ""))[-4000:],
    )
