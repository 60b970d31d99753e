"""A record as the lines that a service for experiments is given: numbers of steps, then samples.

    {"step": 3, "stats": {"reward/mean": 0.5, ...}}
    {"step": 3, "sample": {"prompt_id": 17, "reward": 1.0, "completion": "...", ...}}

A service starts programs and threads, which a confined process cannot; so that one writes lines,
and one that never opens the record logs them.
"""

from collections.abc import Sequence
from pathlib import Path

from areal_core.safety.durable import replacing
from recorder.checksum_json import json_text
from recorder.exporters.rows import check_file, layout_of_steps, read_rows
from recorder.exporters.sample_columns import has_file
from recorder.reader import Record

COLUMNS = (
    "prompt_id", "sample_id", "rank", "row", "reward", "finish_reason", "num_tokens", "prompt", "completion",
    "num_calls", "num_tool_calls", "num_failed_tool_calls",
)  # fmt: skip


def write(record: Record, file: Path, steps: Sequence[int], overwrite: bool) -> list[Path]:
    """Write one file with all steps, atomically."""
    check_file(file, overwrite)
    layout = layout_of_steps(record, steps)
    with replacing(file) as out:
        for number in steps:
            step = record.step(number)
            has_outcome = has_file(step, "outcome", 0, "json")
            stats = dict(step.outcome(0).stats) if has_outcome else {}
            rows = list(read_rows(record, [number], layout, COLUMNS))
            rewards = [row["reward"] for row in rows if row["reward"] is not None]
            if rewards:
                stats["reward/mean"] = sum(rewards) / len(rewards)
            for line in (
                {"step": number, "stats": stats},
                *({"step": number, "sample": row} for row in rows),
            ):
                out.write(json_text(line).encode() + b"\n")
    return [file]
