"""Files of other trainers: finding them, reading their steps, and samples of what they hold.

A source is a file, or the folder of an experiment with anything else below it. A run that was
killed leaves files that end too early: their steps are left out, and named. A sample is one
sequence, prompt and completion; its values per token are aligned to the token itself, and what a
format does not have stays None.
"""

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_core.safety.printable import printable
from areal_core.safety.received import MOST_BYTES, open_received, read_received
from recorder.errors import ForeignFormat, RecordError, UnfinishedFile
from recorder.trainers.batches import unknown_value
from recorder.trainers.sample import FINISH_REASONS, PerToken, Sample, as_numpy, token_ids
from recorder.trainers.sample import number as to_float

NO_WEIGHTS = "weights and optimizer are not in the file: choose the model for a replay"
NO_VERSIONS = "weight versions are not in the file"
NO_VERSIONS_OR_REASONS = "weight versions and finish reasons are not in the file"
FROM_REWARDS = "advantages are not in the file: they are computed again from the rewards, by group"
BY_PROMPT = "the file does not name groups, they are derived: samples with the same prompt are a group"
BY_MASK = (
    "the file does not say where a completion begins, it is derived: at the first token in the loss mask"
)
IMAGES = "images and other inputs that are not text are not imported"
NO_FILES = "the log names images whose files it does not have: they are not imported"
as_tokens = functools.partial(token_ids, error=ForeignFormat)
COUNTED = (IMAGES, NO_FILES)  # notes that are added once per sample
TEXT_ONLY = (
    "the dump has text and no tokens: the record is for inspection only, it can be listed and read, "
    "but not replayed"
)


@dataclass(frozen=True)
class Step:
    """One batch; `name` is its name in the source."""

    name: str
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Foreign:
    """Content of a source: format, steps, and notes on missing data and assumptions."""

    format: str
    steps: Sequence[Step]
    notes: Sequence[str] = field(default_factory=tuple)


def counted(notes: Sequence[str]) -> list[str]:
    """Return each note once; of what is left out of samples with their number."""
    counts = Counter(notes)
    return [f"{note}: {counts[note]} of the samples" if note in COUNTED else note for note in counts]


def completion_sample(
    prompt: Any, completion: Any, *, where: str, loss_mask: Any = None, **known: Any
) -> Sample:
    """Build a sample whose values per token cover the completion alone.

    Without a mask, all tokens of the completion are trained on. `known` are further arguments of
    `sequence_sample`. Raises RecordError if lengths differ.
    """
    prompt, completion = as_tokens(prompt, where), as_tokens(completion, where)
    return sequence_sample(
        np.concatenate([prompt, completion]),
        np.ones(len(completion)) if loss_mask is None else loss_mask,
        where=where,
        prompt_length=len(prompt),
        **known,
    )


def sequence_sample(
    tokens: Any,
    loss_mask: Any,
    *,
    where: str,
    logprobs: Any = None,
    versions: Any = None,
    learning: Mapping[str, Any] | None = None,
    **known: Any,
) -> Sample:
    """Build a sample whose values per token cover the whole sequence, or what is after the prompt.

    Values of `learning` that are None are left out. Without `prompt_length`, the completion begins
    at the first token in the mask. `known` are further members of Sample. Raises RecordError if
    lengths differ, and for a mask of other values than 0 and 1.
    """
    ids = as_tokens(tokens, where)
    rows = PerToken(len(ids), known.get("prompt_length"), where)

    def per_token(name: str, values: Any, dtype: type, fill: int = 0) -> Any:
        return None if values is None else rows.whole(name, as_numpy(values, f"{where}, {name}", dtype), fill)

    mask = per_token("loss_mask", loss_mask, np.float64)
    if mask is not None:
        if len(wrong := mask[(mask != 0) & (mask != 1)]):
            raise ForeignFormat(f"{where}, loss_mask: a value is {wrong[0]:g}, 0 or 1 expected")
        mask = mask.astype(np.int32)
    if "prompt_length" not in known and mask is not None and mask.any():
        known["prompt_length"] = int((mask != 0).argmax())
    return Sample(
        tokens=ids,
        loss_mask=mask,
        logprobs=per_token("logprobs", logprobs, np.float32),
        versions=per_token("versions", versions, np.int32, -1),
        learning={
            name: per_token(name, values, np.float32)
            for name, values in (learning or {}).items()
            if values is not None
        },
        **known,
    )


