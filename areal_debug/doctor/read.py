"""Read metrics: records, stats.jsonl, TensorBoard events, exports of W&B, trainer states."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_debug.doctor.names import NAMES, family_of, find_name
from areal_debug.doctor.rows import is_record, metrics_of
from areal_debug.doctor.series import Series
from areal_debug.newest import describe_choice, newest_first
from recorder import Record, open_record

STEP_NAMES = ("step", "_step", "Step", "global_step", "trainer/global_step")
TRAINING = "train/"  # the prefix that loggers add to training metrics
Row = Mapping[str, Any]


class UnreadableRun(ValueError):
    """There are no metrics at a path; the message names what was searched for."""


@dataclass(frozen=True)
class Run:
    """The metrics of one run.

    `series` are by quantity (`names.py`), `by_name` is everything that was logged, `config` are
    dotted options of AReaL (empty where unknown). `other_runs` are the runs in the same folder that
    were not read, the newest first. `notes` say which values of a record are unknown.
    """

    path: str
    source: str
    family: str
    series: dict[str, Series]
    by_name: dict[str, Series]
    config: dict[str, Any]
    other_runs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    record: Record | None = None  # that the metrics were read from

    @property
    def num_steps(self) -> int:
        """Steps of the longest metric."""
        return max((len(series.steps) for series in self.by_name.values()), default=0)

    @property
    def choice(self) -> str:
        """One sentence: how many runs the folder holds, which was read, how to choose another.

        Empty where there was nothing to choose.
        """
        return describe_choice("doctor", self.path, self.source, self.other_runs)


def read_run(path: Path) -> Run:
    """Read the metrics of a run from a record, a file, or the newest metrics file in a folder.

    Raises:
        UnreadableRun: there are none, or fewer than one step.
    """
    if is_record(path):
        return read_record(path)
    file, read, other_runs = find_source(path)
    rows = list(read(file))
    consistency = file.parent / "consistency.jsonl"
    if file.name == "stats.jsonl" and consistency.is_file():
        rows += [
            {"step": row["step"], **prefixed(row)}
            for row in read_jsonl(consistency)
            if isinstance(row, dict) and "step" in row
        ]
    by_name = collect(rows)
    if not by_name:
        raise UnreadableRun(
            f"{file} contains no numbers by step: give a file with a column {' or '.join(STEP_NAMES)}"
        )
    family = family_of(list(by_name))
    return Run(str(path), str(file), family, judged(by_name), by_name, read_config(file), other_runs)


def read_record(path: Path) -> Run:
    """Read the metrics of a record. Raises RecordError, and UnreadableRun for one without steps."""
    record = open_record(path)
    rows, notes = metrics_of(record)
    by_name, trainer = collect(rows), record.header.trainer
    if not by_name:
        raise UnreadableRun(f"{path} holds no committed step: nothing to judge")
    config = dict(flat(record.header.config)) if trainer is None else {}
    family = trainer or family_of(list(by_name))
    return Run(str(path), str(path), family, judged(by_name), by_name, config, notes=notes, record=record)


def judged(by_name: Mapping[str, Series]) -> dict[str, Series]:
    """Return the series of each quantity that the run logs."""
    found = {quantity: find_name(quantity, list(by_name)) for quantity in NAMES}
    return {quantity: by_name[name] for quantity, name in found.items() if name is not None}


def prefixed(row: Row) -> dict[str, Any]:
    """Return the numbers of a consistency check as metrics."""
    return {f"consistency/{name}": row[name] for name in ("mean_abs", "k3", "share_above_ln2") if name in row}


def find_source(path: Path) -> tuple[Path, Callable[[Path], Iterable[Row]], tuple[str, ...]]:
    """Find the file to read, its reader, and the other runs in the folder, the newest first.

    Raises:
        UnreadableRun: there is no metrics file.
    """
    if path.is_file():
        for pattern, read in READERS.items():
            if path.match(pattern):
                return path, read, ()
        raise UnreadableRun(f"{path} has no known format: expected {', '.join(READERS)}")
    if not path.is_dir():
        raise UnreadableRun(f"{path} does not exist: give the folder or the metrics file of a run")
    for pattern, read in READERS.items():
        if found := newest_first(path, pattern):
            runs = list(dict.fromkeys(run_of(file) for file in found))
            return found[0], read, tuple(map(str, runs[1:]))
    raise UnreadableRun(f"{path} contains no metrics: searched for {', '.join(READERS)}")


def run_of(file: Path) -> Path:
    """Return what is common to all metrics files of one run: the file itself, or a folder.

    TensorBoard starts a new event file after a restart; Transformers writes a trainer state into
    each `checkpoint-N`.
    """
    if file.match("events.out.tfevents.*"):
        return file.parent
    if file.name == "trainer_state.json" and file.parent.name.startswith("checkpoint-"):
        return file.parent.parent
    return file


def read_text(file: Path) -> str:
    """Read a text. Raises UnreadableRun."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableRun(f"{file} is not text: {error}") from error


