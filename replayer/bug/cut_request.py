"""What to cut, passed to every rank as JSON. Imports no torch."""

import math
from dataclasses import dataclass

from recorder import Record
from replayer.bug.shrink import parse_symptom
from replayer.carried import read_cut
from replayer.errors import ReplayError
from replayer.preconditions import (
    check_anchor,
    check_is_policy,
    check_model,
    check_steps_present,
    nearest_anchor,
    step_range,
    their_replay,
)


@dataclass(frozen=True)
class CutRequest:
    """A cut of one step.

    Attributes:
        record, step: what is cut. folder: new folder for the record of that step.
        symptom: expression that rows and tokens are removed for.
        model: current path of the model that the run started from.
        max_s: seconds after which no further row or token is removed.
    """

    record: str
    step: int
    folder: str
    symptom: str | None = None
    model: str | None = None
    max_s: float = math.inf


def check_cut(record: Record, request: CutRequest) -> None:
    """Raise ReplayError, RecordError or CheckpointError for what is visible before a run."""
    header, step = record.header, request.step
    if header.trainer is not None:
        raise ReplayError(
            f"{record.path} is a record of {header.trainer}, without the weights of its trainer: {their_replay(record)}"
            f"`areal-debug replay {record.path} --config FILE --model PATH -o NEW` trains our trainer on its batches, "
            "and NEW can be cut"
        )
    step_range(record, step, step)
    start = nearest_anchor(record, step)
    if not header.recording.has_plans and step != (0 if start is None else start):
        raise ReplayError(
            f"{record.path} has rollouts alone, so nothing shows whether the weights before step {step} can be made "
            "again: cut its first step or one with an anchor, or record with debug.dump_scope=plan"
        )
    check_is_policy(record, "a cut with its model")
    check_steps_present(record, step, step)
    check_anchor(record, step)
    check_model(record, request.model, step)
    if request.symptom is not None:
        parse_symptom(request.symptom)
    if (cut := read_cut(record)) is not None and cut.error is not None and request.symptom is None:
        raise ReplayError(f"{record.path} is a cut of a step that ends with an error: copy the file")
