"""py-spy JSON: an array of threads, innermost frame first, in whatever order the interpreter has
them.

Ten thousand ranks of one job print nearly the same document: only process and thread numbers
differ. They are cut out first, so that one shape is decoded once, and every further rank costs a
comparison with the last few shapes.
"""

import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Any

from hangdoctor.errors import UnreadableDump
from hangdoctor.model import NUMBER, Frame, Thread

JSON_ARRAY = re.compile(r"\[\s*[{\]]")
HEAD = 4096
PYTHON_FILES = (".py", ".pyx", ".pyi", ".ipynb", ".pyc")
NUMBER_BYTES = re.compile(NUMBER.pattern.encode())
PID, OS_ID = re.compile(rb'"pid": ?$'), re.compile(rb'"os_thread_id": ?$')
MAX_LAYOUTS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """What documents have in common that differ in process and thread numbers only.

    `pieces` are what is between the numbers, `text` is all of it with 0 for each; `pid_at` and
    `os_at` are the indices of the numbers of the process and of threads. `layouts` has the sizes of
    all pieces and numbers, by that of the document: unpacking one of 20 kB takes 5 microseconds,
    searching it for the numbers six times as long.
    """

    pieces: tuple[bytes, ...]
    text: str
    pid_at: int | None
    os_at: tuple[int, ...]
    layouts: dict[int, Struct]

    def numbers(self, data: bytes) -> Sequence[bytes] | None:
        """Return the numbers of a document; None if its shape is another one."""
        layout = self.layouts.get(len(data))
        if layout is not None:
            fields = layout.unpack(data)
            if fields[::2] == self.pieces and b"".join(fields[1::2]).isdigit():
                return fields[1::2]
        return self.searched_numbers(data)

    def searched_numbers(self, data: bytes) -> list[bytes] | None:
        head, *rest = self.pieces
        if not data.startswith(head):
            return None
        found, begin = [], len(head)
        for piece in rest:
            end = data.find(piece[:1], begin)
            number = data[begin:end]
            if not (number.isdigit() or number == b"null") or not data.startswith(piece, end):
                return None
            found.append(number)
            begin = end + len(piece)
        if begin != len(data):
            return None
        if len(self.layouts) < MAX_LAYOUTS and len(data) not in self.layouts:
            self.layouts[len(data)] = layout_of(self.pieces, found)
        return found


def layout_of(pieces: Sequence[bytes], numbers: Sequence[bytes]) -> Struct:
    """Return the sizes of pieces, and of the numbers between them."""
    sizes = [len(part) for pair in zip(pieces, [*numbers, b""], strict=True) for part in pair]
    return Struct("".join(f"{size}s" for size in sizes[:-1]))


RECENT: deque[Shape] = deque(maxlen=8)


def is_stacks_json(head: str) -> bool:
    """Return whether a text that begins with `head` is an array of objects."""
    return JSON_ARRAY.match(head[:HEAD].lstrip()) is not None


def parse_stacks_json(document: str | bytes) -> tuple[int | None, tuple[Thread, ...]]:
    """Return process id and threads of one `py-spy dump --json` document. Raises `UnreadableDump`.

    Thread numbers are dropped; the thread whose number is the process id is named MainThread if it
    has no name, because py-spy loses names on some Python versions.
    """
    data = document.encode() if isinstance(document, str) else document
    for shape in tuple(RECENT):
        numbers = shape.numbers(data)
        if numbers is not None:
            break
    else:
        shape, numbers = shape_of(data)
    if not RECENT or RECENT[0] is not shape:  # the last shape is the likeliest next one
        RECENT.appendleft(shape)
    pid = b"null" if shape.pid_at is None else numbers[shape.pid_at]
    os_ids = [numbers[at] for at in shape.os_at]
    main = os_ids.index(pid) if pid != b"null" and pid in os_ids else -1
    return (int(pid) if pid.isdigit() else None), threads_of_shape(shape.text, main)


def shape_of(data: bytes) -> tuple[Shape, Sequence[bytes]]:
    parts = NUMBER_BYTES.split(data)
    before = [piece + key for piece, key in zip(parts[0::3], parts[1::3], strict=False)]
    pid_at = next((at for at, piece in enumerate(before) if PID.search(piece)), None)
    os_at = tuple(at for at, piece in enumerate(before) if OS_ID.search(piece))
    pieces = (*before, parts[-1])
    text = b"0".join(pieces).decode(errors="replace")
    return Shape(pieces, text, pid_at, os_at, {}), parts[2::3]


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
