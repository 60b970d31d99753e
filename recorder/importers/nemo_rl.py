"""NeMo-RL: `train_data_step{N}.jsonl`, a JSON object per sample; values are lists of one.

Lists are padded to the longest of the batch and cut with `input_lengths`; all are aligned to the
token itself. Versions before 0.6 write text, rewards and log-probs, and no tokens: there the
log-probs are of tokens that are not known, and left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recorder.importers.foreign import (
    BY_MASK,
    BY_PROMPT,
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
    TEXT_ONLY,
    Foreign,
    member,
    number_or_none,
    optional,
    prompt_group,
    sequence_sample,
)
from recorder.importers.sources import Source, json_lines, of_one_run, read_steps
from recorder.trainers.sample import Sample

FILES = r"train_data_step\d+\.jsonl"
NOTES = (
    BY_PROMPT,
    "the first message of a conversation counts as the text of the prompt",
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
)
NO_TOKENS = (TEXT_ONLY, "log-probs of tokens that are not in the file are left out")
LEARNING = {"advantages": "advantages", "prev_logprobs": "prox_logp"}


def find(source: Source) -> list[Path]:
    """Return the files of training steps."""
    return source.named(FILES)


def read(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per file. Raises ForeignFormat."""
    text_only = False

    def read_file(paths: Sequence[Path]) -> list[Sample]:
        nonlocal text_only
        samples = [parse_row(unwrapped(line.row), line.where) for path in paths for line in json_lines(path)]
        text_only |= any(sample.tokens is None for sample in samples)
        return samples

    steps, notes = read_steps([(file.stem, [file]) for file in of_one_run(files)], read_file)
    return Foreign("nemo-rl", steps, [*NOTES, *(NO_TOKENS if text_only else (BY_MASK,)), *notes])


def unwrapped(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in row.items()
    }


def parse_row(row: Mapping[str, Any], where: str) -> Sample:
    """Parse one sample, whose values per token may be padded."""
    text = text_of(member(row, "content", where))
    reward = number_or_none(optional(row, "filtered_rewards", member(row, "rewards", where)))
    if "token_ids" not in row:
        return Sample(tokens=None, reward=reward, group=text[0] if text else None, text=text)
    length = int(member(row, "input_lengths", where))

    def column(name: str) -> Any:
        values = optional(row, name)
        return None if values is None else np.asarray(values[:length])  # the rest is padding

    tokens = column("token_ids")
    mask = np.asarray(member(row, "token_loss_mask", where)[:length]) != 0
    is_trained = optional(row, "sample_loss_mask", 1) != 0
    return sequence_sample(
        tokens,
        mask & is_trained,
        logprobs=column("generation_logprobs"),
        learning={name: column(key) for key, name in LEARNING.items()},
        reward=reward,
        group=prompt_group(tokens, mask),
        prompt_length=int(mask.argmax()) if mask.any() else None,
        text=text,
        where=where,
    )


def text_of(content: Any) -> tuple[str, str] | None:
    """Return the first message of a conversation, and the others; None without messages of text."""
    messages = [content] if isinstance(content, str) else content
    if not isinstance(messages, list) or not messages or not all(isinstance(m, str) for m in messages):
        return None
    return messages[0], "".join(messages[1:])
