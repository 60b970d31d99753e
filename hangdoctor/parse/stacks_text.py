"""Stacks as text, of every era: py-spy, faulthandler, pystack, gdb, torch's debug server, and logs
that contain them.

One pass over the lines. A header opens a process, a rank or a thread; the shape of a frame line
defines in which order the format prints frames; what is neither is prose and is skipped.

Process 12: python t.py                 py-spy        `f (file.py:3)`, innermost first
Thread 12 (idle): "MainThread"
Thread 0x7f.. (most recent call first): faulthandler  `File "f.py", line 3 in f`, innermost first
Traceback for thread 12 [Has the GIL] (most recent call last):
                                        pystack       `(Python) File ..`, outermost first
Thread 2 (Thread 0x7f.. (LWP 12) "x"):  gdb           `#0 .. in f () from lib`, innermost first
Traceback (most recent call first|last):              gdb's `py-bt` | Python
=== Rank 3 === | [rank3]: | Ranks 0-2:                the rank whose stack follows
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from hangdoctor.model import Frame, Thread
from hangdoctor.parse.stacks_json import is_native_file

MAX_LINE = 4096
MAX_FRAMES = 2000
MAX_RANKS = 200_000
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PREFIX = re.compile(
    r"^\s*(?:\[(?:default|rank)(\d+)\]:?|\(\w[\w.]* (?:rank|pid)=(?:\d+)[^)]*\)|(\d{1,6}):) ?"
)
CLOCK = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,\d]*(?: \w+)?\]? ?(?:\w+ )?(?=Thread|File|Process)"
)

PROCESS = re.compile(r"^Process (\d+)(?::[ \t]*(.*))?$", re.M)
THREAD_ID = re.compile(r"^Thread (0x[0-9A-Fa-f]+|\d+) \(", re.M)
RANKS = re.compile(
    r"^(?:(?:py-?spy|dump|stack|stacks|stacktrace|trace|traceback|output|process|worker|of|for|from) ){0,3}"
    r"(?:(engine|reference|reward|proxy|trainer|actor|rollout)[ _])?ranks?[ _:=#]*"
    r"(\d[\d ,.\-–&]*(?:(?:and|to) \d+)?)(?: ?\([^()]*\)| ?[,;] ?pid.{0,20}| on (?:host )?\S+| (?:stack|stacks|trace|dump)s?)?$",
    re.IGNORECASE,
)
# Posts that show equal stacks once: `12 in:`, `7 ranks:`, `3x`.
COUNTED = re.compile(r"^(\d{1,6}) ?(?:(?:ranks|processes|procs|gpus) ?(?:in|at)?|in|x|×) ?:?$", re.IGNORECASE)
SPY_THREAD = re.compile(
    r"^Thread (?P<id>0x[0-9A-Fa-f]+|\d+|\w[\w\- ]*?) \((?P<state>idle|active|active\+gil|idle\+gil)\)"
    r'(?:: ?"?(?P<name>.*?)"?|:)?$'
)
FAULT_THREAD = re.compile(
    r"^(?:Current t|T)hread (?P<id>0x[0-9A-Fa-f]+)(?: \[(?P<name>[^\]]*)\])?"
    r"(?: \(most recent call first\))?:?$"
)
STACK_THREAD = re.compile(
    r"^Traceback for thread (?P<id>\d+)(?: \((?P<name>[^)]*)\))?(?: \[(?P<flags>[^\]]*)\])? ?"
    r"\(most recent call last\):"
)
GDB_THREAD = re.compile(
    r'^Thread \d+ \((?:Thread 0x[0-9a-f]+ )?\(?LWP (?P<id>\d+)\)?\)?(?: "(?P<name>[^"]*)")?.*:?$'
)
TRACEBACK = re.compile(r"^Traceback \(most recent call (?P<order>first|last)\):")

FILE_FRAME = re.compile(
    r'^(?:\((?P<kind>Python|C)\) )?File "(?P<file>[^"]*)", line (?P<line>\d+|\?+)(?:,? in (?P<function>.+))?$'
)
GDB_FRAME = re.compile(
    r"^#(?P<n>\d+) +(?:0x[0-9a-f]+ in )?(?P<function>.+?) \(.*\)"
    r"(?: from (?P<library>\S+)| at (?P<file>\S+?):(?P<line>\d+))?$"
)
GDB_PYTHON = re.compile(
    r"Frame 0x[0-9a-f]+, for file (?P<file>[^,]+), line (?P<line>\d+), in (?P<function>[^ (]+)"
)
WATCHDOG_FRAME = re.compile(r"^#(?P<n>\d+) (?P<function>\S+) from (?P<file>[^ ]+):(?P<line>\d+)$")
LINE_SUFFIX = re.compile(r"^(.*):(\d+)$")


@dataclass(slots=True)
class Section:
    """One process in a text. `ranks` is empty where the text names none; `count` is how many
    processes are reported to have this stack.
    """

    ranks: tuple[int, ...] = ()
    role: str | None = None
    pid: int | None = None
    command: str = ""
    threads: list[Thread] = field(default_factory=list)
    count: int = 1


@dataclass(slots=True)
class OpenThread:
    """A thread whose frames are still being read."""

    name: str | None = None
    os_id: int | None = None
    active: bool | None = None
    holds_gil: bool | None = None
    waits_for_gil: bool | None = None
    outermost_first: bool = False
    exception: bool = False
    frames: list[Frame] = field(default_factory=list)

    def close(self, pid: int | None) -> Thread:
        """Return the finished thread; `pid` identifies the main thread."""
        frames = tuple(reversed(self.frames)) if self.outermost_first else tuple(self.frames)
        name = "MainThread" if self.os_id is not None and self.os_id == pid else self.name
        return Thread(frames, name, self.active, self.holds_gil, self.waits_for_gil)


def parse_stacks_text(text: str) -> list[Section]:
    """Return the processes found in a text, in order; an empty list where it has no stacks.

    Ranks of one job differ in their process and thread numbers only, so a plain py-spy text is
    looked up by what is left when these are blanked.
    """
    text = ANSI.sub("", text).replace("\r\n", "\n")
    plain = PROCESS.match(text)
    if plain is None or len(re.findall(r"^Process \d", text, re.M)) > 1:
        return parse_any(text)
    pid = plain[1]
    shape = THREAD_ID.sub(lambda m: f"Thread {1 if m[1] == pid else 0} (", text[plain.end() :])
    return [
        Section((), None, int(pid[:9]), plain[2] or "", list(s.threads)) for s in sections_of_shape(shape)
    ]


@lru_cache(maxsize=1024)
def sections_of_shape(text: str) -> list[Section]:
    """Return sections of one process with blanked numbers: the main thread, where it is known, is
    number 1.
    """
    return parse_any("Process 1\n" + text)


def parse_any(text: str) -> list[Section]:
    """Return the sections of a text without the cache."""
    sections: list[Section] = []
    for rank, lines in streams(text):
        found = read_sections(lines)
        for section in found:
            if not section.ranks and rank is not None:
                section.ranks = (rank,)
        sections += found
    return sections


def streams(text: str) -> Iterable[tuple[int | None, list[str]]]:
    """Yield lines by the rank in their prefix (`[rank3]:`, `[default3]:`, srun's `3:`), prefixes
    removed.
    """
    lines = [line[:MAX_LINE] for line in text.split("\n")]
    matches = (
        [PREFIX.match(line) for line in lines] if "]" in text or re.search(r"^\s*\d+: ", text, re.M) else []
    )
    if sum(map(bool, matches)) * 2 <= sum(1 for line in lines if line.strip()):
        yield None, lines
        return
    by_rank: dict[int | None, list[str]] = {}
    for line, match in zip(lines, matches, strict=True):
        number = (match[1] or match[2]) if match else None
        rest = line[match.end() :] if match else line
        by_rank.setdefault(int(number) if number else None, []).append(rest)
    yield from by_rank.items()


def read_sections(lines: list[str]) -> list[Section]:
    """Run the state machine: headers open sections and threads, frames go to the open thread."""
    sections = [Section()]
    thread: OpenThread | None = None

    def close() -> None:
        if thread is not None and thread.frames and not thread.exception:
            sections[-1].threads.append(thread.close(sections[-1].pid))

    for raw in lines:
        line = CLOCK.sub("", raw.strip())
        if not line:
            continue
        frame = frame_of(line)
        if frame is not None:
            if thread is None and (frame.line or sections[-1].ranks):
                thread = OpenThread()
            if thread is not None and len(thread.frames) < MAX_FRAMES:
                thread.frames.append(frame)
            continue
        section, opened = section_header(line, sections[-1]), thread_header(line)
        if section is not None:
            close()
            thread = None
            sections.append(section)
        elif opened is not None:
            close()
            thread = opened
    close()
    return [section for section in sections if section.threads]


def section_header(line: str, current: Section) -> Section | None:
    """Return a new process where the line opens one; ranks of a heading before it are kept."""
    if match := PROCESS.match(line):
        heading = current if not current.threads else Section()
        return Section(heading.ranks, heading.role, int(match[1]), match[2] or "")
    if "ank" in line[:60] and len(line) < 200 and (match := RANKS.match(line.strip("=-#*[]<>:_ `"))):
        return Section(numbers_in(match[2]), match[1].lower() if match[1] else None)
    if line[0].isdigit() and (match := COUNTED.match(line)):
        return Section(count=min(int(match[1]), MAX_RANKS))
    return None


def numbers_in(text: str) -> tuple[int, ...]:
    """Parse `0-2, 5 and 7` as (0, 1, 2, 5, 7); of a range longer than any job only the two ends
    count.
    """
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)\s*(?:(?:-|–|\.\.|to)\s*(\d+))?", text):
        low, high = int(first[:9]), int((last or first)[:9])
        found |= set(range(low, high + 1)) if 0 <= high - low < MAX_RANKS else {low, high}
    return tuple(sorted(found))


def thread_header(line: str) -> OpenThread | None:
    """Return a new thread where the line opens one, in any of the formats."""
    if match := SPY_THREAD.match(line):
        known = match["id"]
        digits = int(known) if known.isdecimal() else None
        word = known if not known.isdecimal() and not known.startswith("0x") else None
        return OpenThread(match["name"] or word, digits, "active" in match["state"], "gil" in match["state"])
    if match := FAULT_THREAD.match(line):
        return OpenThread(match["name"] or None)
    if match := STACK_THREAD.match(line):
        flags = match["flags"] or ""
        return OpenThread(
            match["name"],
            int(match["id"]),
            holds_gil="Has the GIL" in flags,
            waits_for_gil="Waiting for the GIL" in flags,
            outermost_first=True,
        )
    if line.startswith("Thread ") and "LWP" in line and (match := GDB_THREAD.match(line)):
        return OpenThread(match["name"], int(match["id"]))
    if match := TRACEBACK.match(line):
        # `last` is the traceback of a printed exception: its frames have ended.
        return OpenThread(exception=match["order"] == "last")
    return None


@lru_cache(maxsize=65536)
def frame_of(line: str) -> Frame | None:
    """Return the frame that a stripped line shows, or None."""
    if 'File "' in line and (match := FILE_FRAME.match(line)):
        number = match["line"]
        return Frame(
            (match["function"] or "<unknown>").strip(),
            match["file"],
            int(number[:9]) if number.isdecimal() else 0,
            match["kind"] == "C" or is_native_file(match["file"]),
        )
    if line.startswith("#"):
        return numbered_frame(line)
    if line.endswith(")") and " (" in line and not line.startswith(("Thread ", "Process ", "Traceback ")):
        function, _, place = line[:-1].rpartition(" (")
        match = LINE_SUFFIX.match(place)
        file, number = (match[1], int(match[2][:9])) if match else (place, 0)
        native = is_native_file(file)
        if looks_like_location(file, native) and function:
            return Frame(function, file, number, native)
    return None


def numbered_frame(line: str) -> Frame | None:
    """Parse frames of gdb (`#3 0x.. in f () from lib.so`, `#5 Frame 0x.., for file f.py`) and of
    the NCCL watchdog (`#0 f from f.py:3`).
    """
    if match := GDB_PYTHON.search(line):
        return Frame(match["function"], match["file"], int(match["line"][:9]))
    if match := WATCHDOG_FRAME.match(line):
        return Frame(match["function"], match["file"], int(match["line"][:9]), is_native_file(match["file"]))
    if match := GDB_FRAME.match(line):
        return Frame(
            match["function"], match["library"] or match["file"] or "?", int((match["line"] or "0")[:9]), True
        )
    return None


def looks_like_location(file: str, native: bool) -> bool:
    """True if the text in the last parentheses can be a file: prose in brackets must not become a
    frame.
    """
    if not native:
        return " " not in file or "/" in file or file.startswith("<")
    return (
        file == "?"
        or ".so" in file
        or file.endswith((".cpp", ".cc", ".c", ".cu", ".h", ".hpp", ".rs", "]"))
        or (" " not in file and file.startswith("python"))
    )
