"""Find the runs at a path: one source of metrics each, of the best format that the run has.

A run often leaves several kinds of files, in folders of their own (`wandb/`, `tensorboard/`): of
files in one folder or below it, the format that comes first in `FORMATS` is read.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import Path

from areal_core.safety.received import UnreadableFile, open_received
from areal_debug.doctor.names import choose_names
from areal_debug.doctor.rows import is_record
from areal_debug.doctor.sources import console_log, databases
from areal_debug.doctor.sources.events import read_events
from areal_debug.doctor.sources.plain_files import (
    Row,
    SeveralRuns,
    UnreadableRun,
    is_chart,
    json_lines,
    read_charts,
    read_csv,
    read_json,
    read_jsonl,
    read_mlflow,
    read_trainer_state,
    runs_of_csv,
)
from areal_debug.doctor.sources.to_series import collect, name_of_step, numbers_of
from areal_debug.doctor.sources.wandb_run import read_wandb

MAX_FILES = 200_000
MAX_SNIFFED_BYTES = 1 << 22
MAX_JSON_BYTES = 1 << 26
NAMES_SHOWN = 20
ERROR = re.compile(r"(?:.*[\s\]:])?[\w.]*(?:Error|Exception|Killed|[Ss]ignal \d+)\b")
# Folders that hold what one logger wrote of a run in the folder above.
OF_LOGGERS = ("tensorboard", "tensorboard_log", "tb", "wandb", "trackio", "runs", "logs", "events", "metrics")


@dataclass(frozen=True)
class Format:
    """A kind of file.

    `read` yields the rows of one of its runs, `runs` are their names, and `is_metrics` checks a
    file that was found in a folder and not named by the user.
    """

    pattern: str
    read: Callable[[Path, str], Iterable[Row]]
    runs: Callable[[Path], tuple[str, ...]] = lambda file: ("",)
    is_metrics: Callable[[Path], bool] = lambda file: True


@dataclass(frozen=True)
class Source:
    """Where one run's metrics are: `run` inside of a file. `name` is what --run takes."""

    file: Path
    format: Format
    run: str
    name: str


def find_source(path: Path, run: str | None = None) -> tuple[Source, tuple[str, ...]]:
    """Find the only run at a path, or the one that is named; and the names of the others.

    Raises:
        UnreadableRun: there is none.
        SeveralRuns: none or not one of several is named.
    """
    found = find_sources(path)
    if not found:
        searched = f"{path} contains no metrics: searched for {', '.join(patterns())}, and a record"
        raise UnreadableRun(ended(path) or searched)
    matching = found if run is None else named(found, run)
    if len(matching) != 1:
        names = [source.name for source in found[:NAMES_SHOWN]]
        more = f" and {len(found) - NAMES_SHOWN} more" if len(found) > NAMES_SHOWN else ""
        fits = "" if run is None else f"--run {run} fits {len(matching) or 'none'} of them; "
        raise SeveralRuns(
            f"{len(found)} runs found in {path}, the last written first: {', '.join(names)}{more}; {fits}"
            f"choose one with --run, as in: --run {names[0]}"
        )
    return matching[0], tuple(source.name for source in found if source is not matching[0])


def ended(folder: Path) -> str:
    """Return that a folder has a log without numbers by step, with the last error of the log."""
    logs = [file for file, kind in files_below(folder) if kind.read is console_log.read_console]
    lines = [line.strip() for file in sorted(logs, key=modified_ns) for line in head_lines(file)]
    error = next((line[:300] for line in reversed(lines) if ERROR.match(line)), "none: read the log")
    why = f"{folder} has a log without numbers by step: the run ended before its first step, or prints none."
    where = f"areal-debug hang diagnose {folder} explains the end of a job"
    return f"{why} Last error: {error}. {where}" if logs else ""


def named(sources: Sequence[Source], run: str) -> list[Source]:
    """Return the sources that a name fits: exactly, else its last component, folders, a piece."""
    tests: tuple[Callable[[str], bool], ...] = (
        lambda name: name == run,
        lambda name: run in (Path(name).name, Path(name).stem),
        lambda name: f"/{run}/" in f"/{name}",
        lambda name: run in name,
    )
    fitting = ([source for source in sources if test(source.name)] for test in tests)
    return next((some for some in fitting if some), [])


def find_sources(path: Path) -> list[Source]:
    """Find all runs at a path, the last written first. Raises UnreadableRun."""
    if path.is_file():
        kind = format_of(path)
        if kind is None:
            raise UnreadableRun(f"{path} has no known format: expected {', '.join(patterns())}")
        return [Source(path, kind, run, run or path.name) for run in kind.runs(path)]
    if not path.is_dir():
        raise UnreadableRun(f"{path} does not exist: give the folder or the metrics file of a run")
    chosen: dict[Path, Source] = {}
    damaged: UnreadableFile | None = None
    files: dict[str, list[Path]] = defaultdict(list)
    for file, kind in files_below(path):
        files[kind.pattern].append(file)
    for kind in FORMATS:
        roots = {root_of(run) for run in chosen}
        for file in sorted(files[kind.pattern], key=modified_ns, reverse=True):
            run = run_of(file)
            if run in chosen or any(is_same(root_of(run), root) for root in roots):
                continue
            try:
                if kind.is_metrics(file):
                    chosen[run] = Source(file, kind, "", shown(run, path))
            except UnreadableFile as error:
                damaged = damaged or error
    if damaged is not None and not chosen:
        raise damaged
    return sorted(several(chosen.values()), key=lambda source: modified_ns(source.file), reverse=True)


