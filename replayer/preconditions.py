"""Preconditions of a replay, checked without torch, so that mistakes fail before launch."""

import os
from collections.abc import Callable
from pathlib import Path

from areal_core.engine.checkpoint.files import read_checkpoint
from recorder import Problem, Record, verify
from recorder.environment import folder_identity
from recorder.header import check_folder
from replayer.anchors import CHECKPOINT
from replayer.errors import ReplayError, WrongEdit, WrongModel
from replayer.expression import ROW_NAMES, parse_expression
from replayer.request import Request


def step_range(record: Record, first_step: int | None, last_step: int | None) -> tuple[int, int]:
    """Return the steps to report, both included; None is the first or last recorded step.

    Raises:
        ReplayError: the record has no such steps.
    """
    if not record.steps:
        raise ReplayError(f"{record.path} has no finished step: there is nothing to replay")
    first = record.steps[0] if first_step is None else first_step
    last = record.steps[-1] if last_step is None else last_step
    if not record.steps[0] <= first <= last <= record.steps[-1]:
        raise ReplayError(
            f"steps {first} to {last} were requested, the record has {record.steps[0]} to {record.steps[-1]}"
        )
    return first, last


def nearest_anchor(record: Record, step: int) -> int | None:
    """Return the last anchor at or before a step; None to start from the run's first weights."""
    return max((anchor for anchor in record.anchors() if anchor <= step), default=None)


def check_steps_present(record: Record, first: int, last: int) -> None:
    """Raise ReplayError unless all steps from the anchor before `first` to `last` are recorded."""
    start = nearest_anchor(record, first) or 0
    recorded = set(record.steps)
    missing = [step for step in range(start, last + 1) if step not in recorded]
    if missing:
        anchors = ", ".join(map(str, record.anchors())) or "none"
        raise ReplayError(
            f"step {missing[0]} is not in {record.path}, and a replay to step {last} needs it: start after it, from an "
            f"anchor (available: {anchors}), or end before it"
        )


def check_anchor(record: Record, step: int) -> None:
    """Raise CheckpointError if the anchor from which a replay of `step` starts is damaged.

    Otherwise every rank would report it with a traceback.
    """
    if (anchor := nearest_anchor(record, step)) is not None:
        read_checkpoint(record.anchor(anchor) / CHECKPOINT)


def check_replayable(record: Record) -> None:
    """Raise ReplayError for an imported record without options or without tokens."""
    if not record.header.config:
        raise ReplayError(
            f"{record.path} has no config: import it again with --config, or train on it with "
            f"`areal-debug train SCRIPT --config C --replay-rollout {record.path}`"
        )
    if record.steps and not any(b.num_tokens for b in record.step(record.steps[0]).manifest.batches.values()):
        raise ReplayError(f"{record.path} has text and no tokens: it can be read, but not replayed")


def check_model(record: Record, path: str, first_step: int = 0) -> None:
    """Raise WrongModel unless the folder at `path` has the files of the run's first model.

    With an anchor at `first_step` or before, the weights come from there, and only the model's
    config must be the same.
    """
    recorded = record.header.model["files"]
    if any(step <= first_step for step in record.anchors()):
        recorded = {name: identity for name, identity in recorded.items() if name == "config.json"}
    if not Path(path).is_dir():
        if recorded:
            raise WrongModel(
                f"the run started from the model at {path}, which is not a folder on this machine: "
                f"give its path with --model (or actor.path)"
            )
        return
    current = folder_identity(path)["files"]
    names = [name for name, identity in recorded.items() if current.get(name) != identity]
    if names:
        raise WrongModel(
            f"{path} is not the model that the run started from: {', '.join(names[:3])} differ; "
            f"give the right one with --model (or actor.path)"
        )


def verify_bytes(folder: str | os.PathLike[str], on_step: Callable[[int], None]) -> list[Problem]:
    """List the damage in a record, without steps that were unfinished when the run ended."""
    return [problem for problem in verify(folder, on_step).problems if problem.kind != "unfinished"]


def check_edits(record: Record, request: Request) -> None:
    """Raise WrongFilter, WrongEdit or RecordExists for errors that are visible before a run."""
    if request.row_filter is not None:
        parse_expression(request.row_filter, ROW_NAMES)
    if request.edit is not None and not Path(request.edit).is_file():
        raise WrongEdit(
            f"there is no edit script {request.edit}: give a file with a function edit(batch, step)"
        )
    if request.record_to is not None:
        check_folder(Path(request.record_to), overwrite=False)
        if Path(request.record_to).resolve().is_relative_to(Path(record.path).resolve()):
            raise WrongEdit(f"{request.record_to} is inside the record, which is never written into")
