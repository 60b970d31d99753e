"""Check the code against a record: replay it on its own ranks and raise if the numbers differ.

check_spec ─> mode rewrite / all / once: write the record first
           ─> replay in forks of one process (determinism is set before it starts)
           ─> compare at the record's guarantee ─> report, or RegressionError
"""

import fcntl
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from areal_core.environment import ALLOWED_CODE
from areal_core.launch.warm import WarmRanks
from areal_core.safety.interpreter import python_command
from areal_debug.diff.report import describe, format_value
from areal_debug.replay.ranks import replay_on_ranks, run_once
from areal_debug.replay.report import difference_of, next_commands
from recorder import Record, RecordError, open_record
from recorder.archive.extract import extract_record
from recorder.archive.pack import archive_record
from recorder.format import ANCHORS_FOLDER
from recorder.header import write_header
from replayer.check import NOT_COMPUTED, ReplayReport, compare_outcomes
from replayer.errors import ReplayError
from replayer.noise import other_machine
from replayer.own_code import code_arguments
from replayer.preconditions import check_model, check_recorded_results, step_range
from replayer.request import Request

SHOWN = 6  # differences in a message


class RegressionError(AssertionError):
    """The code does not reproduce the recorded numbers, or there is no record to compare with."""


@dataclass(frozen=True)
class Spec:
    """The request of a test.

    `steps` are first and last, both included, or one; all unless given. `exact` requires the
    recorded bits even on a different machine. `model` is the current path of the run's first model.
    `run` are the arguments of `areal-debug train` that generate the record. `code` is the file or
    folder with the loss, advantage or objective of the run, if it had its own. `root` is the folder
    that relative paths of `run`, and of its config, start at.
    """

    path: Path
    test: str
    steps: tuple[int, int] | int | None = None
    exact: bool = False
    model: str | os.PathLike[str] | None = None
    run: Sequence[str] = ()
    code: Path | None = None
    root: Path | None = None


@dataclass(frozen=True)
class CheckedRecord:
    """A replay that agrees with its record.

    `stale` are the reasons why only agreement within noise was required; `changes` what rewriting
    changed.
    """

    report: ReplayReport
    stale: tuple[str, ...]
    changes: list[str] | None


def check_spec(spec: Spec, mode: str, ranks: Callable[[], WarmRanks]) -> CheckedRecord:
    """Replay the record of a test, after writing it if `mode` requires.

    Args:
        ranks: starts what replays, or returns it if it has started.

    Raises RegressionError.
    """
    if spec.code is not None:
        os.environ[ALLOWED_CODE] = str(spec.code)
    try:
        with alone_in(spec.path.parent) if mode != "none" else nullcontext():
            changes = write_if_requested(spec, mode, ranks)
        request = request_of(spec, open_record(spec.path))
        with refusals(request) as num_ranks:
            report = replay_on_ranks(ranks(), request, num_ranks, quiet=True)
    except (RecordError, ReplayError) as error:
        raise RegressionError(str(error)) from None
    assert report.verdict is not None
    # "changed" means that an option was set differently on purpose, so nothing was judged
    accepted = report.verdict.exit_code == 0 and report.verdict.finding != "changed"
    if not accepted or (spec.exact and not report.identical):
        raise RegressionError(describe_failure(spec, request, report))
    return CheckedRecord(report, report.guarantee.reasons, changes)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_if_requested(spec: Spec, mode: str, ranks: Callable[[], WarmRanks]) -> list[str] | None:
    """Write the record if the mode requires it; return the changes, None if nothing was written."""
    if mode == "rewrite" and spec.path.exists():
        return rewrite(spec, ranks)
    if mode == "all" or (mode in ("once", "rewrite") and not spec.path.exists()):
        return generate(spec)
    if not spec.path.exists():
        raise RegressionError(
            f"there is no record at {spec.path}, and mode {mode!r} never generates one: run {spec.test} with --areal-record=once"
        )
    return None


def request_of(spec: Spec, record: Record) -> Request:
    """Make the replay request of a test. Raises ReplayError for errors that are visible at once."""
    check_recorded_results(record, "a test")
    steps = (spec.steps, spec.steps) if isinstance(spec.steps, int) else spec.steps or (None, None)
    first, last = step_range(record, *steps)
    model = None if spec.model is None else str(spec.model)
    check_model(record, model, first)
    return Request(str(spec.path), first, last, model)


@contextmanager
def refusals(request: Request) -> Iterator[int]:
    """Provide the recorded number of ranks.

    Raises RegressionError if the replay ends the process.
    """
    try:
        yield open_record(request.record).header.world_size
    except SystemExit as ended:
        raise RegressionError(
            f"the replay of {request.record} ended with exit code {ended.code}: its output is in the captured output"
        ) from None


def commands_of(request: Request, report: ReplayReport) -> list[str]:
    first_of = open_record(request.record).steps
    words = ["areal-debug", "replay", request.record]
    words += ["--from-step", str(request.first)] if request.first != first_of[0] else []
    words += ["--to-step", str(request.last)] if request.last != first_of[-1] else []
    words += ["--model", request.model] if request.model else []
    words += code_arguments([own.file for own in report.own_code])
    return [shlex.join(words), *next_commands(report, request)]


