"""Merge of the files of all ranks into one Chrome trace: a process per rank, on a common clock.

The clock starts with the first rank. Lines are shifted and copied one by one, so a merge needs
constant memory. A rank that was killed leaves a file whose last line may be incomplete; everything
before it is kept.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from areal_core.safety.durable import replacing
from areal_core.safety.received import lines_received
from areal_core.telemetry.trace import FOOTER, HEADER, TRAINER_TRACK, rank_file

MERGED = "trace.json"


class RankHeader(msgspec.Struct, frozen=True):
    """The place and time of a rank's start; further fields of its line are options of the run."""

    rank: int
    world_size: int
    host: str
    pid: int
    start_ns: int


class Placed(msgspec.Struct, frozen=True):
    """What an event must have to be placed in the merged file."""

    name: str
    tid: int = 0
    ts: float = 0.0


class BrokenTrace(ValueError):
    """A file that is not a trace of ours, or is damaged before its last line."""


def rank_events(file: Path) -> Iterator[tuple[RankHeader, dict[str, Any]]]:
    """Yield the events of a rank's file, each with the header above it; headers are events, too.

    Raises:
        BrokenTrace: a line other than the last is not an event, or the first is not a header.
    """
    header = None
    broken = None
    for number, line in enumerate(lines_received(file), 1):
        if broken is not None:
            raise BrokenTrace(f"{file}, line {broken}: not an event; the file is damaged")
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            broken = number  # fine if it is the last: the rank was killed while it wrote
            continue
        try:
            if msgspec.convert(event, Placed).name == HEADER:
                header = msgspec.convert(event["args"], RankHeader)
        except (msgspec.ValidationError, KeyError) as error:
            raise BrokenTrace(
                f"{file}, line {number}: {error}; the file is damaged, or of another version"
            ) from None
        if header is None:
            raise BrokenTrace(f"{file}: does not start with a header; give the trace folder of a run")
        yield header, event


def merge(folder: Path) -> Path:
    """Write `trace.json` into the folder from the files of its ranks, and return its path.

    Raises:
        BrokenTrace: there are no such files, or one is damaged.
    """
    first = rank_file(folder, 0)
    if not first.exists():
        raise BrokenTrace(f"{folder} holds no {first.name}: give the trace folder of a run")
    world_size = first_header(first)[0].world_size
    # of the files that exist: a damaged header may state any number of ranks
    known = {file: file.stem.removeprefix("rank-") for file in sorted(folder.glob("rank-*.jsonl"))}
    files = [file for file, rank in known.items() if rank.isdecimal() and int(rank) < world_size]
    headers = [first_header(file) for file in files]
    start_ns = min(header.start_ns for header, _ in headers)
    with replacing(folder / MERGED) as out:
        about = {
            "start_ns": start_ns,
            "world_size": world_size,
            "ranks": [about_rank(*one) for one in headers],
        }
        out.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'.encode())
        separator = ""
        for file in files:
            for event in placed_events(file, start_ns):
                out.write((separator + json.dumps(event, separators=(",", ":"))).encode())
                separator = ",\n"
        out.write(b"\n]}\n")
    return folder / MERGED


def about_rank(header: RankHeader, args: dict[str, Any]) -> dict[str, Any]:
    facts = msgspec.to_builtins(header)
    return facts | {"options": {name: value for name, value in args.items() if name not in facts}}


def first_header(file: Path) -> tuple[RankHeader, dict[str, Any]]:
    """Return a rank's header, and all that its line has."""
    found = next(rank_events(file), None)
    if found is None:
        raise BrokenTrace(f"{file} is empty or cut off; give the trace folder of a run")
    header, event = found
    return header, event["args"]


def placed_events(file: Path, start_ns: int) -> Iterator[dict[str, Any]]:
    """Yield a rank's events for the merged file: one process, common clock, named tracks."""
    tracks: set[int] = set()
    header: RankHeader | None = None
    for of_event, event in rank_events(file):
        header = of_event
        if event["name"] in (HEADER, FOOTER):
            continue
        tracks.add(event["tid"])
        yield event | {"pid": header.rank, "ts": event["ts"] + (header.start_ns - start_ns) / 1000}
    if header is None:
        return
    name = f"rank {header.rank} ({header.host}, pid {header.pid})"
    yield metadata(header.rank, TRAINER_TRACK, "process_name", name=name)
    yield metadata(header.rank, TRAINER_TRACK, "process_sort_index", sort_index=header.rank)
    for track in sorted(tracks):
        name = "trainer" if track == TRAINER_TRACK else f"episodes {track}"
        yield metadata(header.rank, track, "thread_name", name=name)
        yield metadata(header.rank, track, "thread_sort_index", sort_index=track)


def metadata(rank: int, track: int, kind: str, **args: Any) -> dict[str, Any]:
    """Return a metadata event, which names or orders a process or track."""
    return {"ph": "M", "pid": rank, "tid": track, "name": kind, "args": args}


def merge_if_all_ended(folder: Path, world_size: int) -> None:
    """Merge if every rank has ended its file; concurrent merges write the same bytes."""
    if all(has_ended(rank_file(folder, rank)) for rank in range(world_size)):
        merge(folder)


def has_ended(file: Path) -> bool:
    if not file.exists():
        return False
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - 200))
        return f'"name":"{FOOTER}"'.encode() in content.read()
