"""Stacks as text, of every era: py-spy, faulthandler, pystack, gdb, torch's debug server, what
people paste from them, and logs that contain them.

One pass over the lines. A heading opens a process, a rank or a thread (`headings`); a line that is
a frame goes to the open thread (`frame_lines`); what is neither is prose and is skipped. Frames
without any heading are a stack of their own, which an empty line ends.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from hangdoctor.model import Frame
from hangdoctor.parse.frame_lines import bare_name, frame_of, loose_frames
from hangdoctor.parse.headings import GDB_ROW, PROCESS, OpenThread, Section, section_header, thread_header
from hangdoctor.parse.logs import shapes_of
from hangdoctor.parse.stacks_json import parse_stacks_json

MAX_LINE = 4096
# Below a frame of `py-spy dump --locals`, deeper than it.
LOCALS = re.compile(r"(?m)^([ \t]*)(?:Arguments|Locals):\n(?:\1[ \t]+\S.*(?:\n|\Z))*")
# A sample of austin, outermost first: `P7;T0:7;train.py:step:31;model.py:forward:9 1500`.
AUSTIN = re.compile(r"(?m)^P(?P<pid>\d{1,9});T(?P<thread>[\d:]+);(?P<frames>\S.*?)(?: [\d,]+)?$")
JSON_THREADS = re.compile(r'(?m)^\[\s*\{\s*"pid"')
MAX_FRAMES = 2000
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Who wrote the line: torchrun, ray and vLLM, srun, mpirun, docker compose, kubectl.
PREFIX = re.compile(
    r"^\s*(?:\[(?:default|rank) ?(?P<torchrun>\d+)\]:?|"
    r"\(\w[\w.]*(?: rank=(?P<ray>\d+))?[^)]{0,40}? pid=(?P<pid>\d+)[^)]*\)|"
    r"\(\w[\w.]* rank=(?P<worker>\d+)[^)]*\)|"
    r"(?P<srun>\d{1,6}):|\[(?:\d+,)?(?P<mpi>\d+)\]<std\w+>:|[\w.\-]*?-(?P<compose>\d{1,5})\s+\||"
    r"\[pod/[\w.\-]*?-(?P<pod>\d{1,5})/[\w.\-]+\]|"
    r"rank ?(?P<said>\d{1,6})(?= (?:Traceback \(|  |\w+(?:Error|Interrupt|Exception)\b))) ?"
)
HOST = re.compile(r"^(?P<host>[A-Za-z][\w.\-]{0,62}):(?:$| (?P<rest>.*))")  # pdsh, clush
MAYBE_PREFIXED = re.compile(r"^[^\S\n]*(?:\[|\(|rank ?\d|\d+:|[\w.\-]+-\d+\s+\|)", re.M)
CLOCK = re.compile(
    r"^(?:\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: (?:DP|PP|TP|EP)\d+)+\] ?|"  # SGLang names its rank
    r"\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,\d]*(?:[+-]\d\d:?\d\d|Z)?(?: \w+)?\]? ?"
    r"(?:- [\w.]+ - )?(?:\[?(?:INFO|ERROR|WARNING|DEBUG|CRITICAL)\]?:? ?)?(?:- )?(?:\[[\w.]+\]:? ?)?|"
    r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+?\] )"
)
CLOCKS = "[0123456789IWEF"  # what one begins with
THREAD_ID = re.compile(r"^Thread (0x[0-9A-Fa-f]+|\d+) \(", re.M)
INTERRUPT = re.compile(
    r"^(?:KeyboardInterrupt|torch\.distributed\.elastic\.\S*SignalException|SystemExit|.*got signal)\b"
)
# What py-spy, and torch's debug server, print in place of a stack.
REFUSAL = re.compile(
    r"^(?:Error: Failed|Failed to suspend|Permission Denied|Error: .*(?:py-spy|process)|Error: (?:408|503)$)",
    re.IGNORECASE,
)
WAITS = r"(?:(?:is|are) )?(?:stopped|stuck|blocked|hung|waiting|hangs?|waits?) (?:at|in|on)"
WAITING = re.compile(rf"^{WAITS} ")
# A heading and its frame on one line, or in one row of a table.
INLINE = re.compile(
    r"^(?:\| *)?(?P<heading>[^()|]{1,60}?(?:\d|\)|idle|active)\]?\*{0,2})"
    r"(?::\s+| *\| +| +(?:→|->|=>) +|\s+" + WAITS + r"\s+|"
    r"(?<=\d\]) )(?:\"?MainThread\"?(?: *[:|] *| ))?(?P<rest>\S.*?)(?: *\|)?$"
)


def parse_stacks_text(text: str) -> list[Section]:
    """Return the processes found in a text, in order; an empty list where it has no stacks.

    Ranks of one job differ in their process and thread numbers only, so a plain py-spy text is
    looked up by what is left when these are blanked.
    """
    text = LOCALS.sub("", ANSI.sub("", text).replace("\r\n", "\n"))
    text = with_json(with_austin(text))
    plain = PROCESS.match(text)
    if plain is None or len(PROCESS.findall(text)) > 1:
        return parse_any(text)
    pid = plain[1]
    shape = THREAD_ID.sub(lambda m: f"Thread {1 if m[1] == pid else 0} (", text[plain.end() :])
    return [
        replace(s, pid=int(pid[:9]), command=plain[2] or "", threads=list(s.threads))
        for s in sections_of_shape(shape)
    ]


def with_austin(text: str) -> str:
    """Return a text in which the first sample of each thread of austin is a stack of py-spy."""
    seen: set[str] = set()

    def stack(match: re.Match[str]) -> str:
        pid, thread, places = match.groups()
        is_new, heading = f"{pid};{thread}" not in seen, "" if pid in seen else f"Process {pid}:\n"
        seen.update((pid, f"{pid};{thread}"))
        name = "MainThread" if thread.rpartition(":")[2] == pid else ""
        pieces = (place.rsplit(":", 2) for place in reversed(places.split(";")) if place.count(":") > 1)
        frames = "\n".join(f"    {function} ({file}:{line})" for file, function, line in pieces)
        return f'{heading}Thread {pid} (active): "{name}"\n{frames}' if is_new else ""

    return AUSTIN.sub(stack, text)


def with_json(text: str) -> str:
    """Return a text in which each JSON document of py-spy is its text."""
    for found in reversed(list(JSON_THREADS.finditer(text))):
        with suppress(ValueError):
            _, end = json.JSONDecoder().raw_decode(text, found.start())
            pid, threads = parse_stacks_json(text[found.start() : end])
            stacks = f"Process {pid}:\n"
            for thread in threads:
                stacks += f'Thread {pid} ({"active" if thread.active else "idle"}): "{thread.name or ""}"\n'
                stacks += "".join(f"    {f.function} ({f.file}:{f.line})\n" for f in thread.frames)
            text = text[: found.start()] + stacks + text[end:]
    return text


@lru_cache(maxsize=1024)
def sections_of_shape(text: str) -> list[Section]:
    """Return sections of one process with blanked numbers: the main thread, where it is known, is
    number 1.
    """
    return parse_any("Process 1\n" + text)


def parse_any(text: str) -> list[Section]:
    sections: list[Section] = []
    for writer, lines in streams(text):
        found = read_sections(lines)
        for section in found:
            if not section.ranks and isinstance(writer, int):
                section.ranks = (writer,)
            elif isinstance(writer, str):
                section.pid = section.pid or int(writer)
        sections += found
    return sections


def streams(text: str) -> Iterable[tuple[int | str | None, list[str]]]:
    """Yield lines by the rank, or the process number as text, in their prefix; prefixes removed."""
    lines = [line[:MAX_LINE] for line in text.split("\n")]
    if all(HOST.match(line) for line in lines if line.strip(" \t`")):
        by_host: dict[str, list[str]] = {}
        for found in filter(None, map(HOST.match, lines)):
            by_host.setdefault(found["host"], []).append(found["rest"] or "")
        yield from ((None, printed) for printed in by_host.values())
        return
    matches = [PREFIX.match(line) for line in lines] if MAYBE_PREFIXED.search(text) else []
    if sum(map(bool, matches)) * 2 <= sum(1 for line in lines if line.strip()):
        yield None, lines
        return
    by_writer: dict[int | str | None, list[str]] = {}
    for line, match in zip(lines, matches, strict=True):
        rest = line[match.end() :] if match else line
        by_writer.setdefault(writer_of(match) if match else None, []).append(rest)
    one = len(set(by_writer) - {None}) == 1
    if one and any(m and (m["compose"] or m["pod"]) for m in matches):
        yield None, [line for lines in by_writer.values() for line in lines]  # a container of all ranks
        return
    yield from by_writer.items()


def writer_of(match: re.Match[str]) -> int | str | None:
    """Return the rank in a prefix, else its process number as text."""
    ranks = ("torchrun", "ray", "worker", "srun", "mpi", "compose", "pod", "said")
    number = next((match[name] for name in ranks if match[name]), None)
    return int(number[:9]) if number else match["pid"] and match["pid"][:9]


@lru_cache(maxsize=4096)
def is_prose(shape: str, logged: bool) -> bool:
    """Return whether a line of this shape can mean nothing but a refusal."""
    of_tools = frame_of(shape) or section_header(shape, Section()) or thread_header(shape)
    of_people = not logged and (loose_frames(shape) or bare_name(shape) or INLINE.match(shape))
    return not (of_tools or of_people or INTERRUPT.match(shape))


class Reader:
    """The state machine: headings open sections and threads, frames go to the open thread."""

    def __init__(self) -> None:
        self.sections = [Section()]
        self.thread: OpenThread | None = None

    def close(self) -> None:
        """End the open thread; keep it if it is a stack."""
        thread, self.thread = self.thread, None
        if thread is None or not thread.frames or thread.exception:
            return
        if thread.tentative and thread.loose and len(thread.frames) < 2:
            return  # `train.py:3 warning` in a log
        self.sections[-1].threads.append(thread.close(self.sections[-1].pid))

    def open(self, thread: OpenThread) -> None:
        """Begin a thread; a second main thread is that of another process."""
        self.close()
        threads = self.sections[-1].threads
        names = [known.name for known in threads]
        if thread.below_native and threads and all(frame.native for frame in threads[-1].frames):
            thread.frames += threads.pop().frames  # gdb's `bt` and then `py-bt` of one thread
        if thread.name == "MainThread" and "MainThread" in names:
            self.sections.append(Section())
        self.thread = thread

    def frames(self, frames: tuple[Frame, ...], loose: bool, ordered: bool = True) -> None:
        """Add frames; without an open thread they begin a stack without a heading."""
        if self.thread is None:
            if self.sections[-1].threads and not self.sections[-1].headed:
                self.sections.append(Section())
            self.thread = OpenThread(
                tentative=not self.sections[-1].headed,
                outermost_first=not ordered and not self.sections[-1].headed,
            )
        self.thread.loose = self.thread.loose and loose and len(frames) < 2
        if len(self.thread.frames) < MAX_FRAMES:
            self.thread.frames += frames

    def line(self, line: str, shape: str, logged: bool) -> None:
        """Read one line without spaces around it; what a logger wrote is no frame of a person."""
        if not line:
            if self.thread is not None and self.thread.tentative:
                self.close()
            return
        if line.startswith("frame #") and "`" not in line:
            return  # of a C++ exception: where it was thrown, such as in a watchdog, is no wait
        if ("LWP" in line or "(process" in line) and (row := GDB_ROW.match(line)):
            self.row(row)
            return
        if line[-1] != ")" and is_prose(shape, logged) and not self.refused(line):
            return
        frame = frame_of(line)
        if frame is not None:
            weak = (not frame.line and not frame.native) or frame.file == "?"
            self.frames((frame,), loose=weak, ordered=not (line.startswith("File") and ", in " in line))
            return
        if (opened := thread_header(line)) is not None:
            self.open(opened)
        elif (section := section_header(line, self.sections[-1])) is not None:
            self.close()
            self.sections.append(section)
        elif self.thread is not None and self.thread.exception and INTERRUPT.match(line):
            self.thread.exception = False
            self.close()
        elif self.refused(line):
            self.sections[-1].message += f"{line}\n"
        elif not logged:
            self.pasted(line)

    def row(self, row: re.Match[str]) -> None:
        """Read a row of `info threads`; gdb's first thread is the main one."""
        name = "MainThread" if row["number"] == "1" else row["name"]
        self.open(OpenThread(name, int(row["id"])))
        if frame := frame_of(f"#0 {row['frame']}"):
            self.frames((frame,), loose=False)
        self.close()

    def pasted(self, line: str) -> None:
        """Read the forms of people, which a program's log may have by chance."""
        if loose := loose_frames(line):
            self.frames(loose, loose=True)
        elif self.sections[-1].headed and not self.has_lines() and (name := bare_name(line)):
            self.frames((name,), loose=False)
        elif (match := INLINE.match(line)) and not match["heading"].isdecimal():
            section = section_header(f"{match['heading']}:", self.sections[-1])
            if section is not None:
                self.inline(section, match["rest"])

    def has_lines(self) -> bool:
        """True if the open thread shows lines: between them is the program's own text."""
        return self.thread is not None and any(frame.line for frame in self.thread.frames[-1:])

    def refused(self, line: str) -> bool:
        """True for the lines that py-spy prints in place of the stack of a headed process."""
        section = self.sections[-1]
        empty = section.headed and not section.threads and self.thread is None
        return empty and len(section.message) < MAX_LINE and bool(section.message or REFUSAL.match(line))

    def inline(self, section: Section, rest: str) -> None:
        """Read a heading and a thread, or its frames, on one line: `rank 3: barrier (train.py:7)`."""
        if thread := thread_header(rest):
            self.close()
            self.sections.append(section)
            self.open(thread)
            return
        rest = WAITING.sub("", rest)
        frame = frame_of(rest) or (bare_name(rest) if "-" not in rest else None)
        found = (frame,) if frame else loose_frames(rest)
        if found and self.thread is None:
            self.sections.append(section)
            self.frames(found, loose=False)
            self.close()


def read_sections(lines: list[str]) -> list[Section]:
    reader = Reader()
    stripped = [line.strip() for line in lines]
    bare = [CLOCK.sub("", line) if line[:1] in CLOCKS else line for line in stripped]
    for line, shape, raw in zip(bare, shapes_of(bare), stripped, strict=True):
        reader.line(line, shape, logged=line != raw)
    reader.close()
    found = [section for section in reader.sections if section.threads or section.message]
    if not found or found[0].headed or found[0].pid or not all(s.pid for s in found[1:]):
        return found
    # the end of a process whose beginning was cut off
    whole = any(t.name == "MainThread" or t.frames[-1].function == "<module>" for t in found[0].threads)
    return found if whole or len(found) == 1 else found[1:]
