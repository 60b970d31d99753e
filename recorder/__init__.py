"""A record of training: versioned, checksummed, without pickle. FORMAT.md is the specification."""

from recorder.errors import (
    DamagedRecord,
    NotARecord,
    RecordError,
    RecordExists,
    RecordNotFound,
    StepNotRecorded,
    UnknownFormat,
)
from recorder.format import MicroBatch, Outcome, Plan, RecordHeader
from recorder.outcome import OutcomeObserver
from recorder.reader import Record, RecordedStep, open_record
from recorder.verify import Problem, VerifyReport, verify
from recorder.writer import RecordWriter, commit_anchor

__all__ = [
    "DamagedRecord",
    "MicroBatch",
    "NotARecord",
    "Outcome",
    "OutcomeObserver",
    "Plan",
    "Problem",
    "Record",
    "RecordError",
    "RecordExists",
    "RecordHeader",
    "RecordNotFound",
    "RecordWriter",
    "RecordedStep",
    "StepNotRecorded",
    "UnknownFormat",
    "VerifyReport",
    "commit_anchor",
    "open_record",
    "verify",
]
