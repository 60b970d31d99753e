"""The state of a read: what was read of a job so far, by process name and sample, joined into one
snapshot.

py-spy's JSON comes first because it cannot disturb the job; its native text, which shows the C
calls below the innermost Python frame, comes second where it works. The two are joined thread by
thread, and only where both show the same Python frames: a thread that moved in between keeps its
first stack.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from areal_core.safety.secrets import Masker, masker
from hangdoctor.collect.discover import role_of_server
from hangdoctor.collect.write import ProcessEntry
from hangdoctor.frames import of_launcher
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
from hangdoctor.parse import location
from hangdoctor.parse.endings import Ended, endings_of
from hangdoctor.parse.job_log import Text, read_job_log
from hangdoctor.parse.location import ProcessName, coordinates_in, parse_name
from hangdoctor.parse.logs import parse_log, running_records, watchdog_records, watchdog_timeouts
from hangdoctor.waits import wait_of


def merge_native(threads: tuple[Thread, ...], natives: tuple[Thread, ...]) -> tuple[Thread, ...]:
    if not natives or not threads:
        return threads or natives
    seen = {(thread.name, python_frames(thread)): thread.frames for thread in natives}
    return tuple(
        Thread(seen[key], t.name, t.active, t.holds_gil, t.waits_for_gil)
        if (key := (t.name, python_frames(t))) in seen
        else t
        for t in threads
    )


def python_frames(thread: Thread) -> tuple[tuple[str, int], ...]:
    """Return function and line of the Python frames: the two passes print paths of different
    length.
    """
    return tuple((frame.function, frame.line) for frame in thread.frames if not frame.native)


Key = tuple[str, int]


@dataclass(slots=True)
class Reading:
    """What was read so far, by process name and sample.

    `texts` are the logs of a job that has ended, which are read together.
    """

    world_size: int | None = None
    contents: location.Contents | None = None
    processes: dict[str, ProcessName] = field(default_factory=dict)
    stacks: dict[Key, tuple[Thread, ...]] = field(default_factory=dict)
    natives: dict[Key, tuple[Thread, ...]] = field(default_factory=dict)
    shared: dict[tuple[Thread, ...], tuple[Thread, ...]] = field(default_factory=dict)
    facts: dict[Key, ProcessFacts] = field(default_factory=dict)
    world_sizes: set[str] = field(default_factory=set)
    pids: dict[str, int] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, tuple[Status, str]] = field(default_factory=dict)
    texts: list[Text] = field(default_factory=list)
    records: list[CollectiveRecord] = field(default_factory=list)
    ras: list[RasRank] = field(default_factory=list)
    logs: list[LogTail] = field(default_factory=list)
    errors: list[ErrorFile] = field(default_factory=list)
    gpus: list[GpuFacts] = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    steps: dict[int, tuple[int, ...]] = field(default_factory=dict)


def finish(reading: Reading, world_size: int | None) -> Snapshot:
    """Join everything by process into one snapshot."""
    listed = {entry.name: entry for entry in reading.contents.processes} if reading.contents else {}
    ended = join_ended(reading, world_size) if reading.texts else Ended()
    number_unranked(reading, listed)
    keys = sorted(set(reading.stacks) | set(reading.natives), key=lambda key: (key[1], len(key[0]), key[0]))
    mask = masker()  # reports quote commands, logs and errors, also those that no collector has masked
    dumps = tuple(dump_of(reading, listed, key, mask) for key in keys)
    if reading.contents:
        reading.notes += [f"host {host}" for host in reading.contents.hosts_missing]
        reading.notes += [
            f"{entry.name} is {entry.status}: {entry.detail or 'no reason given'}"
            for entry in reading.contents.processes
            if entry.role not in ("trainer", "child", "launcher") and entry.status != "dumped"
        ]
        world_size = world_size or reading.contents.world_size
    sizes = [int(value) for value in reading.world_sizes if value.isdecimal() and len(value) < 8]
    world_size = world_size or (sizes[0] if len(sizes) == 1 else ended.world_size)
    return Snapshot(
        dumps=dumps,
        expected=expected_ranks(reading, listed.values(), dumps, world_size, ended),
        absent=absent_processes(reading, listed.values()),
        num_samples=max((dump.sample + 1 for dump in dumps), default=0),
        records=tuple(reading.records) or watchdog_records(reading.logs) or running_records(reading.logs),
        ras=tuple(reading.ras),
        logs=tuple(replace(log, lines=tuple(map(mask.text, log.lines))) for log in reading.logs),
        errors=tuple(
            replace(error, message=mask.text(error.message), traceback=mask.text(error.traceback))
            for error in reading.errors
        ),
        gpus=tuple(reading.gpus),
        source=reading.source,
        notes=tuple(reading.notes),
        endings=tuple(replace(e, words=mask.text(e.words)) for _, e in sorted(ended.endings.items())),
        stopped=mask.text(ended.stopped),
        recovered=ended.recovered,
        complete=ended.complete or not reading.texts,
        steps=reading.steps,
    )


def join_ended(reading: Reading, world_size: int | None) -> Ended:
    """Join what a dead job's logs say, and return how its ranks ended.

    Of a rank that waited until its time-out the last dump counts: that it moved before is no
    progress.
    """
    job = read_job_log(reading.texts)
    times = {e.time: e.rank for e in reading.errors if e.time is not None and e.rank is not None}
    if job.first is None and times:
        job.first = times[min(times)]
    timed_out = {rank for log in reading.logs for rank, _, _ in watchdog_timeouts(log)}
    ended = endings_of(job, world_size, timed_out)
    for name, last in [(name, sample) for name, sample in reading.stacks if sample]:
        reading.stacks[(name, 0)] = reading.stacks.pop((name, last))
    for rank, threads in ended.stacks.items():
        process = parse_name(f"rank_{rank}")
        reading.processes.setdefault(process.name, process)
        reading.stacks.setdefault((process.name, 0), threads)
    reading.records += job.records
    reading.source |= job.source
    known = {log.rank for log in reading.logs}
    for rank, lines in job.written.items():
        if rank not in known:
            reading.logs.append(parse_log(f"rank_{rank}", rank, "\n".join(lines)))
    return ended


def number_unranked(reading: Reading, listed: dict[str, ProcessEntry]) -> None:
    """Number processes where no name has a rank: by command line (`--local_rank=3`,
    `sglang::scheduler_PP1_TP0`), else in the order of the files.
    """
    if listed or any(process.rank is not None for process in reading.processes.values()):
        return
    names = [name for name in reading.processes if not is_launcher(reading, name)]
    roles = {name: role_of_server(tuple(reading.commands.get(name, "").split())) for name in names}
    # A driver that does not wait for its actors is part of what hangs.
    roles |= {name: "trainer" for name, role in roles.items() if role == "proxy" and actor_of(reading, name)}
    if "trainer" in roles.values():  # other actors of Ray beside the ranks of the job
        for name in [name for name in names if actor_of(reading, name) and roles[name] != "trainer"]:
            names.remove(name)
            number = sum(process.role == roles[name] for process in reading.processes.values())
            reading.processes[name] = ProcessName(name, number, roles[name])
    if len(names) < 2:
        return
    positions = {name: coordinates_in(reading.commands.get(name, "")) for name in names}
    if all(positions.values()) and len(set(positions.values())) == len(names):
        names.sort(key=lambda name: positions[name] or ())
        reading.notes.append("ranks are counted from the processes' command lines")
    else:
        reading.notes.append("Ranks are the order of the stacks: no name (rank_3.txt) or heading has one.")
    for rank, name in enumerate(names):
        reading.processes[name] = ProcessName(name, rank, roles[name])


def is_launcher(reading: Reading, name: str) -> bool:
    """True if the stacks of a process are those of torchelastic's agent, or of a driver of Ray: it
    waits for calls of other actors, which do not wait for calls.
    """
    if any(of_launcher(frame) for thread in threads_of(reading, name) for frame in thread.frames):
        return True
    if not calls_actors(reading, name):
        return False
    actor = actor_of(reading, name)
    others = (other for other in reading.processes if actor_of(reading, other) not in (actor, ""))
    return any(not calls_actors(reading, other) for other in others)


def threads_of(reading: Reading, name: str) -> tuple[Thread, ...]:
    return reading.stacks.get((name, 0)) or reading.natives.get((name, 0)) or ()


def actor_of(reading: Reading, name: str) -> str:
    """Return the class of an actor of Ray, from the title of its process; empty for others."""
    return reading.commands.get(name, "").partition("ray::")[2].partition(".")[0]


def calls_actors(reading: Reading, name: str) -> bool:
    of_ray = (t for t in threads_of(reading, name) if any("ray/" in frame.file for frame in t.frames))
    return any(wait_of(thread.frames).operation == "ray.get" for thread in of_ray)


def dump_of(reading: Reading, listed: dict[str, ProcessEntry], key: Key, mask: Masker) -> ProcessDump:
    """Return one process in one sample, with its entry of collection.json where there is one."""
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
        detail=(entry.detail if entry else "") or reading.refusals.get(name, ("", ""))[1],
        sample=sample,
        time=times[sample] if sample < len(times) else None,
        threads=merge_native(reading.stacks.get(key, ()), reading.natives.get(key, ())),
        facts=reading.facts.get(key, ProcessFacts()),
        command=mask.text(entry.command if entry else reading.commands.get(name, "")),
    )


def absent_processes(reading: Reading, listed: Iterable[ProcessEntry]) -> dict[str, Status]:
    """Return processes of other roles than the trainer's that were looked for and have no stack."""
    dumped = {name for name, _ in reading.stacks}
    found = {e.name: e.status for e in listed if e.role not in ("trainer", "child", "launcher")}
    found |= {
        name: status
        for name, (status, _) in reading.refusals.items()
        if reading.processes[name].role != "trainer"
    }
    return {name: status for name, status in found.items() if status != "dumped" and name not in dumped}


