"""open-instruct: `{run}_rollouts_{shard}.jsonl`, a JSON object per sample."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recorder.importers.foreign import (
    Foreign,
    Step,
    completion_sample,
    files_in_order,
    finish_reason_of,
    member,
    optional,
)
from recorder.trainers.sample import Sample

NOTES = (
    "which tokens came from tools is not in the file: the whole response is trained",
    "advantages are computed again from the rewards, by group",
    "weight versions are not in the file",
    "weights and optimizer are not in the file: choose the model for a replay",
)


def recognises(path: Path) -> bool:
    """Return whether the path has files `*_rollouts_*.jsonl`."""
    files = files_of(path)
    return bool(files) and "_rollouts_" in files[0].name and files[0].suffix == ".jsonl"


def files_of(path: Path) -> list[Path]:
    """The shards, in order."""
    return files_in_order(path, "*_rollouts_*.jsonl")


def read(path: Path) -> Foreign:
    """Read the steps that the rows name, in order. Raises ForeignFormat."""
    samples: dict[int, list[Sample]] = defaultdict(list)
    for file in files_of(path):
        for number, line in enumerate(file.read_text().splitlines()):
            row, where = json.loads(line), f"{file}, line {number + 1}"
            samples[int(member(row, "step", where))].append(parse_row(row, where))
    return Foreign("open-instruct", [Step(f"step {step}", samples[step]) for step in sorted(samples)], NOTES)


def parse_row(row: Mapping[str, Any], where: str) -> Sample:
    """Parse one sample."""
    reward = member(row, "reward", where)
    return completion_sample(
        member(row, "prompt_tokens", where),
        member(row, "response_tokens", where),
        logprobs=optional(row, "logprobs"),
        reward=None if reward is None else float(reward),
        group=member(row, "prompt_idx", where),
        finish_reason=finish_reason_of(optional(row, "finish_reason")),
        where=where,
    )
