"""Hostile records: one JSON file of a record changed at a random place and sealed again.

The checksum of the changed file, and its entry in step.json, are computed again, as anybody can. So
the change reaches the parsers and what runs after them.
"""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

from recorder import Recording, RecordingOptions, RecordWriter, Retention, commit_anchor
from recorder.documents import checksum
from recorder.header import write_header
from recorder.testing import SCRIPTED_HEADER, scripted_batch, send_step

HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, -1, -5, 0, 1, 7, 2**31, 2**63, 2**64, 10**30, 3_000_000_000, 1.5, -0.0, 1e308,
    "", "x", "0", "..", "../../etc/passwd", "/etc/passwd", "a/b", "a\0b", "\x1b[2J", "\ud800", "a" * 5000,
    "BF16", "X9", "F64", "U8", "token", "ffffffff", "inf", "0x1p5000", [], {}, [[]], [1, 2, 3], [-1], [True],
    ["x"], {"a": 1}, {"float": "nan"}, {"float": "x"}, {"": {}}, [[1, 2], [3]], [[5, 1]], [[0, 10**9]],
)  # fmt: skip
RAW_VALUES = (
    "NaN",
    "-Infinity",
    "1" * 5000,
    "1e999999",
    "[" * 100_000 + "]" * 100_000,
    '{"a":1,"a":2}',
    "01",
    "'x'",
)
MARK = "@@raw@@"


class Words:
    """A tokenizer whose tokens are numbers."""

    name_or_path = "words"

    def decode(self, ids: list[int]) -> str:
        """Return the ids as text."""
        return " ".join(map(str, ids))


def write_full_record(folder: Path) -> None:
    """Write a record with every kind of file: scope full, text, an anchor, and gaps."""
    options = RecordingOptions(Recording("full"), retention=Retention(keep_last=3))
    writer = RecordWriter(folder, options=options)
    writer.tokenizer = Words()
    folder.mkdir(parents=True)
    write_header(
        folder, SCRIPTED_HEADER.__class__(**{**vars(SCRIPTED_HEADER), "recording": options.recording})
    )
    for step in range(5):
        batch = scripted_batch([3, 8, 6, 4], seed=step)
        batch["prompt_id"] = batch["prompt_id"]
        send_step(writer, step, batch)
    writer("end", steps=5, error=None)
    anchor = folder / "anchors/000002"
    anchor.mkdir(parents=True)
    (anchor / "model.distcp").write_bytes(b"weights")
    commit_anchor(anchor, step=2)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a JSON document but the top."""
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [found for key, value in items for found in ((*path, key), *places(value, (*path, key)))]


def mutate(document: Any, rng: random.Random) -> tuple[str, str, str]:
    """Change one place; return the JSON text, the place and the change."""
    document = copy.deepcopy(document)
    *above, last = rng.choice([p for p in places(document) if p != ("crc32c",)])
    holder = document
    for key in above:
        holder = holder[key]
    kind = rng.choice(("value", "value", "value", "raw", "delete", "rename", "add", "duplicate", "swap"))
    raw = ""
    if kind == "value":
        holder[last] = rng.choice(HOSTILE_VALUES)
    elif kind == "raw":
        holder[last], raw = MARK, rng.choice(RAW_VALUES)
    elif kind == "delete":
        del holder[last]
    elif kind == "swap":
        other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[last], holder[other] = holder[other], holder[last]
    elif isinstance(holder, dict):
        new = rng.choice(("../../x", "/x", "", "a\nb", "extra", "\ud800", "crc", f"{last}x"))
        holder[new] = holder.pop(last) if kind == "rename" else holder[last]
    else:
        holder.append(holder[last])
    text = json.dumps(document).replace(f'"{MARK}"', raw)
    shown = raw[:20] if kind == "raw" else repr(holder[last])[:40] if kind == "value" else ""
    return text, "/".join(map(str, (*above, last))), f"{kind} {shown}"


def sealed(text: str) -> bytes:
    """A JSON object with its checksum as the last member, as every sealed file ends."""
    document = re.sub(r',? ?"crc32c": "[0-9a-f]{8}"\}$', "}", text.strip())
    body = document.removesuffix("}").encode("utf-8", "surrogatepass")
    return body + f',\n "crc32c": "{checksum(body)}"\n}}\n'.encode()
