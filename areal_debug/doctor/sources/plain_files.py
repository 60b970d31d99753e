"""Read metrics from JSON lines, JSON and CSV."""

import csv
import glob
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_core.safety.received import UnreadableFile, lines_received, read_received

Row = Mapping[str, Any]
ROW = " row"  # the number of a row whose step is unknown, under a name that no metric has

NUMBER = re.compile(r"\s*[-+]?\.?\d[\d.eE+-]*\s*")
BOUNDS_OF_EXPORTS = ("__MIN", "__MAX")  # of Weights & Biases: columns next to each metric's own


class UnreadableRun(UnreadableFile):
    """There are no metrics at a path; the message names what was searched for."""


class SeveralRuns(UnreadableRun):
    """There are several runs at a path, and none or not one of them was named."""


def read_text(file: Path) -> str:
    """Read a text. Raises UnreadableRun."""
    try:
        return read_received(file).decode()
    except UnicodeDecodeError as error:
        raise UnreadableRun(f"{file} is not text: {error}") from error


def parse_json(text: str, source: str) -> Any:
    """Parse JSON; `source` is where it was read. Raises UnreadableRun."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableRun(f"{source} is not JSON: {error}") from error


def read_jsonl(file: Path, run: str = "") -> Iterable[Row]:
    """Read one JSON object per line; an incomplete last line of a killed run is skipped."""
    try:
        yield from json_lines(lines_received(file, errors="strict"), str(file))
    except UnicodeDecodeError as error:
        raise UnreadableRun(f"{file} is not text: {error}") from error


def json_lines(lines: Iterable[str], source: str) -> Iterator[Row]:
    """Yield the object of each line, without an incomplete last one. Raises UnreadableRun."""
    broken: UnreadableRun | None = None
    for number, line in enumerate(lines, start=1):
        if broken is not None:
            raise broken
        try:
            yield parse_json(line, f"{source}, line {number}")
        except UnreadableRun as error:
            broken = error


def read_trainer_state(file: Path, run: str = "") -> Iterable[Row]:
    history = parse_json(read_text(file), str(file))
    if not isinstance(history, dict) or not isinstance(history.get("log_history"), list):
        raise UnreadableRun(f"{file} has no list log_history: is it a trainer_state.json of Transformers?")
    entries: list[Row] = history["log_history"]
    return entries


def read_json(file: Path, run: str = "") -> Iterable[Row]:
    """Read a list of rows, a `log_history` or `history` of them, or columns of pandas."""
    text = read_text(file)
    if re.search(r"\}\n+\{", text):  # of RLlib: lines of JSON
        return list(json_lines(text.splitlines(), str(file)))
    found = parse_json(text, str(file))
    if isinstance(found, dict):
        found = next((found[name] for name in ("log_history", "history") if name in found), found)
    if isinstance(found, dict):
        columns = [dict(enumerate(one)) if isinstance(one, list) else one for one in found.values()]
        found = dict(zip(found, columns, strict=True))
    if isinstance(found, dict) and found and all(isinstance(column, dict) for column in found.values()):
        return [
            {name: column[key] for name, column in found.items() if key in column}
            for key in dict.fromkeys(key for column in found.values() for key in column)
        ]
    if not isinstance(found, list):
        raise UnreadableRun(f"{file} has no rows: expected a list of objects, or one named log_history")
    return found


def read_csv(file: Path, run: str = "") -> Iterable[Row]:
    """Read an export of Weights & Biases: of its columns `run - metric`, those of one run."""
    for part in charts_beside(file):
        yield from rows_of_csv(part, run)


def rows_of_csv(file: Path, run: str) -> Iterator[Row]:
    # cells beyond the last column are collected under ""
    table = csv.DictReader(io.StringIO(read_text(file), newline=""), restkey="")
    try:
        if (names := table.fieldnames) and all(map(NUMBER.fullmatch, names)):
            raise UnreadableRun(
                f"{file} has no header: its first line is {','.join(names)[:60]!r}; add the names"
            )
        for row in table:
            cells = ((name, value) for name, value in row.items() if value not in ("", None))
            named = ((name.partition(" - "), value) for name, value in cells)
            yield {
                (metric if dash else name): value
                for (name, dash, metric), value in named
                if not (dash and run and name != run) and not metric.endswith(BOUNDS_OF_EXPORTS)
            }
    except csv.Error as error:
        raise UnreadableRun(f"{file}, after line {table.line_num}: not a row of a table: {error}") from error


def exported(file: Path) -> list[tuple[str, str]]:
    """Return run and metric of each column of an export of Weights & Biases; empty for another table."""
    try:
        header = next(csv.reader(lines_received(file)), [])
    except csv.Error:
        header = []
    named = (name.partition(" - ") for name in header)
    return [(run, metric) for run, dash, metric in named if dash and not metric.endswith(BOUNDS_OF_EXPORTS)]


def is_chart(file: Path) -> bool:
    """Return whether a table is the export of a single chart: of one metric."""
    return len({metric for _, metric in exported(file)}) == 1


def charts_beside(file: Path) -> list[Path]:
    """Return the single charts in the folder of one of them, and any other file alone."""
    return [one for one in sorted(file.parent.glob("*.csv")) if is_chart(one)] if is_chart(file) else [file]


def read_mlflow(file: Path, run: str = "") -> Iterable[Row]:
    """Read the folder `metrics` beside a `meta.yaml`: a file a metric, a line a value: time, value, step."""
    folder = file.parent / "metrics"
    for one in sorted(path for path in folder.rglob("*") if path.is_file()):
        cells = (line.split() for line in lines_received(one))
        name = one.relative_to(folder).as_posix()
        yield from ({"step": found[2], name: found[1]} for found in cells if len(found) > 2)


def read_charts(file: Path, run: str = "") -> Iterable[Row]:
    """Read the downloads of TensorBoard beside a file: one for each tag of a run."""
    begin, tag, _ = file.name.partition("-tag-")
    for part in sorted(file.parent.glob(f"{glob.escape(begin)}{tag}*.csv")):
        name = part.stem.partition(tag)[2]
        yield from ({"step": row["Step"], name: row["Value"]} for row in read_csv(part) if len(row) == 3)


def fault_of_csv(file: Path) -> str:
    """Return why a table holds no numbers by step, as a sentence that says what to do."""
    header, *rows = read_text(file).splitlines() or [""]
    if not header.strip():
        return f"{file} is empty: give a table with a header and a column step"
    if not any(map(str.strip, rows)):
        return f"{file} has a header and no rows: give one row a step"
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if mark in header and "," not in header:
            return f"{file} has {name} between its columns: separate them by commas"
    if not any(NUMBER.fullmatch(cell) for row in rows for cell in row.split(",")):
        return f"{file} has no number below its header: the first row is {rows[0][:60]!r}"
    return f"{file} has no column step or global_step that holds numbers: its columns are {header[:200]!r}"


def runs_of_csv(file: Path) -> tuple[str, ...]:
    """Return the runs whose metrics an export of Weights & Biases has side by side."""
    return tuple(dict.fromkeys(run for part in charts_beside(file) for run, _ in exported(part))) or ("",)
