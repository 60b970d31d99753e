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
    member,
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
            [line.parsed(areal_row) for path in paths for line in json_lines(path, cut)],
        )
        for folder, paths in folders
    ]
    note = "steps are the folders, each of the last weight version that sampled a token of them"
    return Foreign("areal-text", steps, [TEXT_ONLY, note, *cut])


def areal_row(row: Mapping[str, Any], where: str) -> Sample:
    text = (member(row, "prompt", where, str), member(row, "completion", where, str))
    group = (row["task_id"], row["prompt"])  # ranks count their tasks alike, and append to one file
    return Sample(None, reward=number_or_none(row["reward"], f"{where}, reward"), group=group, text=text)


def verl_row(row: Mapping[str, Any], where: str) -> Sample:
    text = (member(row, "input", where, str), member(row, "output", where, str))
    return Sample(None, reward=number_or_none(row["score"], f"{where}, score"), group=text[0], text=text)


def read_roll(file: Path, notes: list[str]) -> list[Sample]:
    """Read objects with a list per column. Raises ForeignFormat."""
    return [
        Sample(
            None, reward=number_or_none(score, f"{line.where}, scores"), group=prompt, text=(prompt, response)
        )
        for line in json_lines(file)
        for prompt, response, score in zip(*(line.row[name] for name in ROLL), strict=True)
    ]
