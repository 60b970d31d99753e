"""Goes on with the record of a run that was cut off: it continues from a checkpoint, and what it did after that is forgotten.

steps  ... 38 39 | 40 41 42(unfinished)      checkpoint before step 40: 42, 41, 40 go, newest first, so that what is left is always a record
steps  ... 37    | checkpoint before 40       38 and 39 were still queued when the run died: they are lost, and gaps.json says so
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from recorder.errors import RecordExists
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    STEP_FILE,
    STEPS_FOLDER,
    RecordHeader,
    Recording,
    step_name,
)
from recorder.gaps import Gaps, write_gaps
from recorder.reader import Record, open_record


def continue_record(folder: Path, first_step: int, header: RecordHeader) -> tuple[dict[int, int], Gaps]:
    """Cuts a record back to the steps before `first_step`; `header` is that of the run that goes on.

    Returns:
        Bytes of each step that stays, and the record's gaps.

    Raises:
        RecordExists: it is the record of another run.
    """
    record = open_record(folder)
    check_same_run(record, header)
    for step in sorted((*record.steps, *record.uncommitted), reverse=True):
        if step >= first_step:
            forget(folder / STEPS_FOLDER / step_name(step), STEP_FILE)
    for step in record.anchors():
        if step > first_step:
            forget(folder / ANCHORS_FOLDER / step_name(step), ANCHOR_FILE)
    kept = [step for step in record.steps if step < first_step]
    gaps = gaps_before(first_step, record.gaps, kept, header.recording)
    if gaps != record.gaps:
        write_gaps(folder, gaps)
    return {step: record.step(step).manifest.size_bytes for step in kept}, gaps


def check_same_run(record: Record, header: RecordHeader) -> None:
    """Raises RecordExists unless model, ranks and what is recorded are those of the record."""
    facts: dict[str, Callable[[RecordHeader], object]] = {
        "model files": lambda h: h.model["files"],
        "data-parallel ranks": lambda h: h.num_ranks,
        "scope or sampling": lambda h: h.recording,
    }
    for name, of in facts.items():
        if of(record.header) != of(header):
            raise RecordExists(
                f"{record.path} holds the record of a run with other {name}, which this one cannot go on with: choose another folder"
            )


def forget(folder: Path, committed_by: str) -> None:
    """Removes a step or an anchor; without the file that committed it, it is none even if the rest stays behind."""
    (folder / committed_by).unlink(missing_ok=True)
    shutil.rmtree(folder)


def gaps_before(first_step: int, gaps: Gaps, kept: list[int], recording: Recording) -> Gaps:
    """The gaps of the steps before `first_step`, and those that were taken but never reached the disk."""
    removed = tuple((first, min(last, first_step - 1)) for first, last in gaps.removed if first < first_step)
    known = Gaps(
        removed,
        tuple(step for step in gaps.dropped if step < first_step),
        tuple(step for step in gaps.lost if step < first_step),
    )
    after = range(kept[-1] + 1 if kept else first_step, first_step)
    lost = [step for step in after if recording.wants(step) and known.reason(step) is None]
    return Gaps(known.removed, known.dropped, (*known.lost, *lost))
