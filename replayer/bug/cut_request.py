"""What to cut, passed to every rank as JSON. Imports no torch."""

import math
import re
from dataclasses import dataclass

from recorder import Record, RecordedStep
from replayer.bug.shrink import parse_symptom
from replayer.carried import read_cut
from replayer.errors import ReplayError
from replayer.preconditions import (
    check_anchor,
    check_model,
    check_steps_present,
    nearest_anchor,
    step_range,
    their_replay,
)
from replayer.request import replay_config

SAMPLE = re.compile(r"(-?\d+)\.(-?\d+)")


@dataclass(frozen=True)
class CutRequest:
    """A cut of one step.

    Attributes:
        record, step: what is cut. folder: new folder for the record of that step.
        micro_batch: the number of a micro-batch of the step, counted over its minibatches; on
            several ranks that of each rank. sample: a row as `PROMPT.SAMPLE`.
        symptom: expression that rows and tokens are removed for.
        keep_advantages: of the recorded step, where rows are removed; None to keep them unless
            there is a symptom.
        model: current path of the model that the run started from.
        max_s: seconds after which no further row or token is removed.
    """

    record: str
    step: int
    folder: str
    micro_batch: int | None = None
    sample: str | None = None
    symptom: str | None = None
    keep_advantages: bool | None = None
    model: str | None = None
    max_s: float = math.inf

    @property
    def is_whole(self) -> bool:
        """Return whether the complete step is cut, as it was recorded."""
        return (self.micro_batch, self.sample, self.symptom) == (None, None, None)


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
    recorded = record.step(step)
    start = nearest_anchor(record, step)
    if not header.recording.has_plans and step != (0 if start is None else start):
        raise ReplayError(
            f"{record.path} has rollouts alone, so nothing shows whether the weights before step {step} can be made "
            "again: cut its first step or one with an anchor, or record with debug.dump_scope=plan"
        )
    check_steps_present(record, step, step)
    check_anchor(record, step)
    check_model(record, replay_config(record, request.model).actor.path, step)
    num_ranks = recorded.manifest.num_ranks
    groups = [[]] if request.micro_batch is None else rows_of_micro_batch(recorded, request.micro_batch)
    if num_ranks > 1 and (
        request.sample is not None or (request.micro_batch is not None and not all(groups))
    ):
        raise ReplayError(
            f"step {step} was trained on {num_ranks} ranks, each of which needs a row: cut another micro-batch, the "
            "whole step, or use --shrink, which leaves each rank one"
        )
    if request.sample is not None and not SAMPLE.fullmatch(request.sample):
        raise ReplayError(f"--sample {request.sample!r} is not PROMPT.SAMPLE, two numbers such as 17.3")
    if request.symptom is not None:
        symptom = parse_symptom(request.symptom)
        if symptom.uses("difference") and header.recording.scope != "full":
            raise ReplayError(
                f"--shrink {request.symptom!r} compares tokens with recorded ones, which {record.path} does not have: "
                "record with debug.dump_scope=full"
            )
    if request.keep_advantages is not None and request.is_whole:
        raise ReplayError("a whole step has its advantages: --keep-advantages is for some of its rows")
    if (cut := read_cut(record)) is not None and cut.error is not None and request.is_whole:
        raise ReplayError(f"{record.path} is a cut of a step that ends with an error: copy the file")


def rows_of_micro_batch(step: RecordedStep, number: int) -> list[list[int]]:
    """Return the rows of a micro-batch on each rank. Raises ReplayError if there is no such one."""
    of_ranks = []
    for rank in range(step.manifest.num_ranks):
        minibatches = step.plan(rank).details["minibatches"]
        of_ranks.append([rows for minibatch in minibatches for rows in minibatch["micro_batches"]])
    most = max(map(len, of_ranks))
    if not 0 <= number < most:
        raise ReplayError(
            f"step {step.manifest.step} has micro-batches 0 to {most - 1}, counted over its minibatches, not {number}"
        )
    return [groups[number] if number < len(groups) else [] for groups in of_ranks]
