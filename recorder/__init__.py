"""Training records of areal-debug: versioned, checksummed, without pickle; see FORMAT.md."""

from recorder.errors import (
    DamagedRecord,
    NotARecord,
    RecordError,
    RecordExists,
    RecordingFailed,
    RecordNotFound,
    StepNotRecorded,
    UnknownFormat,
)
from recorder.format import MicroBatch, Outcome, Plan, RecordHeader, Recording
from recorder.outcome import OutcomeObserver
from recorder.reader import Record, RecordedStep, open_record
from recorder.retention import Retention
from recorder.step_files import commit_anchor
from recorder.trainers.recorder import Recorder
from recorder.trainers.sample import Sample, parse_sample
from recorder.verify import Problem, VerifyReport, verify
from recorder.writer import RecordingOptions, RecordWriter

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
    "Recorder",
    "Recording",
    "RecordingFailed",
    "RecordingOptions",
    "Retention",
    "Sample",
    "StepNotRecorded",
    "UnknownFormat",
    "VerifyReport",
    "commit_anchor",
    "open_record",
    "parse_sample",
    "verify",
]
