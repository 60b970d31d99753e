"""Errors of records; each message says what to do next.

RecordError (ValueError)
├── RecordNotFound    nothing exists at that path
├── NotARecord        a folder without record.json
├── RecordExists      recording would overwrite something
│   └── RecordInUse   another run is writing there
├── UnknownFormat     a newer format version, or keys that this version does not know
├── RecordingFailed   a rank could not write; the run was configured to stop in that case
├── StepNotRecorded   that step, rank, row or tensor is not in the record
├── DamagedRecord     bytes differ from those written; names file and tensor
├── ForeignFormat     a file of another framework does not match its format
│   └── UnfinishedFile   it ends before its content does
└── UnsafePickle      a pickle needs a name that no importer allows
"""

from areal_core.safety.unpickle import UnsafePickle as UnsafePlainPickle


class RecordError(ValueError):
    """A record cannot be read or written as requested."""


class RecordNotFound(RecordError):
    """Nothing exists at the path."""


class NotARecord(RecordError):
    """The folder has no record.json."""


class RecordExists(RecordError):
    """Recording would overwrite existing files."""


class RecordInUse(RecordExists):
    """A live process writes into the folder."""


class UnknownFormat(RecordError):
    """The record was written by a version that this one does not know."""


class RecordingFailed(RecordError):
    """Recording failed on some rank."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; the steps committed before are complete. Free disk space or record elsewhere (debug.path), or train on without a "
            "record (debug.dump_when_failing=continue)"
        )


class StepNotRecorded(RecordError):
    """The record has no such step, rank, row or tensor."""


class DamagedRecord(RecordError):
    """A file is missing, cut off, or its bytes do not match their checksum."""

    def __init__(self, file: str, what: str, tensor: str | None = None) -> None:
        self.file, self.tensor, self.what = file, tensor, what
        place = f"{file}, tensor {tensor}" if tensor else file
        self.problem = f"{place}: {what}"
        super().__init__(f"{self.problem}; `areal-debug record verify` lists every damaged file")


class ForeignFormat(RecordError):
    """A file does not match its format; the message has the expected and the found content."""


class UnfinishedFile(ForeignFormat):
    """A file ends before its content does: its writer was interrupted."""


class UnsafePickle(UnsafePlainPickle, RecordError):
    """A pickle needs a name that no importer allows, or exceeds a limit."""
