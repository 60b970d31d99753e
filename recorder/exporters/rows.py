"""The rows of a record for exporters: complete samples, ordered by step, rank and row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recorder.errors import RecordError, RecordExists
from recorder.reader import Record

STEP_FIELD = "{step}"


@dataclass(frozen=True)
class ExportedRow:
    """A sample of T tokens.

    `prompt_len` counts the tokens before the first one in the loss mask; `text` is prompt and
    completion if recorded.
    """

    step: int
    prompt_id: int
    sample_id: int
    token_ids: np.ndarray
    prompt_len: int
    loss_mask: np.ndarray
    logprobs: np.ndarray
    reward: float
    finish_reason: int
    versions: np.ndarray
    text: tuple[str, str] | None


def read_rows(record: Record, steps: Sequence[int]) -> Iterator[ExportedRow]:
    """Yield the samples of some steps, all ranks. Raises StepNotRecorded, DamagedRecord."""
    for number in steps:
        step = record.step(number)
        for rank in range(step.manifest.num_ranks):
            arrays, text = step.batch(rank), step.text(rank)
            bounds = arrays["cu_seqlens"]
            for row in range(step.num_rows(rank)):
                part = slice(bounds[row], bounds[row + 1])
                mask = arrays["loss_mask"][part]
                yield ExportedRow(
                    step=number,
                    prompt_id=int(arrays["prompt_id"][row]),
                    sample_id=int(arrays["sample_id"][row]),
                    token_ids=arrays["input_ids"][part],
                    prompt_len=int(mask.argmax()) if mask.any() else len(mask),
                    loss_mask=mask,
                    logprobs=arrays["logprobs"][part],
                    reward=float(arrays["rewards"][row]),
                    finish_reason=int(arrays["finish_reason"][row]),
                    versions=arrays["versions"][part],
                    text=None if text is None else (text[row]["prompt"], text[row]["completion"]),
                )


def check_file(file: Path, overwrite: bool) -> None:
    """Raise RecordExists unless the file may be written."""
    if file.exists() and not overwrite:
        raise RecordExists(f"{file} exists already: choose another name, or --force to replace it")


def file_of_step(template: Path, step: int, num_steps: int) -> Path:
    """Return the file of a step, for formats with one file per step.

    Raises RecordError if several steps would share a name.
    """
    if STEP_FIELD not in str(template) and num_steps > 1:
        raise RecordError(
            f"the format has one file a step and there are {num_steps}: put {STEP_FIELD} into the name, or choose one with --step"
        )
    return Path(str(template).replace(STEP_FIELD, str(step)))
