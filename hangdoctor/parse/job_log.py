"""The log of a job that has ended: tracebacks, dumps and messages of its ranks, and the report of
its launcher.

text -> lines without prefixes, by writer -> attempts -> failures, stacks   -> JobLog
                                          -> messages about ranks, exits

What stands before the text of a line (time, pod, task, `[rank3]:`) is taken from lines whose text
is known. A prefix without a word for ranks is that of a node where torchrun itself writes with it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from hangdoctor.frames import of_launcher
from hangdoctor.model import CollectiveRecord, Frame, Thread
from hangdoctor.parse.headings import Section, numbers_in, section_header
from hangdoctor.parse.logs import FINGERPRINT, fingerprint_record
from hangdoctor.parse.stacks_text import ANSI, PREFIX, read_sections, writer_of
from hangdoctor.tables import message, messages

MAX_CHARACTERS = 32 << 20
MAX_TRACEBACK, MAX_PREFIX = 20_000, 120
REPORT_LINES = 60
LAST_STEPS, MAX_STEP_CHARACTERS = 3, 1 << 18
STEP = message("logs", "step")
# Only a job that has ended, or a rank of it, leaves one of these.
ENDED = messages("job_log", "ended")  # each by itself: what begins with a literal is found fast
TORCHRUN_FILE = re.compile(
    r"(?:^|/)attempt_(?P<attempt>\d{1,4})/(?P<rank>\d{1,6})/(?:stdout|stderr|error)\.\w+$"
)
KNOWN = messages("job_log", "known")
TASK = re.compile(r"(?:^|[\s|\]])(?P<number>\d{1,6}):\s*$")
SAYS_RANK = re.compile(r"(?:\S+ ){0,4}?\[?rank[ _=:]?(\d{1,6})\b", re.I)
WRITER = re.compile(r"(?:\[(?:rank|default)\d+\]:|(?<!\d)\d{1,6}:)$")
OF_RANK = re.compile(r"\brank[ _=:]*(\d{1,6})|\[default(\d{1,6})\]", re.I)
LAUNCHER = message("job_log", "launcher")
AGENT_FAILED = re.compile(r"failed \(exitcode: (-?\d{1,6})\) local_rank: (\d{1,6})\b")
TRACEBACK = re.compile(r"^\s*(?:\^C|Original )?Traceback \(most recent call last\):")
TRACEBACK_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<function>\S.*?)\s*$'
)
ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::\s|$)")
CHAINED = re.compile(r"^(?:During handling of the above|The above exception was the direct cause)")
SPAWNED = re.compile(r"^-- Process (\d{1,6}) terminated with the following error:")
# A rank that names itself in its error.
ITSELF = re.compile(r"(?:between collectives on ranks\. Rank|communicator was aborted on rank) (\d{1,6})\b")
IGNORED = re.compile(r"^Exception ignored in")
FATAL = re.compile(r"^Fatal Python error: .*")
UNCAUGHT = re.compile(r"^(?:Fatal Python error: |\S*RendezvousTimeoutError)")
DUMP_LINE = re.compile(r'^\s*(?:$|(?:Current t|T)hread 0x|File "|<no Python frame>|\.\.\.)')
THREAD = re.compile(r"^\s*(?:Current t|T)hread 0x")
# torchelastic's report at the end of a run.
REPORTED = message("job_log", "reported")
EXITED = messages("job_log", "exited")
TIMED_OUT_ON = message("job_log", "timed_out_on")
SIGNALLED = message("job_log", "signalled")
STOPPED = message("job_log", "stopped")
# A peer names the ranks that it has waited for.
NAMED = messages("job_log", "named")
POINTED = message("job_log", "pointed")  # a coordinator, whose own log names who is absent
JOINED = messages("job_log", "joined")
STALLED = message("job_log", "stalled")
NOTIFY, REASON = message("job_log", "notify"), message("job_log", "reason")


@dataclass(frozen=True, slots=True)
class Text:
    """One file of a job, with the rank that wrote it and its attempt, where the path says them."""

    member: str
    rank: int | None
    attempt: int
    text: str


@dataclass(slots=True)
class Failure:
    """One printed traceback, innermost frame first; `error` is empty where the log was cut.

    `rank` is None where no prefix names it; `chained` ones follow another of the same process.
    """

    rank: int | None
    frames: tuple[Frame, ...]
    error: str
    chained: bool = False


@dataclass(slots=True)
class Attempt:
    """Failures and dumps of one attempt of the job, in the order of the log; `later` says that the
    ranks wrote something else behind them.
    """

    failures: list[Failure] = field(default_factory=list)
    stacks: list[tuple[int | None, tuple[Thread, ...]]] = field(default_factory=list)
    later: bool = False


@dataclass(slots=True)
class JobLog:
    """Everything that the logs of one job say about its end.

    `exits` maps a rank to its exit code, if there is one, and the launcher's words; `named` maps a
    rank that others say they waited for to their words; `written` has the lines of each rank;
    `reported` are tracebacks in the launcher's report; `waited` are ranks whose watchdog says so;
    `complete` says that it names all ranks that failed, `in_order` that one log holds all failures.
    """

    attempts: dict[int, Attempt] = field(default_factory=dict)
    exits: dict[int, tuple[int | None, str]] = field(default_factory=dict)
    first: int | None = None
    named: dict[int, str] = field(default_factory=dict)
    stopped: str = ""
    joined: tuple[int, int] | None = None
    records: list[CollectiveRecord] = field(default_factory=list)
    written: dict[int, list[str]] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    reported: list[Failure] = field(default_factory=list)
    waited: set[int] = field(default_factory=set)
    complete: bool = False
    in_order: bool = False


def has_ended(text: str) -> bool:
    """True if a text says that a job has ended, or is of a process whose traceback is its last
    word.
    """
    return any(pattern.search(text) for pattern in ENDED) or ends_in_error(text)


def ends_in_error(text: str) -> bool:
    printed = text[-MAX_TRACEBACK:].rpartition("Traceback (most recent call last):\n")[2]
    *indented, last = printed.partition("\n```")[0].rstrip().split("\n")
    return bool(indented) and all(line.lstrip("| ") != line for line in indented) and bool(ERROR.match(last))


def headed_errors(text: str) -> tuple[list[tuple[int, str]], str]:
    """Return rank and lines of each heading of ranks that a traceback ends, and the other lines."""
    if "Traceback (most recent call last):" not in text:
        return [], text
    blocks: list[tuple[tuple[int, ...], list[str]]] = [((), [])]
    for line in text.split("\n"):
        heading = section_header(line.strip(), Section()) if "rank" in line.lower() else None
        if heading and heading.role is None and heading.ranks:
            blocks.append((heading.ranks, []))
        blocks[-1][1].append(line)
    of_ranks, others = list[tuple[int, str]](), list[str]()
    for ranks, printed in blocks:
        lines = "\n".join(printed)
        if ranks and ends_in_error(lines):
            of_ranks += [(rank, lines) for rank in ranks]
        else:
            others.append(lines)
    return of_ranks, "\n".join(others)


def read_job_log(texts: Sequence[Text]) -> JobLog:
    job = JobLog(in_order=len(texts) == 1)
    for text in texts:
        lines = uncut(list(written_by(ANSI.sub("", text.text[-MAX_CHARACTERS:]), text.rank)))
        for rank, found_lines in by_writer(lines).items():
            job.written.setdefault(rank, []).extend(found_lines)
        read_messages(job, lines)
        number, mine = text.attempt, set[int | None]()
        if text.member.endswith(".json"):
            found = Attempt()
            read_tracebacks(job, found, text.rank, [line for _, line in lines])
            job.reported += found.failures
            continue
        for part in parts_of(lines):
            number = read_part(job, number, part, mine)
    return job


Lines = list[tuple[int | None, str]]


def by_writer(lines: Iterable[tuple[int | None, str]]) -> dict[int, list[str]]:
    """Return the lines of each rank; a line without a prefix may begin with its rank."""
    found: dict[int, list[str]] = {}
    for writer, line in lines:
        said = SAYS_RANK.match(line) if writer is None else None
        rank = int(said[1]) if said else writer
        if rank is not None:
            found.setdefault(rank, []).append(line)
    return found


def logged_steps(text: str, rank: int | None) -> dict[int, tuple[int, ...]]:
    """Return the last steps, at most LAST_STEPS, of which each rank of a log has written a line."""
    lines = [line for line in text[-MAX_STEP_CHARACTERS:].split("\n") if STEP.search(line)]
    if not lines:
        return {}
    written = by_writer(written_by("\n".join(lines), rank))
    steps = {r: [int(m[1]) for line in mine if (m := STEP.search(line))] for r, mine in written.items()}
    return {r: tuple(dict.fromkeys(found))[-LAST_STEPS:] for r, found in steps.items()}


def written_by(text: str, rank: int | None) -> Iterator[tuple[int | None, str]]:
    """Yield the rank that wrote each line, and the line without what stands before its text."""
    matches = (m.start() for pattern in KNOWN for m in pattern.finditer(text))
    starts = ((start, text.rfind("\n", 0, start) + 1) for start in matches)
    found = {text[line:start].rstrip() for start, line in starts if start - line < MAX_PREFIX}
    found = {prefix for prefix in found if prefix.strip() and "traceback" not in prefix}
    found |= {before for prefix in found if (before := WRITER.sub("", prefix).rstrip())}
    shapes = {re.sub(r"\d+", r"\\d+", re.escape(prefix)) for prefix in found}
    longest_first = sorted(list(shapes)[:200], key=len, reverse=True)
    known = re.compile("|".join([*longest_first, r"\[(?:rank|default)\d+\]:", r"\[\d+\]<std\w+>:"]))
    lines = text.replace("\r", "").split("\n")
    prefixes = [known.match(line) for line in lines]
    launched = zip(prefixes, lines, strict=True) if LAUNCHER.search(text) else ()
    nodes = {writer_in(m[0])[1] for m, line in launched if m and LAUNCHER.search(line)}
    numbers = {writer_in(m[0])[1] for m in prefixes if m}
    nodes |= numbers if len(numbers) == 1 else set()
    for match, line in zip(prefixes, lines, strict=True):
        writer, rest = rank, line
        if match:
            rest = line[match.end() :].removeprefix(" ")
            said, number = writer_in(match[0])
            if said is not None:
                writer = said
            elif number is not None and number not in nodes and rank is None:
                writer = number
        yield writer, rest


@lru_cache(maxsize=4096)
def writer_in(prefix: str) -> tuple[int | None, int | None]:
    """Return the number behind a word for ranks in a prefix, and that of the task."""
    said = OF_RANK.search(prefix)
    return (int(said[1] or said[2]) if said else None), number_before(prefix)


def number_before(prefix: str) -> int | None:
    """Return the number of the task, pod or container in a prefix: the last one, of the process."""
    if task := TASK.search(prefix):
        return int(task["number"])
    found = None
    while match := PREFIX.match(prefix):
        writer = writer_of(match)
        found = writer if isinstance(writer, int) else found
        prefix = prefix[match.end() :]
    return found


def uncut(lines: Lines) -> Lines:
    """Return the lines without a thread of a dump in which the log was cut: its caller is lost."""
    end = len(lines)
    while end and DUMP_LINE.match(lines[end - 1][1]) and not THREAD.match(lines[end - 1][1]):
        end -= 1
    whole = any("<module>" in line or "_bootstrap" in line for _, line in lines[end:][-3:])
    return lines if whole or not end or not THREAD.match(lines[end - 1][1]) else lines[: end - 1]


def parts_of(lines: Lines) -> Iterator[Lines]:
    """Yield the lines up to each message of torchrun that its workers failed, and those behind; its
    report follows where it does not start them again.
    """
    part: Lines = []
    for number, (writer, line) in enumerate(lines):
        part.append((writer, line))
        if "failed (exitcode: " in line and AGENT_FAILED.search(line):
            behind = (text for _, text in lines[number : number + REPORT_LINES])
            if not any("ChildFailedError" in text for text in behind):
                yield part
                part = []
    yield part


def read_part(job: JobLog, number: int, lines: Lines, seen: set[int | None]) -> int:
    """Read the lines up to a message of torchrun; return the number of the attempt they belong to.

    It is the next attempt only where a rank of `seen` fails, or is dumped, again, or one without a
    name does: other nodes' torchrun report the same one.
    """
    found = Attempt()
    streams: dict[int | None, list[str]] = {}
    for writer, line in lines:
        streams.setdefault(writer, []).append(line)
    for writer, stream in streams.items():
        rest = read_tracebacks(job, found, writer, stream)
        for dump in dumps_in(rest):
            for section in read_sections(dump):
                rank = section.ranks[0] if section.ranks else writer
                if section.whose == "named":
                    found.stacks.append((rank, tuple(section.threads)))
    before = job.attempts.get(number)
    if not found.failures and not found.stacks:
        text = [line for writer, line in lines if line.strip()]
        if (
            before
            and seen
            and text
            and not any(LAUNCHER.search(line) or STOPPED.search(line) for line in text)
        ):
            before.later = True
        return number
    mine = {f.rank for f in found.failures} | {rank for rank, _ in found.stacks}
    if mine & seen or (None in mine and seen):
        number += 1
        seen.clear()
    seen |= mine
    attempt = job.attempts.setdefault(number, Attempt())
    attempt.failures += found.failures
    attempt.stacks += found.stacks
    return number


def read_tracebacks(job: JobLog, found: Attempt, writer: int | None, lines: list[str]) -> list[str]:
    """Take the tracebacks out of the lines of one writer; return the other lines."""
    rest: list[str] = []
    frames: list[Frame] | None = None
    chained = in_report = crashed = False
    spawned: int | None = None
    cut = True  # the first lines may be of a traceback whose head is missing
    mixed = 0  # tracebacks of ranks without a prefix, line by line into each other

    def close(error: str) -> None:
        nonlocal frames, chained, mixed
        if (frames and not any(of_launcher(frame) for frame in frames)) or UNCAUGHT.match(error):
            unique = dict.fromkeys(reversed(frames or ()))
            said = ITSELF.search(error) if writer is None and spawned is None else None
            rank = int(said[1]) if said else writer if spawned is None else spawned
            found.failures.append(Failure(rank, tuple(unique), error, chained))
        frames, chained = (frames if mixed else None), False
        mixed = max(mixed - 1, 0)

    for line in lines:
        in_report = in_report or "ChildFailedError" in line
        if crashed and DUMP_LINE.match(line):
            continue  # where it crashed is no place where it waited
        crashed = False
        if in_report and not TRACEBACK.match(line) and frames is None:
            continue
        frame = TRACEBACK_FRAME.match(line)
        if TRACEBACK.match(line) and frames and writer is None:
            mixed += 1
        elif TRACEBACK.match(line):
            close("")
            frames = []
        elif frame and (frames is not None or cut):
            frames = [*(frames or []), Frame(frame["function"], frame["file"], int(frame["line"]))]
        elif frames is not None and (not line.strip() or line[:1].isspace()):
            if frames and set(line.strip()) - set("^~ "):
                job.source.setdefault(f"{frames[-1].file}:{frames[-1].line}", line.strip()[:200])
        elif frames is not None and ERROR.match(line):
            close(line.strip()[:1000])
        elif CHAINED.match(line):
            chained = True
        elif of_spawn := SPAWNED.match(line):
            close("")
            spawned = int(of_spawn[1])
        elif IGNORED.match(line):
            close("")
            chained = True
        elif FATAL.match(line):
            close(line.strip())
            crashed = True
        elif found.failures and REASON.match(line):
            found.failures[-1].error = f"{line.strip()[:300]} {found.failures[-1].error}"
        else:
            rest.append(line)
            cut = cut and (not line.strip() or line[0].isspace())
    close("")
    return rest


def dumps_in(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines of each dump: faulthandler ends one with the current thread, and begins one
    of a timer with a line of its own.
    """
    part: list[str] = []
    complete = False
    for line in lines:
        bare = line.strip()
        if bare.startswith("Timeout (") or (complete and bare.startswith(("Thread 0x", "Current thread 0x"))):
            yield part
            part, complete = [], False
        complete = complete or bare.startswith("Current thread 0x")
        part.append(line)
    yield part


