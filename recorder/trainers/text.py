"""Dumps of text, for inspection: upstream AReaL's, verl's and ROLL's JSON lines, TRL's Parquet.

They have no token ids, and tokenizing the text again may give others than the model saw. So the
record has rows without tokens, with their text and rewards.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from recorder.trainers.foreign import (
    BY_PROMPT,
    TEXT_ONLY,
    Foreign,
    Source,
    Step,
    json_lines,
    number_or_none,
    of_one_run,
)
from recorder.trainers.sample import Sample

AREAL = {"prompt", "completion", "reward", "task_id"}
VERL = {"input", "output", "score", "step"}
ROLL = ("prompt", "responses", "scores")
AREAL_FILES, AREAL_FOLDERS, VERL_FILES = r".*\.jsonl", r"-?\d+", r"\d+\.jsonl"
ROLL_FILES = r"rollout_dump_data\.step_\d+\.jsonl"
NOTES = (TEXT_ONLY, BY_PROMPT)


def read_areal(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per folder, which is named by a weight version. Raises ForeignFormat."""
    cut: list[str] = []
    folders = groupby(of_one_run(files, 2), key=lambda file: file.parent)
    steps = [
        Step(
            folder.name,
            [areal_row(line.row) for path in paths for line in json_lines(path, cut)],
        )
        for folder, paths in folders
    ]
    note = "steps are the folders, each of the last weight version that sampled a token of them"
    return Foreign("areal-text", steps, [TEXT_ONLY, note, *cut])


def areal_row(row: Mapping[str, Any]) -> Sample:
    text = (row["prompt"], row["completion"])
    group = (row["task_id"], row["prompt"])  # ranks count their tasks alike, and append to one file
    return Sample(tokens=None, reward=number_or_none(row["reward"]), group=group, text=text)


def verl_row(row: Mapping[str, Any], where: str) -> Sample:
    text = (row["input"], row["output"])
    return Sample(tokens=None, reward=number_or_none(row["score"]), group=row["input"], text=text)


def read_roll(file: Path, notes: list[str]) -> list[Sample]:
    """Read objects with a list per column. Raises ForeignFormat."""
    return [
        Sample(tokens=None, reward=number_or_none(score), group=prompt, text=(prompt, response))
        for line in json_lines(file)
        for prompt, response, score in zip(*(line.row[name] for name in ROLL), strict=True)
    ]
