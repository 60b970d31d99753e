"""Read the source lines that stacks point at, while the files are available.

A call into C leaves no Python frame: a rank inside flock, a C++ destructor or a bound native
function shows only the caller, and the text of the caller's line is all that names the operation.
"""

import json
import linecache
from collections.abc import Iterable

MAX_LINE_CHARACTERS = 200


def source_lines(dumps: Iterable[str]) -> dict[str, str]:
    """Return `FILE:LINE` to stripped source for every frame of py-spy JSON dumps whose file is
    readable here.
    """
    places = {
        (frame["filename"], frame["line"])
        for dump in dumps
        for thread in json.loads(dump)
        for frame in thread["frames"]
    }
    found = {f"{file}:{line}": linecache.getline(file, line).strip() for file, line in sorted(places)}
    return {place: text[:MAX_LINE_CHARACTERS] for place, text in found.items() if text}
