"""One line of text to one frame, in the form of any tool or person.

f (file.py:3)                      py-spy; `(file.py)` without a line, `sym (lib.so)` for C
File "f.py", line 3[,] in f        faulthandler, traceback, pystack
#3 0x.. in f () from lib.so        gdb; `#5 Frame 0x.., for file f.py, line 3, in f`
#0 f from f.py:3                   NCCL watchdog
f.py:3 f | f at f.py:3 | f@f.py:3  people (`loose`: a single one of these in a log is no stack)
f <- g <- h | h -> g -> f          people, a stack on one line; `f (f.py:3) in g (g.py:7)`

Bullets, tree lines, quote marks and what follows an arrow or a hash behind a frame are decoration.
"""

import re
from functools import lru_cache

from hangdoctor.frames import TABLES
from hangdoctor.model import Frame
from hangdoctor.parse.stacks_json import is_native_file

MAX_LOOSE = 300
SOURCE = r"(?:py|pyx|pyi|ipynb|cpp|cc|cxx|cu|c|h|hpp|rs)"
FILE_FRAME = re.compile(
    r'^(?:\((?P<kind>Python|C)\) )?File:? ?"(?P<file>[^"]*)", line (?P<line>\d+|\?+)(?:(?P<comma>,)? in (?P<function>.+))?$'
)
GDB_FRAME = re.compile(
    r"^#(?P<n>\d+) +(?:0x[0-9a-f]+ in )?(?P<function>.+?) \(.*?\)"
    r"(?: from (?P<library>\S+)| at (?P<file>\S+?):(?P<line>\d+))?$"
)
# pstack and eu-stack print no arguments.
STACK_FRAME = re.compile(
    r"^#(?P<n>\d+) +0x[0-9a-f]+(?: in)? (?P<function>[^ (]+)(?: (?:from|-) (?P<library>\S+))?$"
)
GDB_PYTHON = re.compile(
    r"Frame 0x[0-9a-f]+, for file (?P<file>[^,]+), line (?P<line>\d+), in (?P<function>[^ (]+)"
)
# Of /proc/PID/stack.
KERNEL_FRAME = re.compile(
    r"^\[<[0-9a-fx]+>\] \??\s*(?P<function>[\w.]+)\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[\w+\])?$"
)
LLDB_FRAME = re.compile(r"^frame #(?P<n>\d+): 0x[0-9a-f]+ (?P<library>[^`]+)`(?P<function>[^(<+]+)")
WATCHDOG_FRAME = re.compile(r"^#(?P<n>\d+) (?P<function>\S+) from (?P<file>[^ ]+):(?P<line>\d+)$")
# No part of the name of a function: a line of a log may end like a frame.
NO_C, NO_PYTHON = re.compile(r" NCCL (?:INFO|WARN) "), re.compile(r"[\s()]")
LINE_SUFFIX = re.compile(r"^(.*):(\d+)$")
BULLET = re.compile(r"^(?:[|│├└┬╰╭┌─╴•·*>`+]+|-{1,3}>?|=>|→|↳|\d{1,3}[.)](?= )|at(?= )|in(?= ))[ \t]*")
COMMENT = re.compile(r"(?<=[)\w])[`*]*\s*(?:←|⟵|⇐|◀|→|<-|<=|<<|//|\s#|\s--|\s—|\s;)(?!.*\.(?:py|so)\b).*$")
# `f at f.py:3`, `f@f.py:3`, `f in f.py, line 3`, `f() - f.py:3`
NAME_FIRST = re.compile(
    rf"^(?P<function>[\w.<>]+)(?:\([^()]*\))?(?: ?[@,|:]| at| in| from| -)? *"
    rf'[("\[]?(?P<file>[\w./<>~\-]+\.{SOURCE})"?(?::|, ?(?:line )?| line |#L?)(?P<line>\d+)[)\]]?$'
)
# `f.py:3 f`, `f.py:3: f()`, `f.py:3 in f`, `f.py(3) f`, `f.py line 3 f`
FILE_FIRST = re.compile(
    rf'^[("\[]?(?P<file>[\w./<>~\-]+\.{SOURCE})"?(?::|, ?line |\(| line |#L?)(?P<line>\d+)[)\]]?[:,]?(?: in| -)? *'
    rf"[(`]?(?P<function>[A-Za-z_<][\w.<>]*)(?:\([^()]*\))?[)`]?$"
)
# `dist.barrier() at f.py:3 (save)`, `dist.barrier (f.py:3)`: a call that waits, and where the program makes it
CALL_AT = re.compile(
    rf"^`?(?:(?P<call>[\w.]+)(?:\(\))?`? (?:at|in)|(?P<dotted>(?:torch\.)?dist(?:ributed)?\.\w+)(?:\(\))?`?) "
    rf"\(?(?P<file>[\w./~\-]+\.{SOURCE}):(?P<line>\d+)\)?(?: \((?:in )?(?P<function>\w+)(?:\(\))?\))?$"
)
ARROWS = re.compile(r"\s*(<-+|<=+|←|⟵|-+>|=+>|→|›| > | < |(?<=\) )(?:in|from|under)(?= ))\s*")
INNER_FIRST = ("←", "⟵", "in", "from", "under")
REMARK = re.compile(r"\s*\([^():/]*\)[ .]*$")
NAME = re.compile(r"^[A-Za-z_<][\w.<>:]*(?:\(\))?$")

# Files that people cut down to the last component; nothing else on a training stack is so called.
FULL_PATHS: dict[str, str] = TABLES["full_paths"]
# A name without a file is read where no other library has a function of that name.
FILES_OF_NAMES: dict[str, str] = {name: file for file, names in TABLES["functions"].items() for name in names}