def read_messages(job: JobLog, lines: Lines) -> None:
    """Read what ranks say of each other and what the launcher says of them."""
    text = "\n".join(line for _, line in lines)
    job.complete |= "Root Cause (first observed" in text
    reports = list(REPORTED.finditer(text))
    for report in reports:
        rank = int(report["rank"])
        job.exits[rank] = (int(report["code"]), f"exit code {report['code']}")
        if "Traceback (most recent" in report["rest"]:
            found = Attempt()
            read_tracebacks(job, found, rank, [line[2:] for line in report["rest"].split("\n")])
            job.reported += found.failures
    if reports and (len(reports) == 1 or job.complete):
        job.first = int(reports[-1]["rank"])
    elif not reports and (agent := AGENT_FAILED.search(text)):  # without its report
        job.first = int(agent[2])
        job.exits[job.first] = (int(agent[1]), f"exit code {agent[1]}, local_rank {agent[2]}")
    for pattern in EXITED:
        for match in pattern.finditer(text):
            code = match.groupdict().get("code")
            said = (int(code) if code else None, match["words"].strip())
            job.exits |= dict.fromkeys(numbers_in(match["ranks"]), said)
            job.first = int(match["ranks"]) if code and job.first is None else job.first
            job.complete = True
    for pattern in NAMED if job.exits else (*NAMED, POINTED):
        for match in pattern.finditer(text):
            words = " ".join(match["words"].split())[:200]
            for rank in numbers_in(match["ranks"].replace("-", " ")):
                job.named.setdefault(rank, words)
    wanted = max((int(m[1]) for m in TIMED_OUT_ON.finditer(text)), default=0)
    for match in SIGNALLED.finditer(text):
        rank, last = int(match["rank"]), int(match["last"])
        if last < wanted:
            job.named.setdefault(rank, f"it has enqueued {last} operations, others wait in number {wanted}")
        else:
            job.waited.add(rank)
    for match in NOTIFY.finditer(text) if "Notify record" in text else ():
        job.waited.add(int(match["global"] or match["rank"]))
        if match["global"] in (None, match["rank"]):
            job.named.setdefault(int(match["peer"]), f"a peer waited for it: {match['words']}")
    for pattern in JOINED if "joined" in text or "worker" in text or "barrier" in text else ():
        for match in pattern.finditer(text):
            job.joined = max(job.joined or (0, 0), (int(match["joined"]), int(match["world"])))
    stopped = STOPPED.search(text)
    job.stopped = job.stopped or (stopped[0][:200] if stopped else "")
    job.records += fingerprints(text) + stalled(job, text)


