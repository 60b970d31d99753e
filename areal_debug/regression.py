"""Holds the code to a record: replays it on ranks of its own, judges it as promised, and says what differs and how to see it again.

hold ─> mode rewrite / all / once: write the record first
     ─> replay in processes of their own (determinism is set before they start) ─> judge ─> report, or RegressionError
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from areal_debug.render import format_value
from areal_debug.replay_ranks import run_once
from recorder import Record, RecordError, open_record
from recorder.archive_writer import archive_record
from recorder.extract import extract_record
from recorder.format import ANCHORS_FOLDER
from recorder.header import write_header
from replayer.before import check_model, check_replayable, step_range
from replayer.check import NOT_COMPUTED, ReplayReport
from replayer.compare import compare_outcomes
from replayer.errors import ReplayError
from replayer.noise import other_machine
from replayer.request import Request
from replayer.rerun import replay_and_judge

SHOWN = 12  # differences in a message


class RegressionError(AssertionError):
    """The code does not give the recorded numbers, or there is no record to hold it to."""


@dataclass(frozen=True)
class Spec:
    """What a test asks for.

    `steps` are first and last, both included, or one; all unless given. `exact` wants the recorded bits even where the machine is another
    one. `model` is where the model that the run started from lies now. `run` are the arguments of `areal-debug train` that make the record.
    """

    path: Path
    test: str
    steps: tuple[int, int] | int | None = None
    exact: bool = False
    model: str | os.PathLike[str] | None = None
    run: Sequence[str] = ()


@dataclass(frozen=True)
class Held:
    """A replay that met its record. `stale` says why only noise could be promised; `changes` what writing the record changed."""

    report: ReplayReport
    stale: tuple[str, ...]
    changes: list[str] | None


def hold(spec: Spec, mode: str) -> Held:
    """Replays the record of a test, which `mode` may want written first. Raises RegressionError."""
    try:
        changes = write_first(spec, mode)
        request = request_of(spec, open_record(spec.path))
        report = replay_and_judge(request, run_quietly)
    except (RecordError, ReplayError) as error:
        raise RegressionError(str(error)) from None
    assert report.verdict is not None
    # "changed" is a verdict without a judgement, for those who set an option differently on purpose
    accepted = report.verdict.exit_code == 0 and report.verdict.finding != "changed"
    if not accepted or (spec.exact and not report.identical):
        raise RegressionError(describe_failure(spec, request, report))
    return Held(report, report.guarantee.reasons, changes)


def write_first(spec: Spec, mode: str) -> list[str] | None:
    """Writes the record where the mode wants it; returns what changed, None where nothing was to be written."""
    if mode == "rewrite" and spec.path.exists():
        return bless(spec)
    if mode == "all" or (mode in ("once", "rewrite") and not spec.path.exists()):
        return generate(spec)
    if not spec.path.exists():
        raise RegressionError(
            f"there is no record at {spec.path}, and mode {mode!r} never generates one: run {spec.test} with --areal-record=once"
        )
    return None


def request_of(spec: Spec, record: Record) -> Request:
    """The replay that a test asks for. Raises ReplayError for what can be seen to be wrong at once."""
    check_replayable(record)
    steps = (spec.steps, spec.steps) if isinstance(spec.steps, int) else spec.steps or (None, None)
    first, last = step_range(record, *steps)
    model = None if spec.model is None else str(spec.model)
    check_model(record, model or record.header.config["actor"]["path"], first)
    return Request(str(spec.path), first, last, model)


def run_quietly(request: Request) -> ReplayReport:
    """One replay on as many ranks as recorded."""
    try:
        return run_once(request, open_record(request.record).header.world_size, quiet=True)
    except SystemExit as ended:
        raise RegressionError(
            f"the replay of {request.record} ended with exit code {ended.code}: what it said is in the captured output"
        ) from None


def command_of(request: Request) -> str:
    """The command that shows the same."""
    first_of = open_record(request.record).steps
    words = ["areal-debug", "replay", request.record]
    words += ["--from-step", str(request.first)] if request.first != first_of[0] else []
    words += ["--to-step", str(request.last)] if request.last != first_of[-1] else []
    return shlex.join(words + (["--model", request.model] if request.model else []))


def describe_failure(spec: Spec, request: Request, report: ReplayReport) -> str:
    """What differs, recorded beside replayed, then how to see it again and how to accept it."""
    first, verdict = report.first_different, report.verdict
    assert first is not None
    assert verdict is not None
    num_different = sum(not result.identical for result in report.steps)
    lines = [
        f"{spec.path} is not what the code gives now: {num_different} of {len(report.steps)} steps differ, "
        f"the first is step {first.step}, in {len(first.differences)} values"
    ]
    if verdict.k is not None:
        lines.append(
            f"the farthest is {verdict.k:.3g} x this machine's own noise away: {verdict.where}, step {verdict.step}"
        )
    lines += [
        f"promised were {report.guarantee.kind} numbers: {reason}" for reason in report.guarantee.reasons
    ]
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
    lines.append(f"to see it again: {command_of(replace(request, last=first.step))}")
    lines.append(f"if the change is meant: pytest {shlex.quote(spec.test)} --areal-record=rewrite")
    return "\n".join(lines)


def bless(spec: Spec) -> list[str]:
    """Trains again on the recorded rollouts and puts the new numbers into the record's place; returns what changed.

    Options, model and rollouts stay as recorded; the environment is this one's. Anchors after the first step are left out, because their
    weights followed from the old numbers.
    """
    old = open_record(spec.path)
    with tempfile.TemporaryDirectory() as folder:
        new_path = Path(folder) / "record"
        request = replace(request_of(replace(spec, steps=None), old), record_to=str(new_path))
        run_quietly(request)
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
        put_in_place(new_path, spec.path)
    return changes


def describe_changes(old: Record, new: Record) -> list[str]:
    """A line for each step that differs: how many values, and the first statistics, old and new."""
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
    """Makes the record with the test's run; returns a line that says so.

    The run starts in a folder of its own, in which the model is called `model`: no path of this machine gets into the record.
    """
    if not spec.run:
        raise RegressionError(
            f"{spec.test} does not say how to make {spec.path}: give its mark run=[script, '--config', file, ...]"
        )
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "record"
        options = ["--dump-rollout", made.name, "cluster.fileroot=runs"]
        if spec.model:
            (Path(folder) / "model").symlink_to(Path(spec.model).resolve())
            options.append("actor.path=model")
        command = [
            sys.executable,
            "-c",
            "from areal_debug.cli import main; main()",
            "train",
            *spec.run,
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            raise RegressionError(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        put_in_place(made, spec.path)
    return [f"{len(open_record(spec.path).steps)} steps are recorded for the first time"]


def put_in_place(record: Path, place: Path) -> None:
    """Moves a record to where a test expects it, as an archive where its name ends in `.zip` or `.zarr`."""
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_name("." + place.name)
    for path in (unfinished, unfinished.with_suffix(unfinished.suffix + ".tmp")):
        if path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if place.suffix in (".zip", ".zarr"):
        archive_record(record, unfinished)
    else:
        extract_record(record, unfinished)
    if place.is_dir():
        shutil.rmtree(place)
    unfinished.rename(place)