@lru_cache(maxsize=65536)
def frame_of(line: str) -> Frame | None:
    """Return the frame that a stripped line shows in the form of a tool, or None."""
    frame = tool_frame(line)
    if frame is None and ("(" in line or "File" in line) and (shown := plain(line)) != line:
        frame = tool_frame(shown)
    return frame


@lru_cache(maxsize=65536)
def loose_frames(line: str) -> tuple[Frame, ...]:
    """Return the frames that a stripped line shows in the form of people, innermost first; empty
    where it shows none.
    """
    if len(line) > MAX_LOOSE:
        return ()
    shown = plain(line)
    if calls := called_at(shown):
        return calls
    for pattern in (NAME_FIRST, FILE_FIRST):
        if match := pattern.match(shown):
            return (frame_in(match),)
    pieces = ARROWS.split(REMARK.sub("", without_bullets(line).replace("`", "")))
    if len(pieces) < 3 or len({arrow.strip("-=") for arrow in pieces[1::2]}) > 1:
        return ()
    found = [piece_frame(piece.strip()) for piece in pieces[0::2]]
    frames = [frame for frame in found if frame is not None]
    if len(frames) < len(found) or not any(frame.file for frame in frames):
        return ()
    # `a <- b`: b called a. `a -> b`: a called b, unless only a is a call that waits.
    waits_first = frames[0].function in FILES_OF_NAMES and frames[-1].function not in FILES_OF_NAMES
    return tuple(frames if "<" in pieces[1] or pieces[1] in INNER_FIRST or waits_first else reversed(frames))


def called_at(shown: str) -> tuple[Frame, ...]:
    """Return a call that waits and the frame that makes it; nothing for another line."""
    match = CALL_AT.match(shown)
    call = bare_name(match["call"] or match["dotted"]) if match else None
    return (call, frame_in(match)) if match and call and full_path(match["file"]) != call.file else ()


def piece_frame(text: str) -> Frame | None:
    """Return the frame of one name between arrows; its file is empty where it is unknown."""
    if frame := tool_frame(text):
        return frame
    if match := NAME_FIRST.match(text):
        return frame_in(match)
    name = text.removesuffix("()")
    return Frame(name, FILES_OF_NAMES.get(name, "")) if NAME.match(text) else None


def frame_in(match: re.Match[str]) -> Frame:
    """Return the frame of a form of people: of the groups function, file and line."""
    return Frame(match["function"] or "<unknown>", full_path(match["file"]), int(match["line"][:9]))


def bare_name(line: str) -> Frame | None:
    """Return the frame of a line that is the name of a collective and nothing else."""
    name = plain(line).removesuffix("()").removeprefix("dist.").removeprefix("torch.distributed.")
    return Frame(name, FILES_OF_NAMES[name]) if name in FILES_OF_NAMES else None


def without_bullets(line: str) -> str:
    for _ in range(4):
        cut = BULLET.sub("", line, count=1)
        if cut == line:
            break
        line = cut
    return line


def plain(line: str) -> str:
    """Return a line without bullets before it and remarks behind it."""
    line = without_bullets(line)
    return COMMENT.sub("", line).strip().strip("`").rstrip(",") if len(line) <= 2 * MAX_LOOSE else line


def tool_frame(line: str) -> Frame | None:
    if "File" in line and (match := FILE_FRAME.match(line)):
        number = match["line"]
        return Frame(
            (match["function"] or "<unknown>").strip(),
            match["file"],
            int(number[:9]) if number.isdecimal() else 0,
            match["kind"] == "C" or is_native_file(match["file"]),
        )
    if line.startswith("#"):
        return numbered_frame(line)
    if match := LLDB_FRAME.match(line):
        return Frame(match["function"].strip(), match["library"], 0, True)
    if line == "Waiting for the GIL":  # above the frames of gdb's `py-bt`
        return Frame("take_gil", "python", 0, True)
    if line.startswith("[<") and (match := KERNEL_FRAME.match(line)):
        return Frame(match["function"], "kernel", 0, True)
    if line.endswith(")") and " (" in line and not line.startswith(("Thread ", "Process ", "Traceback ")):
        function, _, place = line[:-1].rpartition(" (")
        match = LINE_SUFFIX.match(place)
        file, number = (match[1], int(match[2][:9])) if match else (place, 0)
        native = is_native_file(file)
        unfit = NO_C if native else NO_PYTHON
        is_frame = looks_like_location(file, native) and function and not unfit.search(function)
        if is_frame and not called_at(line):
            return Frame(function, full_path(file), number, native)
    return None


def numbered_frame(line: str) -> Frame | None:
    """Parse frames of gdb (`#3 0x.. in f () from lib.so`, `#5 Frame 0x.., for file f.py`), of
    pstack and of the NCCL watchdog (`#0 f from f.py:3`).
    """
    if match := GDB_PYTHON.search(line):
        return Frame(match["function"], match["file"], int(match["line"][:9]))
    if match := WATCHDOG_FRAME.match(line):
        return Frame(match["function"], match["file"], int(match["line"][:9]), is_native_file(match["file"]))
    if match := GDB_FRAME.match(line):
        return Frame(
            match["function"], match["library"] or match["file"] or "?", int((match["line"] or "0")[:9]), True
        )
    if match := STACK_FRAME.match(line):
        return Frame(match["function"], match["library"] or "?", 0, True)
    return None


def full_path(file: str) -> str:
    return FULL_PATHS.get(file, file)


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
