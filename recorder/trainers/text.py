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
    first_row,
    is_cut_line,
    json_lines,
    number_or_none,
    of_one_run,
    read_steps,
    with_cut_off,
)
from recorder.trainers.sample import Sample

AREAL = {"prompt", "completion", "reward", "task_id"}
VERL = {"input", "output", "score", "step"}
ROLL = ("prompt", "responses", "scores")
LINES = r".*\.jsonl"


def find_areal(source: Source) -> list[Path]:
    files = source.named(LINES, r"-?\d+")
    return with_cut_off([file for file in files if first_row(file).keys() >= AREAL], files, is_cut_line, 2)


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


def find_verl(source: Source) -> list[Path]:
    files = source.named(r"\d+\.jsonl")
    return with_cut_off([file for file in files if first_row(file).keys() >= VERL], files, is_cut_line)


def read_verl(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per file. Raises ForeignFormat."""
    steps, notes = read_steps(
        [(f"step {file.stem}", [file]) for file in of_one_run(files)],
        lambda paths: [verl_row(line.row) for line in json_lines(paths[0])],
    )
    return Foreign("verl-text", steps, [TEXT_ONLY, BY_PROMPT, *notes])


def verl_row(row: Mapping[str, Any]) -> Sample:
    text = (row["input"], row["output"])
    return Sample(tokens=None, reward=number_or_none(row["score"]), group=row["input"], text=text)


def find_roll(source: Source) -> list[Path]:
    return source.named(r"rollout_dump_data\.step_\d+\.jsonl")


def read_roll(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per file: one object with a list per column. Raises ForeignFormat."""
    steps, notes = read_steps(
        [(file.stem, [file]) for file in of_one_run(files)],
        lambda paths: [sample for line in json_lines(paths[0]) for sample in roll_rows(line.row)],
    )
    return Foreign("roll-text", steps, [TEXT_ONLY, BY_PROMPT, *notes])


def roll_rows(columns: Mapping[str, Any]) -> list[Sample]:
    rows = zip(*(columns[name] for name in ROLL), strict=True)
    return [
        Sample(tokens=None, reward=number_or_none(score), group=prompt, text=(prompt, response))
        for prompt, response, score in rows
    ]
