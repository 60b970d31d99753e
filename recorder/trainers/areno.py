"""AReNo: `step_{step}.jsonl`, a JSON object per sample, values per token of the whole sequence.

`prompt_index` is the number of the row and names no group; `prompt_mask` is also true on tokens of
tools, so that the prompt ends at its first false.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.trainers.foreign import (
    BY_PROMPT,
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
    Source,
    as_tokens,
    first_row,
    member,
    number_or_none,
    optional,
    sequence_sample,
)
from recorder.trainers.sample import PerToken, Sample, as_numpy

FILES = r"step_\d+\.jsonl"
MEMBERS = {"format_version", "tokens", "prompt_mask", "advantages"}
VERSION = 1
NOTES = (BY_PROMPT, NO_VERSIONS_OR_REASONS, NO_WEIGHTS)


def find(source: Source) -> list[Path]:
    return source.named(FILES) if any(first_row(f).keys() >= MEMBERS for f in source.named(FILES)) else []


def parse_row(row: Mapping[str, Any], where: str) -> Sample:
    """Parse one sample; an empty mask means that the completion is trained on. Raises ForeignFormat."""
    if (version := member(row, "format_version", where)) != VERSION:
        raise ForeignFormat(f"{where} has format_version {version}, {VERSION} expected")
    tokens = as_tokens(member(row, "tokens", where), where)
    given = as_numpy(member(row, "prompt_mask", where), f"{where}, prompt_mask", bool)
    prompt = PerToken(len(tokens), None, where).whole("prompt_mask", given, 0)
    size = len(tokens) if prompt.all() else int((~prompt).argmax())
    mask = optional(row, "loss_mask") or np.arange(len(tokens)) >= size
    return sequence_sample(
        tokens,
        mask,
        logprobs=optional(row, "logprobs"),
        learning={"advantages": optional(row, "advantages")},
        reward=number_or_none(optional(row, "reward"), f"{where}, reward"),
        group=tokens[:size].tobytes(),
        prompt_length=size,
        where=where,
    )