def values_of_inputs(values: Any, num_tokens: int, where: str) -> np.ndarray:
    """Return values [T, layers, k] of integers, such as routed experts.

    Engines report them for the tokens that they read: the last ones may be missing, and are
    unknown then. Raises ForeignFormat for another shape.
    """
    array = as_numpy(values, where)
    missing = num_tokens - len(array) if array.ndim == 3 else -1
    if missing < 0 or array.dtype.kind not in "iu":
        raise ForeignFormat(f"{where}: values of shape {array.shape} for {num_tokens} tokens")
    rest = np.full((missing, *array.shape[1:]), unknown_value(array.dtype), array.dtype)
    return np.concatenate([array, rest])


def experts_of(values: Any, num_tokens: int, where: str) -> dict[str, np.ndarray]:
    """Return routed experts as extras of a sample; none for None. Raises ForeignFormat."""
    return {} if values is None else {"routed_experts": values_of_inputs(values, num_tokens, where)}


def prompt_group(tokens: np.ndarray, loss_mask: np.ndarray) -> Hashable:
    """Return the tokens before the first one in the mask as a group; None without such a token."""
    return tokens[: int((loss_mask != 0).argmax())].tobytes() if loss_mask.any() else None


def member(document: Mapping[str, Any], name: str, where: str, kind: type = object) -> Any:
    """Return a mandatory member. Raises ForeignFormat, with what there is, if it is absent or of another kind."""
    if name not in document:
        members = printable(str(sorted(map(str, document))[:20]), 400)
        raise ForeignFormat(f"{where} has no {name!r}, only {members}")
    if not isinstance(document[name], kind):
        value = printable(repr(document[name]), 60)
        raise ForeignFormat(f"{where}: {name} is {value}, {kind.__name__} expected")
    return document[name]


@contextmanager
def read_at(where: str) -> Iterator[None]:
    """Raise what values of any type and shape cause as a ForeignFormat that names their place."""
    try:
        yield
    except (RecordError, MemoryError, OSError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {printable(str(error), 300)}"
        raise ForeignFormat(f"{where} is not what a known framework writes ({what})") from None


def optional(document: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return an optional member; `default` if it is absent or None."""
    value = document.get(name)
    return default if value is None else value


def number_or_none(value: Any, where: str) -> float | None:
    """Return a float, None for None and NaN. Raises RecordError."""
    return None if value is None or value != value else to_float(value, where)


def finish_reason_of(name: str | None) -> int | None:
    """Return the number of a finish reason; None for one that is unknown or absent."""
    return None if name is None else FINISH_REASONS.get(str(name).lower())


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
            with read_at(str(paths[0])):
                steps.append(Step(name, read(paths)))
        except UnfinishedFile as error:
            notes += cut_off(paths, read)
            first = first or error
    if first is not None and not any(step.samples for step in steps):
        raise first
    return steps, notes


ReadFile = Callable[[Path, list[str]], Sequence[Sample]]  # it adds to the notes what the file lacks


def read_files(
    name: str, notes: Sequence[str], files: Sequence[Path], read: ReadFile, step: str = "{}"
) -> Foreign:
    """Read one step per file of a format; `step` is its name, with the number in that of the file."""
    found: list[str] = []
    units = [(step.format(file.stem), [file]) for file in of_one_run(files)]
    steps, left_out = read_steps(units, lambda paths: read(paths[0], found))
    return Foreign(name, steps, [*notes, *counted(found), *left_out])


def lines_of(parse: Callable[[dict[str, Any], str], Sample]) -> ReadFile:
    """Return a reader of files with a JSON object per sample, which `parse` gets with its place."""
    return lambda file, notes: [line.parsed(parse) for line in json_lines(file)]


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

    def parsed(self, parse: Callable[[dict[str, Any], str], Sample]) -> Sample:
        with read_at(self.where):
            return parse(self.row, self.where)


def json_lines(file: Path, cut: list[str] | None = None) -> list[Line]:
    """Read the JSON objects of a file, one a line; only a newline ends a line.

    A last line that is cut off is dropped with a note in `cut`; without `cut`, raises
    UnfinishedFile. Raises ForeignFormat for anything else than objects.
    """
    lines = read_received(file, MOST_BYTES).split(b"\n")
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
    with open_received(file) as lines:
        try:
            row = parse_json(lines.readline(MAX_LINE) or b"null")
        except (ValueError, RecursionError):
            return {}
    return row if isinstance(row, dict) else {}


def with_members(files: Sequence[Path], members: Set[str], levels: int = 1) -> list[Path]:
    """Return the files whose first line has these members, as `with_cut_off`."""
    return with_cut_off(
        [file for file in files if first_row(file).keys() >= members], files, is_cut_line, levels
    )


def is_cut_line(file: Path) -> bool:
    with open_received(file) as lines:
        line = lines.readline(MAX_LINE)
    return line.startswith(b"{") and not line.endswith(b"\n") and not first_row(file)
