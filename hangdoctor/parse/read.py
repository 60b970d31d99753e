"""Read folders, tars and files member by member and join them by process name into a snapshot.

    members_of(path) -> place_of(member) -> a reader per kind -> Reading -> Snapshot

A member that cannot be read becomes a note, never a failure: the rest of a collection must remain
usable. A py-spy that failed is classified by its message: its exit status is 1 for every cause.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from hangdoctor.errors import HangInputError, UnreadableDump
from hangdoctor.frames import without_garbage_collection
from hangdoctor.model import Snapshot, Status, Thread
from hangdoctor.parse import location
from hangdoctor.parse.assemble import Reading, finish
from hangdoctor.parse.flight_recorder import (
    is_flight_recorder,
    is_ras,
    is_ras_text,
    parse_flight_recorder,
    parse_ras_text,
    ras_from,
    records_from,
)
from hangdoctor.parse.job_log import TORCHRUN_FILE, Text, has_ended, headed_errors, logged_steps
from hangdoctor.parse.location import ProcessName, parse_name
from hangdoctor.parse.logs import RELEVANT, has_timeouts, parse_error_file, parse_log
from hangdoctor.parse.members import members_of
from hangdoctor.parse.owners import owners_of
from hangdoctor.parse.rows import with_rows
from hangdoctor.parse.stacks_json import HEAD, JSON_ARRAY, parse_stacks_json
from hangdoctor.parse.stacks_text import parse_stacks_text
from hangdoctor.tables import MESSAGES, message

# Messages of py-spy 0.4.2 and 0.4.3; `Failed to suspend` follows a process header without threads.
STATUS_PATTERNS: dict[Status, str] = MESSAGES["read"]["statuses"]
# What ranks write, and never py-spy.
OF_RANKS = message("read", "of_ranks")
MAX_REFUSAL_BYTES = 20_000
# A text of a few bytes may claim that its stack belongs to any number of ranks.
MAX_PROCESSES = 1_000_000
MAX_NOTES = 1000


def refusal_in(text: str) -> tuple[Status, str] | None:
    """Return (status, first line) of an error message of py-spy, or None where a text is none."""
    if (
        len(text) > MAX_REFUSAL_BYTES
        or OF_RANKS.search(text)
        or not re.search(r"\b(?:Error|Permission Denied|Failed|timed? ?out)\b", text, re.IGNORECASE)
    ):
        return None
    line = next((line.strip() for line in text.split("\n") if line.strip()), "")
    status = next((name for name, words in STATUS_PATTERNS.items() if re.search(words, text, re.I)), None)
    return (status, line[:300]) if status else None


@without_garbage_collection()
def read_snapshot(paths: Iterable[Path], world_size: int | None = None) -> Snapshot:
    """Return the job that the files under `paths` show.

    Args:
        paths: folders, archives or files: stacks, logs, Flight Recorder dumps, collections.
        world_size: expected number of trainer ranks; by default as the files say.

    Raises:
        HangInputError: nothing of a job is found.
    """
    reading = Reading(world_size)
    paths = list(paths)
    for path in paths:
        for member, data in members_of(path, reading.notes):
            take(reading, member, data)
    snapshot = finish(reading, world_size)
    kinds = (snapshot.dumps, snapshot.records, snapshot.ras, snapshot.expected, snapshot.endings)
    if not (
        any(kinds)
        or snapshot.stopped
        or len(set(snapshot.steps.values())) > 1
        or any(RELEVANT.search(line) for log in snapshot.logs for line in log.lines)
    ):
        searched = ", ".join(map(str, paths)) or "nothing"
        notes = "; ".join(snapshot.notes[:3])
        raise HangInputError(
            f"No stacks of any rank in {searched}{f' ({notes})' if notes else ''}. Looked for py-spy text and JSON, "
            "faulthandler, pystack, gdb, Flight Recorder and RAS dumps, frames such as `f (file.py:3)`. Collect some with: "
            "areal-debug hang collect --to FOLDER"
        )
    return snapshot


def take(reading: Reading, member: str, data: bytes) -> None:
    """Read one file into `reading`; a file that cannot be read becomes a note."""
    place = location.place_of(member)
    if not data:
        reading.notes.append(f"{member[:200]}: empty")
        return
    try:
        if place.file == "collection.json":
            reading.contents = location.contents_from(data)
        else:
            READERS[place.kind](reading, place, member, data)
    except UnreadableDump as problem:
        # A folder may only happen to be called `logs` or `env`.
        if place.kind != "loose" and reading.contents is None:
            take(reading, place.file, data)
        elif len(reading.notes) < MAX_NOTES:
            reading.notes.append(f"{member[:200]}: {problem}")


def owner_of(reading: Reading, place: location.Place, member: str) -> ProcessName:
    """Return the process of a file by its own name or, where it is loose, by that of its folder:
    `rank_3/stacks.txt`.
    """
    process = parse_name(place.file)
    if of_torchrun := TORCHRUN_FILE.search(member):
        return parse_name(f"rank_{of_torchrun['rank']}")
    if process.rank is None and process.parent is None and place.kind == "loose":
        folders = [
            parse_name(folder) for folder in reversed(member.split("/")[:-1]) if "rank" in folder.lower()
        ]
        return next((folder for folder in folders if folder.rank is not None), process)
    return process


def take_facts(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    reading.facts[(parse_name(place.file).name, place.sample or 0)] = location.facts_from(data)


def take_environment(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    environment = location.object_from(data, "an env file")
    reading.world_sizes.add(str(environment.get("WORLD_SIZE", "")))


def take_source(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    document = location.object_from(data, "a source file")
    reading.source |= {str(at): str(line)[:200] for at, line in document.items()}


def take_gpus(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    reading.gpus += location.gpus_from(data, place.file.removesuffix(".json"), place.sample or 0)


def take_log(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    text, process = data.decode(errors="replace"), parse_name(place.file)
    if reading.contents is None and (has_ended(text) or parse_stacks_text(text)):
        raise UnreadableDump("a log with stacks in it")
    add_log(reading, process, text)


def add_log(reading: Reading, process: ProcessName, text: str) -> None:
    reading.logs.append(parse_log(process.name, process.rank, text))
    if process.role == "trainer":
        reading.steps |= logged_steps(text, process.rank)


def take_error(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    reading.errors.append(parse_error_file(data, parse_name(place.file).rank))


def take_records(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    rank = parse_name(place.file).rank
    if rank is None:
        raise UnreadableDump("the name of a Flight Recorder dump must end in its rank")
    reading.records += parse_flight_recorder(data, rank)


def take_ras(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    if data.lstrip()[:1] == b"{":
        take_object(reading, place, member, data)
    else:
        reading.ras += parse_ras_text(data.decode(errors="replace"))


def take_dump(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    if data[:1] == b"\x80":
        take_records(reading, place, member, data)
        return
    head = data[:HEAD].decode(errors="replace")
    if JSON_ARRAY.match(head.lstrip()):
        pid, threads = parse_stacks_json(data)
        keep(reading, owner_of(reading, place, member), place, threads, pid)
        return
    text = data.decode(errors="replace")
    text = with_rows(text) if reading.contents is None else text
    if text.lstrip().startswith("{"):
        take_object(reading, place, member, data)
    elif is_ras_text(text):
        reading.ras += parse_ras_text(text)
    elif reading.contents is not None:
        take_text(reading, place, member, text)
    else:
        of_ranks, others = headed_errors(text)
        for rank, lines in of_ranks:
            take_ended(reading, parse_name(f"rank_{rank}"), member, lines)
        if has_ended(others) or TORCHRUN_FILE.search(member):
            take_ended(reading, owner_of(reading, place, member), member, others)
        elif others.strip() or not of_ranks:
            take_text(reading, place, member, others)


def take_ended(reading: Reading, process: ProcessName, member: str, text: str) -> None:
    """Keep what a job that ended, or one of its ranks, wrote: it is read with its other logs."""
    place_in_job = TORCHRUN_FILE.search(member)
    attempt = int(place_in_job["attempt"]) if place_in_job else 0
    reading.texts.append(Text(member, process.rank, attempt, text))
    add_log(reading, process, text)


def take_object(reading: Reading, place: location.Place, member: str, data: bytes) -> None:
    """Read a JSON object: Flight Recorder, RAS or error file."""
    document = location.object_from(data, member[:200])
    rank = owner_of(reading, place, member).rank
    if is_flight_recorder(document):
        if rank is None:
            raise UnreadableDump("the name of a Flight Recorder dump must end in its rank")
        reading.records += records_from(document, rank)
    elif is_ras(document):
        reading.ras += ras_from(document)
    elif "message" in document:
        error = parse_error_file(data, rank)
        reading.errors.append(error)
        if rank is not None and error.traceback:
            take_ended(reading, owner_of(reading, place, member), member, error.traceback)
    else:
        raise UnreadableDump("JSON, but neither stacks, Flight Recorder, RAS nor an error file")


def take_text(reading: Reading, place: location.Place, member: str, text: str) -> None:
    """Read a text: stacks, the message of a py-spy that failed, a log, or all of them."""
    process = owner_of(reading, place, member)
    sections = parse_stacks_text(text)
    refused = refusal_in(text) if not sections else None
    if place.file.endswith(".log") and not text.lstrip().startswith(("Error", "Permission Denied")):
        refused = None  # a log mentions failures and time-outs that are not py-spy's
    if refused is not None:
        reading.processes.setdefault(process.name, process)
        reading.refusals.setdefault(process.name, refused)
        return
    if not sections or place.file.endswith(".log") or has_timeouts(text):
        add_log(reading, process, text)
    pairs, notes = owners_of(sections, process, reading.world_size)
    reading.notes += notes
    for owner, section in pairs:
        if section.threads:
            keep(reading, owner, place, tuple(section.threads), section.pid)
        elif refused := refusal_in(section.message):
            reading.processes.setdefault(owner.name, owner)
            reading.refusals.setdefault(owner.name, refused)
        if section.command:
            reading.commands[owner.name] = section.command


def keep(
    reading: Reading,
    process: ProcessName,
    place: location.Place,
    threads: tuple[Thread, ...],
    pid: int | None,
) -> None:
    """Store the threads of one process. A loose file that comes a second time for a process is its
    next sample.
    """
    if len(reading.stacks) >= MAX_PROCESSES:
        raise UnreadableDump(f"more than {MAX_PROCESSES:,} dumps: this one was not read")
    reading.processes.setdefault(process.name, process)
    if pid is not None:
        reading.pids[process.name] = pid
    if ".native" in place.file:
        reading.natives[(process.name, place.sample or 0)] = threads
        return
    sample = place.sample
    if sample is None:
        sample = 0
        while (process.name, sample) in reading.stacks:
            sample += 1
    # equal stacks are one object: what they show is found out once
    reading.stacks[(process.name, sample)] = reading.shared.setdefault(threads, threads)


READERS: dict[str, Callable[[Reading, location.Place, str, bytes], None]] = {
    "samples": take_dump,
    "loose": take_dump,
    "proc": take_facts,
    "env": take_environment,
    "gpu": take_gpus,
    "logs": take_log,
    "errors": take_error,
    "fr": take_records,
    "ras": take_ras,
    "source": take_source,
}