def describe_failure(spec: Spec, request: Request, report: ReplayReport) -> str:
    """Describe what differs, recorded and replayed, how to reproduce it, and how to accept it."""
    first, verdict = report.first_different, report.verdict
    assert first is not None
    assert verdict is not None
    lines = [f"{spec.path} does not match the numbers of the code. {difference_of(report)}"]
    lines += [f"cause: {own} (line {own.line})" for own in report.own_code if own.changed]
    if report.first is not None:
        where = describe(report.first, ("recorded", "replayed"))
        lines.append(f"first in step {first.step}, stage {report.first.stage}: {where}")
    if report.pattern is not None:
        lines.append(f"pattern: {report.pattern}")
    if verdict.k is not None:
        lines.append(
            f"the largest difference is {verdict.k:.3g} x this machine's noise floor: {verdict.where}, step {verdict.step}"
        )
    lines += [f"guarantee {report.guarantee.kind}: {reason}" for reason in report.guarantee.reasons]
    if (header := report.set_differently) is not None:
        lines += [
            f"set differently: {d.where}: recorded {format_value(d.recorded)}, now {format_value(d.current)}"
            for d in (*header.config, *header.model)[:SHOWN]
        ]
    lines += [
        f"  {d.kind} {d.where}: recorded {format_value(d.recorded)}, replayed {format_value(d.replayed)}"
        for d in first.differences[:SHOWN]
    ]
    if (num_more := len(first.differences) - SHOWN) > 0:
        lines.append(f"  ... and {num_more} more")
    reproduce, *others = commands_of(replace(request, last=first.step), report)
    lines.append(f"to reproduce it: {reproduce}")
    lines += [f"next: {command}" for command in others]
    lines.append(f"if the change is intended: pytest {shlex.quote(spec.test)} --areal-record=rewrite")
    return "\n".join(lines)


def rewrite(spec: Spec, ranks: Callable[[], WarmRanks]) -> list[str]:
    """Train again on the recorded rollouts and replace the record; return what changed.

    Options, model and rollouts stay as recorded; the environment is the current one. Checkpoints
    (anchors) after the first step are dropped, because their weights followed from the old numbers.
    """
    old = open_record(spec.path)
    with tempfile.TemporaryDirectory() as folder:
        new_path = Path(folder) / "record"
        request = replace(request_of(replace(spec, steps=None), old), record_to=str(new_path))
        with refusals(request) as num_ranks:
            run_once(ranks(), request, num_ranks, quiet=True)
        new = open_record(new_path)
        moved = other_machine(old.header, new.header)
        changes = [f"environment: {d.where}: {d.recorded} -> {d.current}" for d in moved[:SHOWN]]
        changes += describe_changes(old, new)
        if not changes:
            return []
        kept = replace(
            old.header,
            created=new.header.created,
            environment=new.header.environment,
            recording=new.header.recording,
        )
        write_header(new_path, kept)
        if 0 in old.anchors():
            anchor = f"{ANCHORS_FOLDER}/000000"
            shutil.copytree(old.storage.local_folder(anchor), new_path / anchor, dirs_exist_ok=True)
        move_record(new_path, spec.path)
    return changes


def describe_changes(old: Record, new: Record) -> list[str]:
    """Return a line per differing step: number of values, first statistics old and new."""
    lines = []
    for step in new.steps:
        ranks = range(old.header.num_ranks)
        found = [
            compare_outcomes(old.step(step).outcome(rank), new.step(step).outcome(rank), NOT_COMPUTED)
            for rank in ranks
        ]
        count = sum(len(comparison.differences) for comparison in found)
        shown = [
            f"{d.where} {format_value(d.recorded)} -> {format_value(d.current)}" for d in found[0].stats[:2]
        ]
        if count:
            lines.append(f"step {step}: {count} values, such as {'; '.join(shown)}")
    return lines


def generate(spec: Spec) -> list[str]:
    """Generate the record with the test's run; return a line for the summary.

    The run starts in a temporary folder with links to what is in `root`, and in which the model is
    called `model`: no path of this machine is recorded.
    """
    if not spec.run:
        raise RegressionError(
            f"{spec.test} does not define how to generate {spec.path}: give its mark run=[script, '--config', file, ...]"
        )
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "record"
        options = ["--dump-rollout", made.name, "cluster.fileroot=runs"]
        if spec.model:
            (Path(folder) / "model").symlink_to(Path(spec.model).resolve())
            options.append("actor.path=model")
        for entry in spec.root.iterdir() if spec.root is not None else ():
            if entry.name not in ("record", "runs", "model"):
                (Path(folder) / entry.name).symlink_to(entry)
        command = python_command("-m", "areal_debug", "train", *spec.run, *options)
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            raise RegressionError(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        move_record(made, spec.path)
    return [f"{len(open_record(spec.path).steps)} steps recorded for the first time"]


def move_record(record: Path, place: Path) -> None:
    copy = archive_record if place.suffix in (".zip", ".zarr") else extract_record
    copy(record, place, overwrite=True)