def parse_json(text: str, source: str) -> Any:
    """Parse JSON; `source` is where it was read. Raises UnreadableRun."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableRun(f"{source} is not JSON: {error}") from error


def read_jsonl(file: Path) -> Iterable[Row]:
    """Read one JSON object per line; an incomplete last line of a killed run is skipped."""
    lines = read_text(file).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield parse_json(line, f"{file}, line {number}")
        except UnreadableRun:
            if number < len(lines):
                raise


def read_trainer_state(file: Path) -> Iterable[Row]:
    """Read the `trainer_state.json` of TRL or Transformers."""
    history = parse_json(read_text(file), str(file))
    if not isinstance(history, dict) or not isinstance(history.get("log_history"), list):
        raise UnreadableRun(f"{file} has no list log_history: is it a trainer_state.json of Transformers?")
    entries: list[Row] = history["log_history"]
    return entries


def read_csv(file: Path) -> Iterable[Row]:
    """Read a table exported by Weights & Biases; the run is removed from columns `run - metric`."""
    # cells beyond the last column are collected under ""
    table = csv.DictReader(io.StringIO(read_text(file), newline=""), restkey="")
    try:
        for row in table:
            yield {name.split(" - ", 1)[-1]: value for name, value in row.items() if value not in ("", None)}
    except csv.Error as error:
        raise UnreadableRun(f"{file}, after line {table.line_num}: not a row of a table: {error}") from error


def read_events(file: Path) -> Iterable[Row]:
    """Read the TensorBoard event files of one folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield {"step": event.step, name: event.value}


READERS: dict[str, Callable[[Path], Iterable[Row]]] = {
    "stats.jsonl": read_jsonl,
    "trainer_state.json": read_trainer_state,
    "events.out.tfevents.*": read_events,
    "*.jsonl": read_jsonl,
    "*.csv": read_csv,
}


def collect(rows: Iterable[Row]) -> dict[str, Series]:
    """Collect rows into series; if a step was logged more than once, the last value is kept."""
    values: dict[str, dict[int, float]] = {}
    for row in rows:
        step_name = next((name for name in STEP_NAMES if isinstance(row, dict) and name in row), None)
        number = as_number(row[step_name]) if step_name is not None else None
        if number is None or not abs(number) < 2**63:
            continue  # not a row of metrics
        if isinstance(row.get("data"), dict):  # of verl's file logger
            row = row["data"] | {step_name: number}
        step = int(number)
        for name, value in row.items():
            number = as_number(value)
            if name != step_name and number is not None:
                values.setdefault(name.removeprefix(TRAINING), {})[step] = number
    return {name: series_of(name, by_step) for name, by_step in values.items()}


def as_number(value: Any) -> float | None:
    """Convert a number, or text that spells one; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return None


def series_of(name: str, by_step: Mapping[int, float]) -> Series:
    """Make a series in ascending order of steps."""
    steps = np.array(sorted(by_step), np.int64)
    return Series(name, steps, np.array([by_step[step] for step in steps.tolist()], np.float64))


def read_config(file: Path) -> dict[str, Any]:
    """Read the dotted options of the run from a config or a record next to the metrics."""
    for name in ("config.json", "record/record.json"):
        found = file.parent / name
        if found.is_file():
            document = parse_json(read_text(found), str(found))
            options = document.get("config") if name.startswith("record") else document
            return dict(flat(options)) if isinstance(options, dict) else {}
    return {}


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield dotted names and values."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