def refused_ranks(reading: Reading) -> dict[int, Status]:
    dumped = {name for name, _ in reading.stacks}
    return {
        process.rank: status
        for name, (status, _) in reading.refusals.items()
        if name not in dumped
        and (process := reading.processes[name]).rank is not None
        and process.role == "trainer"
    }


def expected_ranks(
    reading: Reading,
    listed: Iterable[ProcessEntry],
    dumps: tuple[ProcessDump, ...],
    world_size: int | None,
    ended: Ended,
) -> dict[int, Status]:
    """Return the status of every trainer rank that should exist; empty where the number of ranks is
    unknown.

    A number of ranks alone does not prove that a rank without a dump is gone: only a collection
    that reached every host has looked for all of them, and a message may name one that ended.
    """
    complete = reading.contents is not None and not reading.contents.hosts_missing
    unseen: Status = "gone" if complete else "not_collected"
    gone: dict[int, Status] = {
        rank: "gone" for rank, e in ended.endings.items() if e.how in ("failed", "killed", "ended")
    }
    expected: dict[int, Status] = (
        dict.fromkeys(range(min(world_size or 0, 500_000)), unseen) | gone | refused_ranks(reading)
    )
    for entry in listed:
        if entry.rank is not None and entry.role == "trainer":
            expected[entry.rank] = entry.status
    for dump in dumps:
        # A rank that was dumped before it ended is described by its dump.
        if (
            expected
            and dump.rank is not None
            and dump.role == "trainer"
            and (expected.get(dump.rank, unseen) in ("gone", "not_collected"))
        ):
            expected[dump.rank] = "dumped"
    return expected
