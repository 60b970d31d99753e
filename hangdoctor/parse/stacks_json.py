"""py-spy JSON: an array of threads, innermost frame first, in whatever order the interpreter has
them.

Ten thousand ranks of one job print nearly the same document: only process and thread numbers
differ. They are cut out first, so that one document is decoded once.
"""

import json
import re
from functools import lru_cache
from typing import Any

from hangdoctor.errors import UnreadableDump
from hangdoctor.model import NUMBER, Frame, Thread

JSON_ARRAY = re.compile(r"\[\s*[{\]]")
HEAD = 4096
PYTHON_FILES = (".py", ".pyx", ".pyi", ".ipynb", ".pyc")
NUMBER_BYTES = re.compile(NUMBER.pattern.encode())
PID, OS_ID = re.compile(rb'"pid": ?$'), re.compile(rb'"os_thread_id": ?$')


def parse_stacks_json(document: str | bytes) -> tuple[int | None, tuple[Thread, ...]]:
    """Return process id and threads of one `py-spy dump --json` document. Raises `UnreadableDump`.

    Thread numbers are dropped; the thread whose number is the process id is named MainThread if it
    has no name, because py-spy loses names on some Python versions.
    """
    data = document.encode() if isinstance(document, str) else document
    parts = NUMBER_BYTES.split(data)
    before = [piece + key for piece, key in zip(parts[0::3], parts[1::3], strict=False)]
    numbers = parts[2::3]
    pid = next((number for piece, number in zip(before, numbers, strict=True) if PID.search(piece)), b"null")
    os_ids = [number for piece, number in zip(before, numbers, strict=True) if OS_ID.search(piece)]
    main = os_ids.index(pid) if pid != b"null" and pid in os_ids else -1
    shape = b"0".join([*before, parts[-1]]).decode(errors="replace")
    return (int(pid) if pid.isdigit() else None), threads_of_shape(shape, main)


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
