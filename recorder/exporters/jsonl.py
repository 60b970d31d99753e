"""JSON lines: one sample per line, what is unknown is null.

Floats have their shortest spelling, which parses to the same float32; pictures are base64.
"""

import base64
from collections.abc import Sequence
from pathlib import Path

from areal_core.safety.durable import replacing
from recorder.checksum_json import json_text
from recorder.exporters.rows import check_file, layout_of_steps, read_rows
from recorder.reader import Record


def write(
    record: Record, file: Path, steps: Sequence[int], overwrite: bool, pictures: Path | None = None
) -> list[Path]:
    """Write one file with all steps, atomically."""
    check_file(file, overwrite)
    layout = layout_of_steps(record, steps, pictures)
    with replacing(file) as out:
        for row in read_rows(record, steps, layout):
            for picture in row.get("images") or ():
                if picture["bytes"] is not None:
                    picture["bytes"] = base64.b64encode(picture["bytes"]).decode()
            out.write(json_text(row).encode() + b"\n")
    return [file]
