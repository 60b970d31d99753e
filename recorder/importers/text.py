"""Text dumps: upstream AReaL's `{task_id}.jsonl` and verl's `{step}.jsonl`, for reading only.

They have no token ids, and tokenizing the text again may give others than the model saw. So the
record has rows without tokens, with their text and rewards.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recorder.importers.foreign import Foreign, Step, number_in
from recorder.trainers.sample import Sample

# format -> the members of prompt, completion and reward
MEMBERS = {
    "areal-text": ("prompt", "completion", "reward"),
    "verl-text": ("input", "output", "score"),
}
NOTES = ("the dump has text and no tokens: the record can be listed and read, but not replayed",)


def recognises_areal(path: Path) -> bool:
    """Return whether there are JSONL files with prompt, completion and task_id."""
    return first_line_has(path, {*MEMBERS["areal-text"], "task_id"})


def recognises_verl(path: Path) -> bool:
    """Return whether there are JSONL files with input, output, score and step."""
    return first_line_has(path, {*MEMBERS["verl-text"], "step"})


def read_areal(path: Path) -> Foreign:
    """Read one step per folder, which is named by a weight version. Raises ForeignFormat."""
    files = files_of(path)
    folders = sorted({file.parent for file in files}, key=lambda folder: number_in(folder.name))
    steps = [
        Step(
            folder.name,
            [sample for file in files if file.parent == folder for sample in read_file(file, "areal-text")],
        )
        for folder in folders
    ]
    return Foreign("areal-text", steps, NOTES)


def read_verl(path: Path) -> Foreign:
    """Read one step per file. Raises ForeignFormat."""
    steps = [Step(f"step {file.stem}", read_file(file, "verl-text")) for file in files_of(path)]
    return Foreign("verl-text", steps, NOTES)


def files_of(path: Path) -> list[Path]:
    """All JSONL files, in the order of the numbers in their names."""
    files = [path] if path.is_file() else list(path.rglob("*.jsonl"))
    return sorted(files, key=lambda file: (number_in(file.stem), str(file)))


def first_line_has(path: Path, names: set[str]) -> bool:
    """Return whether the first line of the first file is a JSON object with these members."""
    files = [file for file in files_of(path) if file.suffix == ".jsonl"]
    if not files:
        return False
    with files[0].open() as file:
        try:
            document = json.loads(file.readline() or "null")
        except json.JSONDecodeError:
            return False
    return isinstance(document, dict) and names <= document.keys()


def read_file(file: Path, format_name: str) -> list[Sample]:
    """Read the rows of a file."""
    return [parse_row(json.loads(line), format_name) for line in file.read_text().splitlines()]


def parse_row(row: Mapping[str, Any], format_name: str) -> Sample:
    """Parse one row: no tokens, its text, its reward, and the prompt as its group."""
    prompt, completion, reward = (row[name] for name in MEMBERS[format_name])
    return Sample(
        tokens=None,
        reward=None if reward is None else float(reward),
        group=prompt,
        text=(prompt, completion),
    )
