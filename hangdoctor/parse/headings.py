"""The lines above a stack: whose process it is, which thread, and in which order the frames come.

=== Rank 3: host:1 === | [rank 3] | # Rank 3 | idle: rank 3 | rank 3 (idle): | ranks 0-2, 5:
GPU 3 | TP3 | PP1_TP0 | stage 1        a position that sorts like a rank
7 ranks: | 12 in: | 3x | all 8 ranks   how many processes have the stack
all ranks | the other ranks            everybody, or everybody who is not named
engine 1: | trainer rank 0             a rank of another role
Process 12: | PID 12                   a process without a rank

A line that ends in a colon or begins like a comment may say more (`# Ranks that left early:`);
other prose about a rank opens nothing.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from hangdoctor.model import Frame, Thread
from hangdoctor.parse.location import ROLES

MAX_RANKS = 200_000
Whose = Literal["named", "everybody", "others"]

# of py-spy, and of `ray stack` before a row of `ps aux`
PROCESS = re.compile(
    r"^(?:Process|Stack dump for \S+) +(\d+)(?:(?:: *|  *[\d.]+ .*\d:\d\d +| (?=\())(?P<command>.*))?$", re.M
)
# a command that somebody pasted with what it printed
DUMPED = re.compile(
    r"^(?:.{0,60}[$#] )?(?:sudo )?(?:py-spy dump|pystack remote)(?: -[\w\-]+)*[ =](\d{1,9})\b"
)
SENTENCE = re.compile(r"(?<=[\w%)]\.) +(?=[Rr]anks? \d)")  # `All is idle. Rank 3:`
TAG = re.compile(r"</?(?:details|summary|b|code|pre|h\d|p|br)>")
ROLE_WORDS = "|".join(sorted((role for role in ROLES if role not in ("train", "ref")), key=len, reverse=True))
NUMBERS = r"[\[({]?(\d[\d ,.\-–&]*(?:(?:and|to|through) \d+)?)[\])}]?"
WORDS_BEFORE = (
    r"py-?spy|dump|dumps|stack|stacks|stacktrace|trace|traceback|output|process|worker|thread|main|of|for|from|on|in|at|"
    r"the|idle|active|waiting|hung|stuck|blocked|running|global|python|gdb|bt|this is|here is|call|backtrace|pid \d+"
)
WORDS_BEHIND = (
    r" ?\([^()]*\)|:? ?\"[\w ]+\"| ?[,;] ?(?:pid|host|node|local).{0,40}| on (?:host |node )?\S+| (?:stacks?|traces?|dumps?|backtrace)|"
    r"[ ,:]+(?:is |are |all )?(?:idle|active|waiting|stuck|hung|blocked|running|hangs?)(?: here| for [\d.]+ ?\w+)?|"
    r" ?(?:/|of) ?\d+|: \S+:\d+"
)
RANKS = re.compile(
    rf"^(?:(?:{WORDS_BEFORE})[:, ] ?){{0,4}}(?:[\w.\-]{{1,40}}/)?(?:({ROLE_WORDS})[ _])?(?:local[_ ]|global[_ ])?"
    rf"ranks?[ _:=#\-]*{NUMBERS}(?:{WORDS_BEHIND}){{0,3}}$",
    re.IGNORECASE,
)
# `第 7 卡停在`, `0-6 号卡都在`, `rank 3 卡在`, also behind another clause
CARDS = re.compile(
    rf"^(?:.*[，。；])? ?(?:ranks?[ _]?{NUMBERS}|(?:第 ?)?{NUMBERS} ?(?:号|张)?(?:卡|ranks?|进程)) ?"
    r"(?:都|均|全|则|一直)?(?:卡|停|在|等|阻塞|处于|的)?(?:住|在|待|堆栈|调用栈|如下|这里)*$",
    re.IGNORECASE,
)
# `# rank 3 waits for the save`, `rank 3 is here:`
SAID_RANKS = re.compile(rf"(?<!node[-_ ])(?<!machine[-_ ])\branks?[ _:=#\-]*{NUMBERS}", re.IGNORECASE)
# `Node 3, local rank 5 (global rank 29) stack:`
GLOBAL_RANK = re.compile(r"\blocal.*\bglobal[ _]rank[ _:=#]*(\d{1,6})\b", re.IGNORECASE)
# `py-spy shows all 8 TP ranks in one place:`
SAID_COUNT = re.compile(r"\ball (\d{1,6}) (?:\w+ )?(?:ranks|processes|workers|gpus)\b", re.IGNORECASE)
ABOUT_RANKS = re.compile(r"\b(?:ranks?|process(?:es)?|workers?|gpus?)\b", re.IGNORECASE)
# `on node-3 (rank 24-31) py-spy shows`, `while ranks 0-7 are here`: prose that leads to frames
LEADS_IN = re.compile(
    r"^(?:on|while|and|but|the|whereas|meanwhile|then|also|now|here)\b.*(?:\b(?:here|shows?|stack|stuck|at|in|this|below)|\))$",
    re.I,
)
LOGGED = re.compile(r"error|exception|warning|timeout|\b\d+\.\d+\b|https?:", re.IGNORECASE)
POSITION = re.compile(
    r"^(?:gpu|cuda|device|(?:pp |pipeline )?stage|worker|process|proc|r)[ #:=]*(\d{1,5})(?: ?\([^()]*\)| timed out.{0,40})?$",
    re.I,
)
ONE_COORDINATE = re.compile(r"^(?:DP|PP|TP|EP)[ _:=]?(\d{1,5} ?(?:-|–|to) ?\d{1,5}|\d{1,5})$", re.IGNORECASE)
COORDINATES = re.compile(r"^(?:(?:DP|PP|TP|EP)[ _:=]?\d{1,5}[ _,/]?){1,4}$", re.IGNORECASE)
ROLE = re.compile(
    rf"^(?:the )?({ROLE_WORDS})(?: (?:process|worker|server|engine|side|rank))*(?:[ _#:=]*(\d{{1,5}}))?(?: ?\([^()]*\))?$",
    re.IGNORECASE,
)
# Posts that show equal stacks once: `12 in:`, `7 ranks:`, `7 of 8 ranks`, `3x`.
COUNTED = re.compile(
    r"^(?:all )?(\d{1,6}) ?(?:(?:(?:of|/) ?(?:the )?\d+ )?(?:other )?"
    r"(?:ranks?|process(?:es)?|procs?|gpus?|workers?)(?: ?(?:in|at|are|show).{0,40})?|in|x|×)$",
    re.IGNORECASE,
)
EVERYBODY = re.compile(
    r"^(?:on )?(?:all|every|each)(?: of)?(?: the)? (?:ranks?|processes|process|gpus?|workers?)\b.{0,60}$",
    re.IGNORECASE,
)
OTHERS = re.compile(
    r"^collective stack trace$|^(?:on )?(?:(?:all|every)(?: of)?(?: the)? |the )?(?:(?:other|remaining|rest)(?:s| of)?(?: the)?"
    r"(?: (?:ranks?|processes|gpus?|workers?))?|其[他余]的? ?(?:卡|ranks?|进程)都?(?:停|卡|在)?在?|"
    r"(?:ranks?|processes|gpus?|workers?) (?:except|but) [\w ,]{1,40})"
    r"(?: ?\([^()]*\)| (?:are|show|wait|in|at).{0,40})?$",
    re.IGNORECASE,
)
PID = re.compile(r"^(?:pid|process id)[ :=#]*(\d{1,9})(?: ?\([^()]*\))?$", re.IGNORECASE)
STATE = re.compile(r"\b(idle|active|running)\b", re.IGNORECASE)
DECORATION = "=-#*[]<>:：_`•►▶| \t/"

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
    r'^Thread \d+ \((?:Thread 0x[0-9a-f]+ )?(?:"(?P<first>[^"]*)" )?\(?(?:LWP|process) (?P<id>\d+)\)?\)?(?: "(?P<name>[^"]*)")?.*:?$'
)
# A row of gdb's `info threads`: a thread and its innermost frame.
GDB_ROW = re.compile(
    r"^(?:\* )?(?P<number>\d{1,6}) +(?:Thread 0x[0-9a-f]+ )?\(?(?:LWP|process) (?P<id>\d{1,9})\)?"
    r'(?: "(?P<name>[^"]*)")? +(?P<frame>(?:0x[0-9a-f]+ in )?[\w~<][^()]* \(.*)$'
)
TRACEBACK = re.compile(r"^(?:\^C|Original )?Traceback \(most recent call (?P<order>first|last)\):")
# Written by people and by programs that format `sys._current_frames()`.
OTHER_THREAD = re.compile(
    r"^(?:(?:stack|stacks|traceback) (?:of|for) )?thread(?: ?id)?[ :#]*(?P<rest>(?=[^ ])(?:.*\b(?:idle|active|running|MainThread)\b.*|"
    r"\"[^\"]+\".*|0x[0-9a-f]+.{0,60}|\d+.{0,60}|Thread-\d+.{0,60}))$",
    re.IGNORECASE,
)
BARE_MAIN = re.compile(
    r'^"?(?:MainThread|main thread)"?(?: \((?P<state>idle|active|active\+gil)\))?$', re.IGNORECASE
)


@dataclass(slots=True)
class Section:
    """One process in a text. `ranks` is empty where the text names none; `count` is how many
    processes are reported to have this stack, 0 where a heading does not say; `whose` says whether
    the heading names them.
    """

    ranks: tuple[int, ...] = ()
    role: str | None = None
    pid: int | None = None
    command: str = ""
    threads: list[Thread] = field(default_factory=list)
    count: int = 1
    whose: Whose = "named"
    headed: bool = False
    message: str = ""


@dataclass(slots=True)
class OpenThread:
    """A thread whose frames are still being read. `tentative` is one without a heading; the C
    frames of one that is `below_native` may be printed above it.
    """

    name: str | None = None
    os_id: int | None = None
    active: bool | None = None
    holds_gil: bool | None = None
    waits_for_gil: bool | None = None
    outermost_first: bool = False
    exception: bool = False
    tentative: bool = False
    below_native: bool = False
    loose: bool = True
    frames: list[Frame] = field(default_factory=list)

    def close(self, pid: int | None) -> Thread:
        """Return the finished thread; `pid` identifies the main thread."""
        frames = tuple(reversed(self.frames)) if self.turned() else tuple(self.frames)
        name = "MainThread" if self.os_id is not None and self.os_id == pid else self.name
        return Thread(frames, name, self.active, self.holds_gil, self.waits_for_gil)

    def turned(self) -> bool:
        """True if the outermost frame comes first: an entry frame at one end decides."""
        first, last = self.frames[0].function, self.frames[-1].function
        if (first in ENTRIES) != (last in ENTRIES):
            return first in ENTRIES
        return self.outermost_first


ENTRIES = ("<module>", "_bootstrap", "_run_module_as_main", "main")


def section_header(line: str, current: Section) -> Section | None:
    """Return a new process where the line opens one; ranks of a heading before it are kept."""
    if (match := PROCESS.match(line)) or (match := DUMPED.match(line)):
        heading = current if current.headed and not current.threads else Section()
        pid, command = int(match[1][:9]), match.groupdict().get("command") or ""
        return replace(heading, pid=pid, command=command, threads=[], headed=True, message="")
    bare = SENTENCE.split(TAG.sub("", line))[-1].strip(DECORATION)
    if not bare or len(line) > 200:
        return None
    if line == f"{bare}:" and bare.isdecimal() and len(bare) < 4:  # below `ranks:`
        return Section((int(bare),), headed=True)
    said = line[0] in "#/=*$" or line.startswith((">>>", "---")) or line.rstrip("`* ").endswith(":")
    said = said or (len(bare) < 100 and LEADS_IN.match(bare) is not None)
    return named_header(bare, said)


def named_header(bare: str, said: bool) -> Section | None:
    if "ank" in bare.lower():
        if match := GLOBAL_RANK.search(bare):
            return Section((int(match[1]),), headed=True)
        if match := RANKS.match(bare):
            return Section(numbers_in(match[2]), match[1].lower() if match[1] else None, headed=True)
    if match := CARDS.match(bare):
        return Section(numbers_in(match[1] or match[2]), headed=True)
    if match := POSITION.match(bare):
        return Section((int(match[1]),), headed=True) if said or bare[:3].lower() in ("gpu", "sta") else None
    if match := ONE_COORDINATE.match(bare):
        return Section(numbers_in(match[1]), headed=True)
    if COORDINATES.match(bare):
        names = re.findall(r"([A-Z]{2})[ _:=]?(\d{1,5})", bare.upper())
        return Section(command="::" + "".join(f"_{name}{number}" for name, number in names), headed=True)
    if said and (match := ROLE.match(bare)):
        return Section((int(match[2] or 0),), match[1].lower(), headed=True)
    if match := PID.match(bare):
        return Section(pid=int(match[1]), headed=True)
    if OTHERS.match(bare) and (said or len(bare) < 40):
        return Section(whose="others", headed=True)
    if EVERYBODY.match(bare) and (said or len(bare) < 40):
        return Section(whose="everybody", headed=True)
    if said and ABOUT_RANKS.search(bare) and not COUNTED.match(bare) and not LOGGED.search(bare):
        if match := SAID_COUNT.search(bare):
            return Section(count=min(int(match[1]), MAX_RANKS), headed=True)
        match = SAID_RANKS.search(bare)
        return Section(numbers_in(match[1]) if match else (), headed=True)
    counted = COUNTED.match(bare)
    return Section(count=min(int(counted[1]), MAX_RANKS), headed=True) if counted else None


def numbers_in(text: str) -> tuple[int, ...]:
    """Parse `0-2, 5 and 7` as (0, 1, 2, 5, 7); of a range longer than any job only the two ends
    count.
    """
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)\s*(?:(?:-|–|\.\.+|to|through)\s*(\d+))?", text):
        low, high = int(first[:9]), int((last or first)[:9])
        found |= set(range(low, high + 1)) if 0 <= high - low < MAX_RANKS else {low, high}
    return tuple(sorted(found))


def thread_header(line: str) -> OpenThread | None:
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
    if (
        line.startswith("Thread ")
        and ("LWP" in line or "(process" in line)
        and (match := GDB_THREAD.match(line))
    ):
        return OpenThread(match["name"] or match["first"], int(match["id"]))
    if match := TRACEBACK.match(line):
        # `last` is the traceback of a printed exception: its frames have ended, unless it was
        # raised by an interrupt from outside.
        last = match["order"] == "last"
        return OpenThread(exception=last, outermost_first=last, below_native=not last)
    return other_thread(line.strip(DECORATION)) if "hread" in line[:60] and len(line) < 200 else None


def other_thread(bare: str) -> OpenThread | None:
    if match := BARE_MAIN.match(bare):
        return OpenThread("MainThread", active="active" in (match["state"] or "") or None)
    match = OTHER_THREAD.match(bare)
    if match is None:
        return None
    rest = match["rest"]
    state = STATE.search(rest)
    name = re.search(r'"([^"]+)"|\b(MainThread|Thread-\d+(?: \([\w.]+\))?)', rest)
    return OpenThread(
        (name[1] or name[2]) if name else None,
        active=(state is not None and state[1].lower() != "idle") or None,
    )
