"""Upstream AReaL: `torch.save` of batches (`batch_data.pt` of its debugging guide).

A TensorDict, a padded dict of tensors, or a list with one padded dict per prompt, whose rows are
its samples. All tensors are [B, T] or [B] and aligned as here; `versions` may be absent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.trainers.file_pictures import pictures_in
from recorder.trainers.foreign import (
    BY_MASK,
    BY_PROMPT,
    NO_WEIGHTS,
    Foreign,
    Source,
    counted,
    optional,
    prompt_group,
    read_steps,
    sequence_sample,
    with_cut_off,
)
from recorder.trainers.sample import Sample
from recorder.trainers.stand_ins import Instance
from recorder.trainers.unpickle import first_strings, is_cut_off, load_pickle

KEYS = {"input_ids", "attention_mask", "loss_mask", "rewards"}
NOTES = (NO_WEIGHTS, BY_MASK)
# tensors of a trainer's batch, aligned to the token itself -> their names in learning
LEARNING = {
    "advantages": "advantages",
    "prox_logp": "prox_logp",
    "ref_logp": "ref_logp",
    "values": "values",
    "returns": "returns",
}


def find(source: Source) -> list[Path]:
    """Return the .pt files with a batch."""
    files = source.named(r".*\.pt")
    return with_cut_off([file for file in files if first_strings(file) >= KEYS], files, is_cut_off)


def tensors_of(document: Any) -> Any:
    """Return the tensors of a TensorDict as older versions pickle it; other values unchanged."""
    if (
        isinstance(document, Instance)
        and isinstance(document.state, dict)
        and "_tensordict" in document.state
    ):
        return document.state["_tensordict"]
    return document


def read(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per file. Raises ForeignFormat, UnsafePickle."""
    notes = [*NOTES]

    def read_batches(paths: Sequence[Path]) -> list[Sample]:
        (file,) = paths
        document = load_pickle(file)
        batches = document if isinstance(document, list) else [tensors_of(document)]
        samples = []
        for number, batch in enumerate(batches):
            if not isinstance(batch, dict) or not batch.keys() >= KEYS:
                raise ForeignFormat(f"{file} is not a batch of AReaL: it lacks one of {sorted(KEYS)}")
            group = number if isinstance(document, list) else None  # else by `prompt_id`, or by the prompt
            lengths = np.asarray(batch["attention_mask"]).astype(bool).sum(axis=1)
            parsed = [
                parse_row(batch, row, int(length), group, f"{file}, row {row}")
                for row, length in enumerate(lengths)
            ]
            inputs = optional(batch, "multi_modal_input", ())
            samples += [
                replace(sample, **pictures_in(inputs[row] if row < len(inputs) else None, None, notes))
                for row, sample in enumerate(parsed)
            ]
            notes.extend([] if "prompt_id" in batch or isinstance(document, list) else [BY_PROMPT])
        return samples

    steps, left_out = read_steps(
        [(str(file.relative_to(source.path.parent)), [file]) for file in files], read_batches
    )
    return Foreign("areal", steps, [*counted(notes), *left_out])


def parse_row(document: Mapping[str, Any], row: int, length: int, group: int | None, where: str) -> Sample:
    """Parse one row, without its padding."""

    def column(name: str) -> Any:
        values = optional(document, name)
        return None if values is None else np.asarray(values)[row, :length]

    tokens, mask, versions = (column(name) for name in ("input_ids", "loss_mask", "versions"))
    prompt_ids, reasons = (optional(document, name) for name in ("prompt_id", "finish_reason"))
    if group is None:
        group = prompt_group(tokens, mask) if prompt_ids is None else int(prompt_ids[row])  # type: ignore[assignment]
    return sequence_sample(
        tokens,
        mask,
        logprobs=column("logprobs"),
        versions=None if versions is None else np.where(mask, versions, -1),
        learning={name: column(key) for key, name in LEARNING.items()},
        reward=float(document["rewards"][row]),
        group=group,
        finish_reason=None if reasons is None else int(reasons[row]),
        where=where,
    )
