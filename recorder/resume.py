"""Resume the record of an interrupted run from a checkpoint, removing the steps recorded after it.

steps  ... 38 39 | 40 41 42(unfinished)   checkpoint before step 40: remove 42, 41, 40 in this
                                          order, so that the rest is always a record
steps  ... 37    | checkpoint before 40   38 and 39 were still queued when the run died:
                                          gaps.json lists them as lost
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_core.safety.durable import sync
from recorder.difference import find_differences
from recorder.documents import json_bytes, parse_json
from recorder.errors import RecordExists
from recorder.format import (
    ANCHOR_FILE,
    ANCHORS_FOLDER,
    END_FILE,
    STEP_FILE,
    STEPS_FOLDER,
    RecordHeader,
    Recording,
    step_name,
)
from recorder.header import Gaps, write_gaps
from recorder.reader import Record, open_record

logger = logging.getLogger(__name__)

# A record has one configuration. Sections of our trainer's options that act on a step, and members that do not:
ACTING = ("actor", "critic", "ref", "teacher", "seed", "deterministic")
NOT_ACTING = {"path", "scheduling_spec", "scheduling_strategy", "experiment_name", "trial_name", "nonfinite",
              "weight_update_mode", "enable_delta_weight_update", "parity_check"}  # fmt: skip


def resume_record(folder: Path, first_step: int, header: RecordHeader) -> tuple[dict[int, int], Gaps]:
    """Truncate a record to the steps before `first_step`; `header` is that of the resumed run.

    Returns:
        Bytes of each remaining step, and the record's gaps.

    Raises:
        RecordExists: the record is that of another run.
    """
    record = open_record(folder)
    check_same_run(record, header)
    (folder / END_FILE).unlink(missing_ok=True)  # first: it names a last step
    # An unfinished step before the checkpoint goes, too: between committed ones it would be damage.
    after = [step for step in record.steps if step >= first_step]
    for step in sorted((*after, *record.uncommitted), reverse=True):
        remove_committed(folder / STEPS_FOLDER / step_name(step), STEP_FILE)
    for step in record.anchors():
        if step > first_step:
            remove_committed(folder / ANCHORS_FOLDER / step_name(step), ANCHOR_FILE)
    kept = [step for step in record.steps if step < first_step]
    gaps = gaps_before(first_step, record.gaps, kept, header.recording)
    if gaps != record.gaps:
        write_gaps(folder, gaps)
    return {step: record.step(step).manifest.size_bytes for step in kept}, gaps


def check_same_run(record: Record, header: RecordHeader) -> None:
    """Raise RecordExists unless model files, ranks, scope, steps and options of training match."""
    facts: dict[str, Callable[[RecordHeader], object]] = {
        "model files": lambda h: h.model["files"],
        "data-parallel ranks": lambda h: h.num_ranks,
        "scope or recorded steps": lambda h: h.recording,
    }
    for name, of in facts.items():
        if of(record.header) != of(header):
            raise RecordExists(
                f"{record.path} is the record of a run with other {name}, which this run cannot resume: choose another folder"
            )
    names = ACTING if header.trainer is None else record.header.config
    before = {name: record.header.config.get(name) for name in names}
    found = find_differences(before, within(before, parse_json(json_bytes(header.config), "config")))
    item = next((item for item in found if not NOT_ACTING & set(item.where.split("."))), None)
    if item is not None:
        text = f"{record.path} is the record of a run with {item.where}={item.recorded}, and this one has {item.current}"
        if header.trainer is None:
            raise RecordExists(f"{text}: to resume with other options of training, choose another folder")
        logger.warning("%s: the record keeps its first configuration", text)


def within(options: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the members of `now` that `options` has: a newer version has more of them."""
    pairs = ((name, value, now.get(name)) for name, value in options.items())
    return {n: within(a, b) if isinstance(a, dict) and isinstance(b, dict) else b for n, a, b in pairs}


def remove_committed(folder: Path, committed_by: str) -> None:
    """Remove a step or an anchor, the file that commits it first: a partial one is not read."""
    (folder / committed_by).unlink(missing_ok=True)
    sync(folder)  # else a power failure may keep this file of all
    shutil.rmtree(folder)
    sync(folder.parent)  # else it may keep a later step's folder and not this one


def gaps_before(first_step: int, gaps: Gaps, kept: list[int], recording: Recording) -> Gaps:
    removed = tuple((first, min(last, first_step - 1)) for first, last in gaps.removed if first < first_step)
    known = Gaps(
        removed,
        tuple(step for step in gaps.dropped if step < first_step),
        tuple(step for step in gaps.lost if step < first_step),
    )
    after: Sequence[int] = range(kept[-1] + 1 if kept else first_step, first_step)
    if recording.scope == "given":  # nobody knows which of these the trainer gave
        after = ()
    lost = [step for step in after if recording.wants(step) and known.reason(step) is None]
    return Gaps(known.removed, known.dropped, (*known.lost, *lost))
