"""Anything in, a snapshot out: paths of folders, tars and files are read member by member and joined by
process name.

    members_of(path) -> place_of(member) -> a reader per kind -> Reading (by process and sample) -> Snapshot

A member that cannot be read becomes a note, never a failure: the rest of a collection must still speak.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hangdoctor.errors import HangInputError, UnreadableDump
from hangdoctor.model import (
    CollectiveRecord,
    ErrorFile,
    GpuFacts,
    LogTail,
    ProcessDump,
    ProcessFacts,
    RasRank,
    Snapshot,
    Status,
    Thread,
)
from hangdoctor.parse import layout, ras
from hangdoctor.parse.flight_recorder import is_flight_recorder, parse_flight_recorder, records_from
from hangdoctor.parse.logs import parse_error_file, parse_log
from hangdoctor.parse.members import members_of
from hangdoctor.parse.names import ProcessName, canonical, coordinates_in, parse_name, role_in
from hangdoctor.parse.native import merge_native
from hangdoctor.parse.stacks_json import parse_stacks_json
from hangdoctor.parse.stacks_text import Section, parse_stacks_text

Key = tuple[str, int]
MAX_RANKS_OF_ONE_STACK = 1_000_000
MAX_NOTES = 1000


@dataclass(slots=True)
class Reading:
    """What has been read so far, by process name and sample."""

    mapping: dict[str, str] = field(default_factory=dict)
    contents: layout.Contents | None = None
    processes: dict[str, ProcessName] = field(default_factory=dict)
    stacks: dict[Key, tuple[Thread, ...]] = field(default_factory=dict)
    natives: dict[Key, tuple[Thread, ...]] = field(default_factory=dict)
    facts: dict[Key, ProcessFacts] = field(default_factory=dict)
    environments: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    sources: dict[Key, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    records: list[CollectiveRecord] = field(default_factory=list)
    ras: list[RasRank] = field(default_factory=list)
    logs: list[LogTail] = field(default_factory=list)
    errors: list[ErrorFile] = field(default_factory=list)
    gpus: list[GpuFacts] = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_snapshot(
    paths: Iterable[Path], world_size: int | None = None, mapping: dict[str, str] | None = None
) -> Snapshot:
    """The job that the files under `paths` show.

    `mapping` gives the process name of a file whose own name does not tell (`{"a.txt": "rank_3"}`);
    `world_size` says how many trainer ranks there should be. Raises `HangInputError` where nothing of a job
    is found.
    """
    reading = Reading(mapping or {})
    paths = list(paths)
    for path in paths:
        for member, data in members_of(path, reading.notes):
            take(reading, member, data)
    snapshot = finish(reading, world_size)
    if not (snapshot.dumps or snapshot.records or snapshot.ras or snapshot.expected):
        looked = ", ".join(map(str, paths)) or "nothing"
        notes = "; ".join(snapshot.notes[:3])
        raise HangInputError(
            f"No stacks of any rank in {looked}{f' ({notes})' if notes else ''}. Looked for py-spy text and JSON, "
            "faulthandler, pystack, gdb, Flight Recorder and RAS dumps. Collect some with: "
            "areal-debug hang collect --to FOLDER"
        )
    return snapshot


def take(reading: Reading, member: str, data: bytes) -> None:
    """Read one file into `reading`; a file that cannot be read becomes a note."""
    place = layout.place_of(member)
    if not data:
        reading.notes.append(f"{member[:200]}: empty")
        return
    try:
        if place.file == "collection.json":
            reading.contents = layout.contents_from(data)
        else:
            READERS[place.kind](reading, place, member, data)
    except UnreadableDump as problem:
        if len(reading.notes) < MAX_NOTES:
            reading.notes.append(f"{member[:200]}: {problem}")


def name_of(reading: Reading, file: str) -> ProcessName:
    return parse_name(reading.mapping.get(file, file))


def take_facts(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    reading.facts[(name_of(reading, place.file).name, place.sample or 0)] = layout.facts_from(data)


def take_environment(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    reading.environments[name_of(reading, place.file).name] = layout.environment_from(data)


def take_source(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    reading.source |= layout.source_from(data)


def take_gpus(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    reading.gpus += layout.gpus_from(data, place.file.removesuffix(".json"), place.sample or 0)


def take_log(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    process = name_of(reading, place.file)
    reading.logs.append(parse_log(process.name, process.rank, data.decode(errors="replace"), member))


def take_error(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    reading.errors.append(parse_error_file(data, name_of(reading, place.file).rank, member))


def take_records(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    rank = name_of(reading, place.file).rank
    if rank is None:
        raise UnreadableDump("the name of a Flight Recorder dump must end in its rank")
    reading.records += parse_flight_recorder(data, rank)


def take_ras(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    if data.lstrip()[:1] == b"{":
        document = layout.object_from(data, "ras")
        if not ras.is_ras(document):
            raise UnreadableDump("a RAS report has 'communicators'")
        reading.ras += ras.ras_from(document)
    else:
        reading.ras += ras.parse_ras_text(data.decode(errors="replace"))


def take_dump(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    """A file whose content decides what it is."""
    if data[:1] == b"\x80":
        take_records(reading, place, member, data)
        return
    text = data.decode(errors="replace")
    head = text[:4096].lstrip()
    if place.file.endswith(".error.txt"):
        reading.failures[name_of(reading, place.file).name] = head.split("\n")[0][:300]
    elif head.startswith("[") and '"' in head[:200]:
        pid, threads = parse_stacks_json(text)
        keep(reading, name_of(reading, place.file), place, member, threads, pid)
    elif head.startswith("{"):
        take_object(reading, place, member, data)
    elif ras.is_ras_text(text):
        reading.ras += ras.parse_ras_text(text)
    else:
        take_text(reading, place, member, text)


def take_object(reading: Reading, place: layout.Place, member: str, data: bytes) -> None:
    document = layout.object_from(data, member[:200])
    rank = name_of(reading, place.file).rank
    if is_flight_recorder(document):
        if rank is None:
            raise UnreadableDump("the name of a Flight Recorder dump must end in its rank")
        reading.records += records_from(document, rank)
    elif ras.is_ras(document):
        reading.ras += ras.ras_from(document)
    elif "message" in document:
        reading.errors.append(parse_error_file(data, rank, member))
    else:
        raise UnreadableDump("JSON, but neither stacks, Flight Recorder, RAS nor an error file")


def take_text(reading: Reading, place: layout.Place, member: str, text: str) -> None:
    process = name_of(reading, place.file)
    sections = parse_stacks_text(text)
    if not sections or place.file.endswith(".log"):
        reading.logs.append(parse_log(process.name, process.rank, text, member))
    for number, section in enumerate(sections):
        for owner in owners(process, section, number, len(sections)):
            keep(reading, owner, place, member, tuple(section.threads), section.pid)
            if section.command:
                reading.commands[owner.name] = section.command


def owners(process: ProcessName, section: Section, number: int, total: int) -> list[ProcessName]:
    """Whose stacks a section shows: the ranks it names, else the file's process and, after it, its
    children.
    """
    if section.ranks:
        role = parse_name(section.role).role if section.role else "trainer"
        ranks = section.ranks[:MAX_RANKS_OF_ONE_STACK]
        return [ProcessName(canonical(role, rank), rank, role) for rank in ranks]
    if total == 1 or (number == 0 and process.rank is not None):
        return [process]
    if process.rank is not None:
        child = f"{process.name}_child_{number - 1}"
        return [ProcessName(child, None, "child", process.host, process.name)]
    return [ProcessName(f"pid_{section.pid or number}", None)]


def keep(
    reading: Reading,
    process: ProcessName,
    place: layout.Place,
    member: str,
    threads: tuple[Thread, ...],
    pid: int | None,
) -> None:
    """Store the threads of one process. A loose file that comes a second time for a process is its next
    sample.
    """
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
    reading.stacks[(process.name, sample)] = threads
    reading.sources[(process.name, sample)] = member


READERS: dict[str, Callable[[Reading, layout.Place, str, bytes], None]] = {
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


def finish(reading: Reading, world_size: int | None) -> Snapshot:
    """Join everything by process into one snapshot."""
    listed = {entry.name: entry for entry in reading.contents.processes} if reading.contents else {}
    number_unranked(reading, listed)
    keys = sorted(set(reading.stacks) | set(reading.natives), key=lambda key: (key[1], len(key[0]), key[0]))
    dumps = tuple(dump_of(reading, listed, key) for key in keys)
    if reading.contents:
        reading.notes += [f"host {host}" for host in reading.contents.hosts_missing]
        world_size = world_size or reading.contents.world_size
    world_size = world_size or world_size_of(reading)
    return Snapshot(
        dumps=dumps,
        expected=expected_ranks(listed.values(), dumps, world_size),
        num_samples=max((dump.sample + 1 for dump in dumps), default=0),
        records=tuple(reading.records),
        ras=tuple(reading.ras),
        logs=tuple(reading.logs),
        errors=tuple(reading.errors),
        gpus=tuple(reading.gpus),
        source=reading.source,
        notes=tuple(reading.notes),
    )


def number_unranked(reading: Reading, listed: dict[str, layout.ExpectedProcess]) -> None:
    """Where no name gives a rank: the command lines (`--local_rank=3`, `sglang::scheduler_PP1_TP0`), or the order of the files."""
    if listed or any(process.rank is not None for process in reading.processes.values()):
        return
    names = [name for name in reading.processes if not is_launcher(reading, name)]
    if len(names) < 2:
        return
    told = {name: coordinates_in(reading.commands.get(name, "")) for name in names}
    if all(told.values()) and len(set(told.values())) == len(names):
        names.sort(key=lambda name: told[name] or ())
        reading.notes.append("ranks are counted from the processes' command lines")
    else:
        reading.notes.append("no file name tells a rank (rank_3.txt): ranks are the order of the files")
    for rank, name in enumerate(names):
        reading.processes[name] = ProcessName(
            name, rank, role_in(reading.commands.get(name, "").split("::")[0])
        )


def is_launcher(reading: Reading, name: str) -> bool:
    threads = reading.stacks.get((name, 0)) or reading.natives.get((name, 0)) or ()
    return any("elastic/agent/server" in frame.file for thread in threads for frame in thread.frames)


def dump_of(reading: Reading, listed: dict[str, layout.ExpectedProcess], key: Key) -> ProcessDump:
    name, sample = key
    process = reading.processes[name]
    entry = listed.get(name)
    times = reading.contents.times if reading.contents else ()
    role = entry.role if entry else process.role
    return ProcessDump(
        name=name,
        rank=entry.rank if entry else process.rank,
        role="launcher"
        if role == "launcher" or (process.rank is None and is_launcher(reading, name))
        else role,
        host=entry.host if entry else process.host,
        pid=entry.pid if entry and entry.pid else reading.pids.get(name),
        parent=entry.parent if entry else process.parent,
        status=entry.status if entry else "dumped",
        detail=(entry.detail if entry else "") or reading.failures.get(name, ""),
        sample=sample,
        time=times[sample] if sample < len(times) else None,
        threads=merge_native(reading.stacks.get(key, ()), reading.natives.get(key, ())),
        facts=reading.facts.get(key, ProcessFacts()),
        environment=reading.environments.get(name, ()),
        command=entry.command if entry else reading.commands.get(name, ""),
        source=reading.sources.get(key, ""),
    )


def world_size_of(reading: Reading) -> int | None:
    """The WORLD_SIZE that the ranks' own environments agree on."""
    values = {dict(variables).get("WORLD_SIZE", "") for variables in reading.environments.values()}
    sizes = [int(value) for value in values if value.isdigit() and len(value) < 8]
    return sizes[0] if len(sizes) == 1 else None


def expected_ranks(
    listed: Iterable[layout.ExpectedProcess], dumps: tuple[ProcessDump, ...], world_size: int | None
) -> dict[int, Status]:
    """Status of every trainer rank that should exist, as far as anybody says."""
    expected: dict[int, Status] = dict.fromkeys(range(min(world_size or 0, 10_000_000)), "gone")
    for entry in listed:
        if entry.rank is not None and entry.role == "trainer":
            expected[entry.rank] = entry.status
    for dump in dumps:
        if dump.rank is not None and dump.role == "trainer" and expected.get(dump.rank, "gone") == "gone":
            expected[dump.rank] = "dumped"
    return expected


def parse_mapping(text: str) -> dict[str, str]:
    """A mapping file: one `file process` pair a line, such as `a.txt rank_3`. Raises `HangInputError`."""
    mapping = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].replace("=", " ").replace(",", " ").split()
        if words and len(words) != 2:
            raise HangInputError(
                f"Line {number} of the mapping is {line[:80]!r}; write: FILE PROCESS, as in a.txt rank_3"
            )
        if words:
            mapping[words[0]] = f"rank_{words[1]}" if words[1].isdigit() else words[1]
    return mapping
