"""py-spy JSON: an array of threads, innermost frame first, in whatever order the interpreter has
them.

Ten thousand ranks of one job print nearly the same document: only process and thread numbers
differ. They are cut out first, so that one shape is decoded once, and every further rank costs a
comparison with the last few shapes.
"""

import json
import re
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hangdoctor.errors import UnreadableDump
from hangdoctor.model import Frame, Thread

PYTHON_FILES = (".py", ".pyx", ".pyi", ".ipynb", ".pyc")
# A literal head lets `re` skip to the next number: 20 kB of dump in 30 microseconds.
NUMBER = re.compile(r'(id": ?)(\d+|null)')
PID, OS_ID = re.compile(r'"pid": ?$'), re.compile(r'"os_thread_id": ?$')


@dataclass(frozen=True, slots=True)
class Shape:
    """What documents have in common that differ in process and thread numbers only.

    `head` is the text before the first number, `after` the text up to the next number, for each:
    its first character, itself, its length. `text` is all of it with blanked numbers; `pid_at` and
    `os_at` are the indices of the numbers of the process and of threads.
    """

    head: str
    after: tuple[tuple[str, str, int], ...]
    text: str
    pid_at: int | None
    os_at: tuple[int, ...]

    def numbers(self, text: str) -> list[str] | None:
        """Return the numbers of a document; None if its shape is another one."""
        if not text.startswith(self.head):
            return None
        found, begin = [], len(self.head)
        for first, piece, size in self.after:
            end = text.find(first, begin)
            number = text[begin:end]
            if not (number.isdecimal() or number == "null") or not text.startswith(piece, end):
                return None
            found.append(number)
            begin = end + size
        return found if begin == len(text) else None


RECENT: deque[Shape] = deque(maxlen=8)


def parse_stacks_json(text: str) -> tuple[int | None, tuple[Thread, ...]]:
    """Return process id and threads of one `py-spy dump --json` document. Raises `UnreadableDump`.

    Thread numbers are dropped; the thread whose number is the process id is named MainThread if it
    has no name, because py-spy loses names on some Python versions.
    """
    for shape in tuple(RECENT):
        numbers = shape.numbers(text)
        if numbers is not None:
            break
    else:
        shape, numbers = shape_of(text)
    if not RECENT or RECENT[0] is not shape:  # the last shape is the likeliest next one
        RECENT.appendleft(shape)
    pid = "null" if shape.pid_at is None else numbers[shape.pid_at]
    os_ids = [numbers[at] for at in shape.os_at]
    main = os_ids.index(pid) if pid != "null" and pid in os_ids else -1
    return (int(pid) if pid.isdecimal() else None), threads_of_shape(shape.text, main)


def shape_of(text: str) -> tuple[Shape, list[str]]:
    """Cut the numbers out of a document."""
    pieces = NUMBER.split(text)
    before = [piece + key for piece, key in zip(pieces[0::3], pieces[1::3], strict=False)]
    pid_at = next((at for at, piece in enumerate(before) if PID.search(piece)), None)
    os_at = tuple(at for at, piece in enumerate(before) if OS_ID.search(piece))
    head, *rest = between = [*before, pieces[-1]]
    after = tuple((piece[:1], piece, len(piece)) for piece in rest)
    return Shape(head, after, "0".join(between), pid_at, os_at), pieces[2::3]


@lru_cache(maxsize=1024)
def threads_of_shape(text: str, main: int) -> tuple[Thread, ...]:
    """Return threads of one document with blanked numbers; `main` is the index of the main thread
    or -1.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableDump(f"not JSON: {error}") from error
    if not isinstance(document, list) or not document:
        raise UnreadableDump("py-spy JSON is a non-empty array of threads; got something else")
    return tuple(thread_from(entry, place == main) for place, entry in enumerate(document))


def thread_from(entry: Any, is_main: bool) -> Thread:
    """Parse one thread. Raises `UnreadableDump`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("frames"), list):
        raise UnreadableDump("a py-spy thread is an object with 'frames'; got something else")
    name = entry.get("thread_name")
    active, gil = entry.get("active"), entry.get("owns_gil")
    return Thread(
        frames=tuple(frame_from(frame) for frame in entry["frames"]),
        name=name if isinstance(name, str) else "MainThread" if is_main else None,
        active=active if isinstance(active, bool) else None,
        holds_gil=gil if isinstance(gil, bool) else None,
    )


def frame_from(entry: Any) -> Frame:
    """Parse one frame. Raises `UnreadableDump`."""
    if not isinstance(entry, dict):
        raise UnreadableDump("a py-spy frame is an object; got something else")
    file = entry.get("filename") or entry.get("short_filename") or ""
    line = entry.get("line")
    return Frame(
        function=str(entry.get("name", "")),
        file=str(file),
        line=line if isinstance(line, int) and 0 <= line < 10**9 else 0,
        native=is_native_file(str(file)),
    )


def is_native_file(file: str) -> bool:
    """True if a location is compiled code: a library, a C++ source or unknown."""
    return not (file.endswith(PYTHON_FILES) or file.startswith("<"))
