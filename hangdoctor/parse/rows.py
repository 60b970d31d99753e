"""Tables of ranks, as the text that they stand for.

{"rank": 3, "stack": ["f (a.py:3)"]}     one object a line: a heading and its frames
{"log": "...", "rank": "3"}              lines of a log as shippers of logs keep them
| rank | blocked in | or rank,frame      Markdown, commas or tabs, with a column of ranks
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

# Where docker, Loki, CloudWatch and Google Cloud keep a line of a log.
LINES = ("log", "line", "message", "msg", "textPayload")
RANK = r"(?:global[ _]?)?ranks?(?:[ _]?id)?"
RANKS = re.compile(f"^{RANK}$", re.IGNORECASE)
HEADER = re.compile(rf"(?im)(?:^|[|,\t])[ `*\"]*{RANK}[ `*\"]*(?:[|,\t]|$)")


def with_rows(text: str) -> str:
    """Return a text in which each row of a table of ranks is a heading with its frames."""
    if objects := objects_in(text):
        return "\n".join(line for row in objects for line in lines_of(row))
    return "\n".join(from_tables(text.split("\n"))) if HEADER.search(text) else text


def objects_in(text: str) -> list[dict[str, Any]]:
    """Return the objects of JSON lines; none where a line is something else, or there is only one."""
    if not text.lstrip().startswith("{"):
        return []
    try:
        found = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError):
        return []
    return found if len(found) > 1 and all(isinstance(row, dict) for row in found) else []


def lines_of(row: dict[str, Any]) -> Iterator[str]:
    values = row | next((inner for inner in row.values() if isinstance(inner, dict)), {})
    rank = next((str(value) for name, value in values.items() if RANKS.match(name)), None)
    said = next((row[name] for name in LINES if isinstance(row.get(name), str)), None)
    if said is not None:
        yield from (f"[rank{rank}]: {line}" if rank else line for line in said.rstrip("\n").split("\n"))
    elif rank is not None:
        stacks = [value for value in values.values() if isinstance(value, list)]
        yield from (f"rank {rank}:", *(str(frame) for stack in stacks for frame in stack), "")


def from_tables(lines: Iterable[str]) -> Iterator[str]:
    width, column = 0, 0
    for line in lines:
        cells = [cell.strip(' `*"') for cell in re.split(r"[|,\t]", line.strip().strip("|"))]
        if width and len(cells) == width and cells[column][:1].isdecimal():
            others = [cell for at, cell in enumerate(cells) if at != column]
            yield from (f"rank {cells[column]}:", *others, "")
            continue
        if not (width and set(line) <= set("|-: ")):  # the line below the names of Markdown
            column = next((at for at, cell in enumerate(cells) if RANKS.match(cell)), -1)
            width = len(cells) if column >= 0 and len(cells) > 1 else 0
        yield line
