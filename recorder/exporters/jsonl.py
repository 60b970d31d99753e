"""JSON lines: one sample per line.

Floats have their shortest spelling, which parses to the same float32.
"""

from collections.abc import Sequence
from pathlib import Path

from areal_core.safety.durable import replacing
from recorder.checksum_json import json_text
from recorder.exporters.rows import ExportedRow, check_file, read_rows
from recorder.reader import Record


def write(record: Record, file: Path, steps: Sequence[int], overwrite: bool) -> list[Path]:
    """Write one file with all steps, atomically."""
    check_file(file, overwrite)
    with replacing(file) as out:
        for row in read_rows(record, steps):
            out.write(json_text(document_of(row)).encode() + b"\n")
    return [file]


def document_of(row: ExportedRow) -> dict[str, object]:
    """Return the row as JSON types."""
    document: dict[str, object] = {
        "step": row.step,
        "prompt_id": row.prompt_id,
        "sample_id": row.sample_id,
        "token_ids": row.token_ids.tolist(),
        "prompt_len": row.prompt_len,
        "loss_mask": row.loss_mask.tolist(),
        "logprobs": row.logprobs.tolist(),
        "reward": row.reward,
        "finish_reason": row.finish_reason,
        "versions": row.versions.tolist(),
    }
    if row.text is not None:
        document |= {"prompt": row.text[0], "completion": row.text[1]}
    return document
