"""The files of a source, and steps that are read from them as far as they are complete.

A source is a file, or the folder of an experiment with anything else below it. A run that was
killed leaves files that end too early: their steps are left out, and named.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal_core.safety.printable import printable
from recorder.errors import ForeignFormat, UnfinishedFile
from recorder.importers.foreign import Foreign, Step
from recorder.pictures.imported import counted
from recorder.trainers.sample import Sample

MAX_FILES = 200_000
MAX_LINE = 1 << 26  # bytes that are read to recognise a format
# folders and files of evaluations, which are no training data
EVALUATION = re.compile(r"(eval|evals|val|validation)([-_.].*)?|dumped_evals")


@dataclass(frozen=True)
class Source:
    """A path and its regular files in natural order, without those of evaluations."""

    path: Path
    files: tuple[Path, ...]

    def named(self, pattern: str, parent: str = ".*") -> list[Path]:
        """Return the files whose names, and the names of whose folders, match the patterns."""
        return [
            file
            for file in self.files
            if re.fullmatch(pattern, file.name)
            and (file == self.path or re.fullmatch(parent, file.parent.name))
        ]

    def unfinished(self, pattern: str) -> list[str]:
        """Return a note for each temporary file, which a writer would have renamed at the end."""
        return [
            f"{file} is a file that was not written to its end: left out"
            for file in self.named(rf"({pattern})\.tmp")
        ]


def find_source(path: Path) -> Source:
    """List the files below a path, without following links to folders. Raises ForeignFormat."""
    if not path.is_dir():
        return Source(path, (path,) if path.is_file() else ())
    files, folders = [], [path]
    while folders:
        for entry in os.scandir(folders.pop()):
            if EVALUATION.fullmatch(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif entry.is_file():
                files.append(Path(entry.path))
        if len(files) + len(folders) > MAX_FILES:
            raise ForeignFormat(f"{path} has more than {MAX_FILES} files: give the folder of the samples")
    return Source(path, tuple(sorted(files, key=natural)))


def natural(path: Path) -> list[tuple[str, int]]:
    """Return a key that orders paths, with numbers in them by value."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d{0,18})", str(path))]


def of_one_run(files: Sequence[Path], num_names: int = 1) -> Sequence[Path]:
    """Return the files in the order of the steps in their names.

    Raises ForeignFormat if the last `num_names` names of two files are equal: they are of two runs.
    """
    seen: dict[tuple[str, ...], Path] = {}
    for file in files:
        other = seen.setdefault(file.parts[-num_names:], file)
        if other is not file:
            raise two_runs(other, file)
    return sorted(files, key=lambda file: natural(Path(*file.parts[-num_names:])))


def two_runs(one: Path, other: Path) -> ForeignFormat:
    return ForeignFormat(f"{one} and {other} are of two runs: give the folder of one of them")


def incomplete(steps: Mapping[Path, Sequence[Path]]) -> dict[Path, str]:
    """Return a note for each folder of a step with fewer files than others have."""
    most = max(map(len, steps.values()), default=0)
    return {
        folder: f"{folder} has {len(files)} files, and other steps have {most}: it is left out"
        for folder, files in steps.items()
        if len(files) < most
    }


def read_steps(
    files: Iterable[tuple[str, Sequence[Path]]], read: Callable[[Sequence[Path]], Sequence[Sample]]
) -> tuple[list[Step], list[str]]:
    """Read steps from their files; leave out those with a file that ends too early.

    Returns the steps, and a note for each such file. Raises UnfinishedFile if no step is left.
    """
    steps, notes, first = [], [], None
    for name, paths in files:
        try:
            steps.append(Step(name, read(paths)))
        except UnfinishedFile as error:
            notes += cut_off(paths, read)
            first = first or error
    if first is not None and not any(step.samples for step in steps):
        raise first
    return steps, notes


def read_files(
    name: str,
    notes: Sequence[str],
    files: Sequence[Path],
    read: Callable[[Path, list[str]], Sequence[Sample]],
) -> Foreign:
    """Read one step per file of a format; `read` adds to the notes what a file lacks."""
    found: list[str] = []
    units = [(file.stem, [file]) for file in of_one_run(files)]
    steps, left_out = read_steps(units, lambda paths: read(paths[0], found))
    return Foreign(name, steps, [*notes, *counted(found), *left_out])


def cut_off(paths: Sequence[Path], read: Callable[[Sequence[Path]], object]) -> list[str]:
    """Return a note for each file that ends too early."""
    notes = []
    for path in paths:
        try:
            read([path])
        except UnfinishedFile as error:
            notes.append(f"{error}: its step is left out")
    return notes


def with_cut_off(
    found: Sequence[Path], candidates: Iterable[Path], is_cut: Callable[[Path], bool], levels: int = 1
) -> list[Path]:
    """Add the candidates that are cut off, and so not recognised, in the folders of those found.

    `levels` counts the folders up from a file that the files of a run share.
    """
    places = {file.parents[levels - 1] for file in found}
    others = set(candidates) - set(found)
    cut = [file for file in others if file.parents[levels - 1] in places]
    return sorted([*found, *(file for file in cut if is_cut(file))], key=natural)


@dataclass(frozen=True)
class Line:
    """A JSON object, and its place for messages."""

    where: str
    row: dict[str, Any]


def json_lines(file: Path, cut: list[str] | None = None) -> list[Line]:
    """Read the JSON objects of a file, one a line; only a newline ends a line.

    A last line that is cut off is dropped with a note in `cut`; without `cut`, raises
    UnfinishedFile. Raises ForeignFormat for anything else than objects.
    """
    lines = file.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = parse_json(line)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise ForeignFormat(f"{where} is not JSON ({printable(str(error), 100)})") from None
            if cut is None:
                raise UnfinishedFile(f"{where} is cut off") from None
            cut.append(f"{where} is cut off: it is left out")
            continue
        if not isinstance(row, dict):
            raise ForeignFormat(f"{where} is not a JSON object")
        found.append(Line(where, row))
    return found


def parse_json(line: bytes) -> Any:
    """Parse JSON as `json.loads` does, five times faster. Raises ValueError, RecursionError."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # NaN, numbers out of range, lone surrogates; otherwise for the message
        return json.loads(line.decode())


def first_row(file: Path) -> dict[str, Any]:
    """Return the JSON object in the first line of a file, {} if there is none."""
    with file.open("rb") as lines:
        try:
            row = parse_json(lines.readline(MAX_LINE) or b"null")
        except (ValueError, RecursionError):
            return {}
    return row if isinstance(row, dict) else {}


def is_cut_line(file: Path) -> bool:
    with file.open("rb") as lines:
        line = lines.readline(MAX_LINE)
    return line.startswith(b"{") and not line.endswith(b"\n") and not first_row(file)
