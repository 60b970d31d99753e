"""Hostile records: one JSON file of a record changed at a random place and sealed again.

The checksum of the changed file, and its entry in step.json, are computed again, as anybody can. So
the change reaches the parsers and what runs after them.
"""

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


def sealed(text: str) -> bytes:
    """A JSON object with its checksum as the last member, as every sealed file ends."""
    document = re.sub(r',? ?"crc32c": "[0-9a-f]{8}"\}$', "}", text.strip())
    body = document.removesuffix("}").encode("utf-8", "surrogatepass")
    return body + f',\n "crc32c": "{checksum(body)}"\n}}\n'.encode()
