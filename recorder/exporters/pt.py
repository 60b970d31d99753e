"""`torch.save` of a padded batch per step, all ranks, loadable with `weights_only=True`.

The tensors are those of ARCHITECTURE.md, "The batch": what upstream AReaL's debugging guide saves,
plus groups and finish reasons.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.safety.durable import commit_file
from recorder.exporters.rows import ExportedRow, check_file, file_of_step, read_rows
from recorder.reader import Record

PER_TOKEN = {"input_ids": np.int32, "loss_mask": np.int32, "logprobs": np.float32, "versions": np.int32}


def write(record: Record, file: Path, steps: Sequence[int], overwrite: bool) -> list[Path]:
    """Write one file per step, each atomically."""
    import torch

    files = {step: file_of_step(file, step, len(steps)) for step in steps}
    for step, path in files.items():
        check_file(path, overwrite)
        arrays = padded(list(read_rows(record, [step])))
        packed = io.BytesIO()  # torch turns an error of a file into one without its reason
        torch.save({key: torch.from_numpy(array) for key, array in arrays.items()}, packed)
        commit_file(path, packed.getvalue())
    return list(files.values())


def padded(rows: Sequence[ExportedRow]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the rows as [B, T] and [B] arrays, padded with 0 on the right."""
    width = max((len(row.token_ids) for row in rows), default=0)
    mask = np.arange(width) < np.array([len(row.token_ids) for row in rows], np.int64)[:, None]
    batch: dict[str, np.ndarray[Any, Any]] = {"attention_mask": mask}
    for key, dtype in PER_TOKEN.items():
        values = [row.token_ids if key == "input_ids" else getattr(row, key) for row in rows]
        batch[key] = np.zeros(mask.shape, dtype)
        for number, value in enumerate(values):
            batch[key][number, : len(value)] = value
    return batch | {
        "rewards": np.array([row.reward for row in rows], np.float32),
        "prompt_id": np.array([row.prompt_id for row in rows], np.int64),
        "sample_id": np.array([row.sample_id for row in rows], np.int32),
        "finish_reason": np.array([row.finish_reason for row in rows], np.int32),
    }