def stalled(job: JobLog, text: str) -> list[CollectiveRecord]:
    """Return the operations of Horovod's report that different ranks have submitted alone; name the
    few ranks that are in none of its lists.
    """
    found = STALLED.finditer(text) if "[ready ranks: " in text else ()
    ready = {m["ranks"]: m["op"] for m in found}
    ranks = [numbers_in(listed) for listed in ready]
    listed = {rank for found in ranks for rank in found}
    if len(ready) < 2 or len(listed) < sum(map(len, ranks)):
        absent = set(range(max(listed, default=0))) - listed
        few = absent if len(absent) < len(listed) else ()
        job.named |= dict.fromkeys(few, "absent from the list of ready ranks")
        return []
    return [
        CollectiveRecord(rank, "default", operation, 0, False, "started", source="Horovod")
        for found, operation in zip(ranks, ready.values(), strict=True)
        for rank in found
    ]


def fingerprints(text: str) -> list[CollectiveRecord]:
    """Return the operations that ranks compared before they ran them: different ones are one call
    of each rank, whatever their numbers.
    """
    found = {int(m["rank"]): m for m in FINGERPRINT.finditer(text) if m["rank"]}
    last = max((int(m["seq"] or 0) for m in found.values()), default=0)
    one = len({m["op"] for m in found.values()}) == 1
    return [
        fingerprint_record(m, rank, int(m["seq"] or 0) if one else last, "fingerprint")
        for rank, m in found.items()
    ]
