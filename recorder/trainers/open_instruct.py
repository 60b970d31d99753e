"""open-instruct: `{run}_rollouts_{shard}.jsonl`, a JSON object per sample."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recorder.trainers.foreign import (
    NO_VERSIONS,
    NO_WEIGHTS,
    Foreign,
    Source,
    Step,
    completion_sample,
    finish_reason_of,
    json_lines,
    member,
    number_or_none,
    optional,
    two_runs,
)
from recorder.trainers.sample import Sample

FILES = r"(.*)_rollouts_\d+\.jsonl"
NOTES = (
    "which tokens came from tools is not in the file: the loss mask of samples that called one is unknown",
    NO_VERSIONS,
    NO_WEIGHTS,
)


def read(source: Source, files: Sequence[Path]) -> Foreign:
    """Read the steps that the rows name, in order. Raises ForeignFormat."""
    runs = {file.with_name(file.name.rsplit("_rollouts_", 1)[0]): file for file in files}
    if len(runs) > 1:
        raise two_runs(*list(runs.values())[:2])
    samples: dict[int, dict[int, Sample]] = defaultdict(dict)
    notes, num_rows = [*NOTES], 0
    for file in files:
        for line in json_lines(file, notes):
            step, index = (member(line.row, name, line.where, int) for name in ("step", "sample_idx"))
            samples[step][index] = line.parsed(parse_row)
            num_rows += 1
    if again := num_rows - sum(map(len, samples.values())):
        notes.append(f"{again} samples of steps that were run again are left out: the last ones are taken")
    steps = [Step(f"step {step}", list(samples[step].values())) for step in sorted(samples)]
    return Foreign("open-instruct", steps, notes)


def parse_row(row: Mapping[str, Any], where: str) -> Sample:
    response = member(row, "response_tokens", where)
    advantage = number_or_none(optional(row, "advantage"), f"{where}, advantage")
    sample = completion_sample(
        member(row, "prompt_tokens", where),
        response,
        logprobs=optional(row, "logprobs"),
        learning={"advantages": None if advantage is None else np.full(len(response), advantage)},
        reward=number_or_none(member(row, "reward", where), f"{where}, reward"),
        group=member(row, "prompt_idx", where),
        finish_reason=finish_reason_of(optional(row, "finish_reason")),
        where=where,
    )
    requests = optional(row, "request_info", {})
    called = optional(requests, "tool_calleds", False) or optional(requests, "num_calls", 0)
    return replace(sample, loss_mask=None) if called else sample
