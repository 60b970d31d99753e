"""The files of all ranks as one Chrome trace: a process a rank, on one clock that starts with the first rank.

Lines are shifted and copied one by one, so that a merge needs no memory however long the run was. A rank that was killed
leaves a file that ends anywhere: its last line may be cut, everything before it is kept.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.telemetry.trace import FOOTER, HEADER, TRAINER_LANE, rank_file

MERGED = "trace.json"


@dataclass(frozen=True)
class RankHeader:
    """Where and when a rank began, and the options that it wrote down."""

    rank: int
    world_size: int
    host: str
    pid: int
    start_ns: int
    options: dict[str, Any]


class BrokenTrace(ValueError):
    """A file that is no trace of ours, or is damaged before its last line."""


def parse_rank_header(args: dict[str, Any], file: Path) -> RankHeader:
    """The `args` of a header line."""
    names = ("rank", "world_size", "host", "pid", "start_ns")
    if missing := [name for name in names if name not in args]:
        raise BrokenTrace(f"{file}: its header lacks {missing}: it was not written by this version")
    options = {name: value for name, value in args.items() if name not in names}
    return RankHeader(*(args[name] for name in names), options)


def rank_events(file: Path) -> Iterator[tuple[RankHeader, dict[str, Any]]]:
    """The events of a rank's file, each with the header that it stands under, header events included.

    Raises:
        BrokenTrace: a line other than the last is no event, or the first is no header.
    """
    header = None
    broken = None
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if broken is not None:
                raise BrokenTrace(f"{file}, line {broken}: not an event; the file is damaged")
            try:
                event = json.loads(line)
            except ValueError:
                broken = number  # fine if it is the last: the rank was killed while it wrote
                continue
            if event["name"] == HEADER:
                header = parse_rank_header(event["args"], file)
            if header is None:
                raise BrokenTrace(f"{file}: does not begin with a header; give the trace folder of a run")
            yield header, event


def merge(folder: Path) -> Path:
    """Writes `trace.json` into the folder from the files of its ranks.

    Raises:
        BrokenTrace: there are no such files, or one is damaged.
    """
    first = rank_file(folder, 0)
    if not first.exists():
        raise BrokenTrace(f"{folder} holds no {first.name}: give the trace folder of a run")
    world_size = next(rank_events(first))[0].world_size
    files = [file for rank in range(world_size) if (file := rank_file(folder, rank)).exists()]
    start_ns = min(next(rank_events(file))[0].start_ns for file in files)
    unfinished = folder / f"{MERGED}.{os.getpid()}.tmp"
    with unfinished.open("w", encoding="utf-8") as out:
        ranks = [header.__dict__ for file in files for header in [next(rank_events(file))[0]]]
        about = {"start_ns": start_ns, "world_size": world_size, "ranks": ranks}
        out.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n')
        separator = ""
        for file in files:
            for event in placed_events(file, start_ns):
                out.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        out.write("\n]}\n")
    return unfinished.replace(folder / MERGED)


def placed_events(file: Path, start_ns: int) -> Iterator[dict[str, Any]]:
    """A rank's events as they stand in the merged file: on its process, on the common clock, with its tracks named."""
    lanes: set[int] = set()
    header = None
    for header, event in rank_events(file):
        if event["name"] in (HEADER, FOOTER):
            continue
        lanes.add(event["tid"])
        yield event | {"pid": header.rank, "ts": event["ts"] + (header.start_ns - start_ns) / 1000}
    if header is not None:
        name = f"rank {header.rank} ({header.host}, pid {header.pid})"
        yield metadata(header.rank, TRAINER_LANE, "process_name", name=name)
        yield metadata(header.rank, TRAINER_LANE, "process_sort_index", sort_index=header.rank)
    for lane in sorted(lanes):
        name = "trainer" if lane == TRAINER_LANE else f"episodes {lane}"
        yield metadata(header.rank, lane, "thread_name", name=name)
        yield metadata(header.rank, lane, "thread_sort_index", sort_index=lane)


def metadata(rank: int, lane: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": lane, "name": kind, "args": args}


def merge_if_all_ended(folder: Path, world_size: int) -> None:
    """Merges when every rank has ended its file. So the last one does it; two that end at once write the same bytes."""
    if all(has_ended(rank_file(folder, rank)) for rank in range(world_size)):
        merge(folder)


def has_ended(file: Path) -> bool:
    """Whether the rank closed its trace."""
    if not file.exists():
        return False
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - 200))
        return f'"name":"{FOOTER}"'.encode() in content.read()
