"""`torch.save` of a padded batch per step, all ranks, loadable with `weights_only=True`.

The tensors are those of ARCHITECTURE.md, "The batch": what upstream AReaL's debugging guide saves,
plus groups and finish reasons. A tensor has no null: what is not known has the value that FORMAT.md
gives it (NaN in log-probs and rewards), and `unknown` [B] the bits of what a row lacks.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.safety.durable import commit_file
from recorder.exporters.rows import check_file, file_of_step
from recorder.format import BATCH_KEYS
from recorder.reader import Record, RecordedStep

DTYPES = {"rewards": np.float32, "logprobs": np.float32, "prompt_id": np.int64, "unknown": np.uint8}


def write(record: Record, file: Path, steps: Sequence[int], overwrite: bool) -> list[Path]:
    """Write one file per step, each atomically."""
    import torch

    files = {step: file_of_step(file, step, len(steps)) for step in steps}
    for step, path in files.items():
        check_file(path, overwrite)
        arrays = padded(record.step(step))
        packed = io.BytesIO()  # torch turns an error of a file into one without its reason
        torch.save({key: torch.from_numpy(array) for key, array in arrays.items()}, packed)
        commit_file(path, packed.getvalue())
    return list(files.values())


def padded(step: RecordedStep) -> dict[str, np.ndarray[Any, Any]]:
    """Return the rows of all ranks as [B, T] and [B] arrays, padded with 0 on the right."""
    ranks = range(step.manifest.num_ranks)
    keys = [*BATCH_KEYS, *(["unknown"] if any(has_unknown(step, rank) for rank in ranks) else [])]
    batches = [step.batch(rank, set(keys) & step.batch_entry(rank)[1].tensors.keys()) for rank in ranks]
    lengths = np.concatenate([np.diff(batch["cu_seqlens"]) for batch in batches])
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    arrays = {"attention_mask": mask}
    for key in keys[1:]:
        dtype = DTYPES.get(key, np.int32)
        rows = [np.zeros(len(b["rewards"]), dtype) if key not in b else b[key] for b in batches]
        flat = np.concatenate(rows).astype(dtype)
        if BATCH_KEYS.get(key, ("", "row"))[1] == "token":
            arrays[key] = np.zeros(mask.shape, dtype)
            arrays[key][mask] = flat
        else:
            arrays[key] = flat
    return arrays


def has_unknown(step: RecordedStep, rank: int) -> bool:
    return "unknown" in step.batch_entry(rank)[1].tensors