def several(sources: Iterable[Source]) -> Iterator[Source]:
    """Yield a source for each run of a file that holds several."""
    for source in sources:
        runs = source.format.runs(source.file)
        for run in runs:
            name = f"{source.name}/{run}" if len(runs) > 1 else source.name
            yield Source(source.file, source.format, run, name)


def format_of(file: Path) -> Format | None:
    return next((kind for kind in FORMATS if kind is not RECORD and fnmatch(file.name, kind.pattern)), None)


def files_below(folder: Path) -> Iterator[tuple[Path, Format]]:
    """Yield the files of known kinds and the records below a folder.

    Hidden folders and what records hold are left out.
    """
    count = 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if is_record(Path(place)):
            folders.clear()
            yield Path(place), RECORD
            continue
        for name in sorted(files):
            count += 1
            if count > MAX_FILES:
                raise UnreadableRun(
                    f"{folder} holds more than {MAX_FILES:,} files: give the folder of the run"
                )
            file = Path(place, name)
            if (kind := format_of(file)) is not None and file.is_file():
                yield file, kind


def modified_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def run_of(file: Path) -> Path:
    """Return what is common to all metrics files of one run: the file itself, or a folder.

    TensorBoard starts a new event file after a restart; Transformers writes a trainer state into
    each `checkpoint-N`; Weights & Biases exports each chart alone.
    """
    is_part = file.suffix == ".csv" and is_chart(file)
    if is_part or file.name == "meta.yaml" or file.match("events.out.tfevents.*"):
        return file.parent
    if file.match("*-tag-*.csv"):
        return file.with_name(file.name.partition("-tag-")[0])
    if file.name == "trainer_state.json":
        return file.parent.parent if file.parent.name.startswith("checkpoint-") else file.parent
    return file


def root_of(run: Path) -> Path:
    """Return the folder of a run, above those of its loggers."""
    folder = run.parent if run.suffix or run.is_file() else run
    if folder.name.startswith(("run-", "offline-run-")) and folder.parent.name == "wandb":
        folder = folder.parent
    while folder.name in OF_LOGGERS:
        folder = folder.parent
    return folder


def is_same(root: Path, other: Path) -> bool:
    return root.is_relative_to(other) or other.is_relative_to(root)


def shown(run: Path, folder: Path) -> str:
    relative = run.relative_to(folder)
    return relative.as_posix() if relative.parts else folder.name


def patterns() -> list[str]:
    return [kind.pattern for kind in FORMATS if kind is not RECORD]


def has_steps(read: Callable[[Path, str], Iterable[Row]], file: Path) -> bool:
    """Return whether a file begins with rows of metrics: two steps, and numbers beside them.

    A dump of samples has rows of one step. Rows that name no step must have a known quantity.
    """
    if file.stat().st_size > MAX_JSON_BYTES and read is not read_jsonl:
        return False
    try:
        rows = list(
            islice(json_lines(head_lines(file), str(file)) if read is read_jsonl else read(file, ""), 200)
        )
        series = collect(rows)
    except UnreadableFile:
        if read is read_json:  # many others are no metrics
            return False
        raise
    has_names = any(name_of_step(dict(numbers_of(row))) for row in rows if isinstance(row, dict))
    steps = {step for one in series.values() for step in one.steps.tolist()}
    is_named = has_names or bool(choose_names(list(series)))
    return is_named and (len(steps) > 1 or bool(steps and has_names and len(rows) == 1))


def prints_metrics(file: Path) -> bool:
    return bool(choose_names(list(collect(console_log.rows_of(head_lines(file))))))


def head_lines(file: Path) -> list[str]:
    with open_received(file) as opened:
        return opened.read(MAX_SNIFFED_BYTES).decode("utf-8", "replace").splitlines(keepends=True)


def is_project(file: Path) -> bool:
    try:
        return bool(databases.runs_of_project(file))
    except UnreadableFile:
        return False


RECORD = Format("*", lambda file, run: ())
PRINTED = ("*.log", "*.out", "*.txt")
FORMATS = (
    Format("stats.jsonl", read_jsonl),
    Format("trainer_state.json", read_trainer_state),
    Format("events.out.tfevents.*", read_events),
    Format("*.wandb", read_wandb),
    Format("backup.swanlab", read_wandb),
    Format("meta.yaml", read_mlflow, is_metrics=lambda file: (file.parent / "metrics").is_dir()),
    Format("*.db", databases.read_project, databases.runs_of_project, is_project),
    Format("*.jsonl", read_jsonl, is_metrics=partial(has_steps, read_jsonl)),
    Format("*-tag-*.csv", read_charts),
    Format("*.csv", read_csv, runs_of_csv, partial(has_steps, read_csv)),
    Format("*.json", read_json, is_metrics=partial(has_steps, read_json)),
    Format("*.parquet", databases.read_parquet, databases.runs_of_parquet, databases.has_runs),
    RECORD,
    *(Format(printed, console_log.read_console, is_metrics=prints_metrics) for printed in PRINTED),
)
