"""`areal-debug record`: list, show, verify, archive, import and export records.

Its Python names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from areal_debug.installation import lazy_names

if TYPE_CHECKING:
    from recorder import DamagedRecord as DamagedRecord
    from recorder import MicroBatch as MicroBatch
    from recorder import NotARecord as NotARecord
    from recorder import Outcome as Outcome
    from recorder import OutcomeObserver as OutcomeObserver
    from recorder import Plan as Plan
    from recorder import Problem as Problem
    from recorder import Record as Record
    from recorder import RecordedStep as RecordedStep
    from recorder import RecordError as RecordError
    from recorder import RecordExists as RecordExists
    from recorder import RecordHeader as RecordHeader
    from recorder import Recording as Recording
    from recorder import RecordingFailed as RecordingFailed
    from recorder import RecordingOptions as RecordingOptions
    from recorder import RecordNotFound as RecordNotFound
    from recorder import RecordWriter as RecordWriter
    from recorder import Retention as Retention
    from recorder import StepNotRecorded as StepNotRecorded
    from recorder import UnknownFormat as UnknownFormat
    from recorder import VerifyReport as VerifyReport
    from recorder import commit_anchor as commit_anchor
    from recorder import open_record as open_record
    from recorder import verify as verify
    from recorder.trainers.recorder import Recorder as Recorder
    from recorder.trainers.sample import Sample as Sample
    from recorder.trainers.sample import parse_sample as parse_sample

__getattr__, __all__ = lazy_names(
    {
        "recorder": [
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
            "Recording",
            "RecordingFailed",
            "RecordingOptions",
            "Retention",
            "StepNotRecorded",
            "UnknownFormat",
            "VerifyReport",
            "commit_anchor",
            "open_record",
            "verify",
        ],
        "recorder.trainers.recorder": ["Recorder"],
        "recorder.trainers.sample": ["Sample", "parse_sample"],
    },
    __name__,
)
