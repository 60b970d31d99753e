"""The common result of every importer: steps of samples, and notes on missing data.

A sample is one sequence, prompt and completion; its per-token values are aligned to the token
itself.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.trainers.sample import FINISH_REASONS, STOP, Sample


@dataclass(frozen=True)
class Step:
    """One batch; `name` is its name in the source."""

    name: str
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Foreign:
    """Content of a source: format, steps, and notes on missing data and assumptions."""

    format: str
    steps: Sequence[Step]
    notes: Sequence[str] = field(default_factory=tuple)


def full_sequence(values: Any, mask: np.ndarray, dtype: type) -> np.ndarray:
    """Return [T] values with 0 where the mask is 0."""
    array: np.ndarray = np.asarray(values, dtype)
    return np.where(mask != 0, array, array.dtype.type(0))


def completion_sample(
    prompt: Any,
    completion: Any,
    *,
    loss_mask: Any = None,
    logprobs: Any = None,
    reward: float | None,
    group: Hashable,
    finish_reason: int = STOP,
    versions: Any = None,
    text: tuple[str, str] | None = None,
    where: str,
) -> Sample:
    """Build a sample; mask, logprobs and versions have one value per completion token.

    Raises ForeignFormat if their lengths differ.
    """
    prompt, completion = np.asarray(prompt, np.int64), np.asarray(completion, np.int64)
    size = len(completion)
    mask = np.ones(size, np.int32) if loss_mask is None else np.asarray(loss_mask, np.int32)
    for name, values in (("loss mask", mask), ("logprobs", logprobs), ("versions", versions)):
        if values is not None and len(values) != size:
            raise ForeignFormat(f"{where}: {len(values)} {name} for {size} tokens of completion")
    zeros = np.zeros(len(prompt), np.int32)
    mask = np.concatenate([zeros, mask])
    return Sample(
        tokens=as_tokens(np.concatenate([prompt, completion]), where),
        loss_mask=mask,
        logprobs=None
        if logprobs is None
        else full_sequence(np.concatenate([zeros, np.asarray(logprobs, np.float64)]), mask, np.float32),
        reward=reward,
        group=group,
        finish_reason=finish_reason,
        prompt_length=len(prompt),
        versions=None
        if versions is None
        else np.where(mask, np.concatenate([zeros, np.asarray(versions)]), -1).astype(np.int32),
        text=text,
    )


def as_tokens(ids: np.ndarray, where: str) -> np.ndarray:
    """Convert token ids to int32. Raises ForeignFormat for ids that no vocabulary has."""
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ForeignFormat(f"{where}: token ids from {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def member(document: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a mandatory member.

    Raises ForeignFormat, which lists the present ones, if it is absent.
    """
    if name not in document:
        raise ForeignFormat(f"{where} has no {name!r}, only {sorted(map(str, document))[:20]}")
    return document[name]


def optional(document: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return an optional member; `default` if it is absent or None."""
    value = document.get(name)
    return default if value is None else value


def finish_reason_of(name: str | None) -> int:
    """Return the number of a finish reason; an unknown name counts as stop."""
    return FINISH_REASONS.get((name or "stop").lower(), STOP)


def number_in(name: str) -> int:
    """Return the last number in a file name, which orders the files; -1 if there is none."""
    digits = "".join(character if character.isdigit() else " " for character in name).split()
    return int(digits[-1]) if digits else -1


def files_in_order(path: Path, pattern: str) -> list[Path]:
    """Return the file itself, or the matching files of a folder, by the number in their names."""
    files = [path] if path.is_file() else [file for file in path.glob(pattern) if file.is_file()]
    return sorted(files, key=lambda file: (number_in(file.stem), file.name))


def count_without(samples: Sequence[Sample], field_name: str) -> int:
    """Count the samples that lack a field."""
    return sum(getattr(sample, field_name) is None for sample in samples)
