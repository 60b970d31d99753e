"""NeMo-RL: `train_data_step{N}.jsonl`, a JSON object per sample; values are lists of one.

Lists are padded to the longest of the batch and cut with `input_lengths`; all are aligned to the
token itself.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.importers.foreign import Foreign, Step, as_tokens, files_in_order, full_sequence, member
from recorder.trainers.sample import Sample

NOTES = (
    "idx does not identify groups: samples with the same prompt tokens are a group",
    "advantages are computed again from the rewards",
    "weight versions and finish reasons are not in the file",
    "weights and optimizer are not in the file: choose the model for a replay",
)


def recognises(path: Path) -> bool:
    """Return whether the path has files `train_data_step*.jsonl`."""
    return path.name.startswith("train_data_step") or bool(path.is_dir() and files_of(path))


def files_of(path: Path) -> list[Path]:
    """The files of the steps, in order."""
    return files_in_order(path, "train_data_step*.jsonl")


def read(path: Path) -> Foreign:
    """Read one step per file. Raises ForeignFormat."""
    steps = []
    for file in files_of(path):
        lines = file.read_text().splitlines()
        samples = [
            parse_row(json.loads(line), f"{file}, line {number + 1}") for number, line in enumerate(lines)
        ]
        steps.append(Step(file.stem, samples))
    return Foreign("nemo-rl", steps, NOTES)


def parse_row(row: Mapping[str, Any], where: str) -> Sample:
    """Parse one sample."""
    length = int(unwrapped(row, "input_lengths", where))
    columns = {
        name: np.asarray(unwrapped(row, name, where))[:length]
        for name in ("token_ids", "token_loss_mask", "generation_logprobs")
    }
    mask = (columns["token_loss_mask"] * unwrapped(row, "sample_loss_mask", where)).astype(np.int32)
    tokens = as_tokens(columns["token_ids"], where)
    first = int(mask.argmax()) if mask.any() else length
    return Sample(
        tokens=tokens,
        loss_mask=mask,
        logprobs=full_sequence(columns["generation_logprobs"], mask, np.float32),
        reward=float(unwrapped(row, "rewards", where)),
        group=tokens[:first].tobytes(),
        text=text_of(row),
    )


def unwrapped(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value in a list of one."""
    value = member(row, name, where)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def text_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the conversation, which is not split into prompt and completion."""
    if "content" not in row:
        return None
    content = unwrapped(row, "content", "content")
    return ("", content if isinstance(content, str) else json.dumps(content))
