"""Batches and records with pictures, for tests: encoded by Pillow, small, of known contents."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from recorder import RecordingOptions
from recorder.testing import in_step, scripted_batch, send_step
from tests.recorder.ranks import begin


def png(seed: int, width: int = 8, height: int = 6) -> bytes:
    """Return a picture of random pixels, the same for the same seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def with_pictures(batch: dict[str, Any], rows: Sequence[Sequence[bytes]]) -> dict[str, Any]:
    each = [picture for row in rows for picture in row]
    return batch | {
        "mm_token_type_ids": batch["attention_mask"].astype(np.int32),
        "image_count": np.array([len(row) for row in rows], np.int32),
        "image_bytes": np.array([len(picture) for picture in each], np.int32),
        "image_data": np.frombuffer(b"".join(each), np.uint8).copy(),
    }


def pictured_batch(step: int, rank: int = 0, salt: int = 0) -> dict[str, Any]:
    """Return four rows, the samples of two prompts: a picture of the step and one of all steps."""
    rows = [[png(100 * step + 10 * rank + prompt + salt), png(9999)] for prompt in (0, 0, 1, 1)]
    return in_step(with_pictures(scripted_batch([3, 4, 5, 6], seed=step), rows), step, rank)


def write_pictured_record(
    folder: Path, num_steps: int = 3, options: RecordingOptions = RecordingOptions()
) -> None:
    (writer,) = begin(folder, options=options)
    for step in range(num_steps):
        send_step(writer, step, pictured_batch(step))
    writer("end", steps=num_steps, error=None)
