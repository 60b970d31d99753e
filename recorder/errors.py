"""What can be wrong with a record, each error saying what to do next.

RecordError (ValueError)
├── RecordNotFound    nothing at that path
├── NotARecord        a folder without record.json
├── RecordExists      recording would overwrite something
├── UnknownFormat     a newer format version, or keys that this version does not know
├── RecordingFailed   a rank could not write; the run was asked to stop when that happens
├── StepNotRecorded   that step, rank, row or tensor is not in the record
├── DamagedRecord     bytes that are not the ones written; names file and tensor
├── ForeignFormat     a file of another framework is not what its format says
└── UnsafePickle      a pickle asks for something that no importer needs
"""


class RecordError(ValueError):
    """A record cannot be read or written as asked."""


class RecordNotFound(RecordError):
    """There is nothing at the path."""


class NotARecord(RecordError):
    """The folder holds no record.json."""


class RecordExists(RecordError):
    """The folder already holds something that recording would overwrite."""


class UnknownFormat(RecordError):
    """The record was written by a version that this one does not know."""


class RecordingFailed(RecordError):
    """Recording failed on some rank."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; what was committed before is whole. Make room or record elsewhere (debug.path), or train on without a "
            "record (debug.dump_when_failing=continue)"
        )


class StepNotRecorded(RecordError):
    """The record has no such step, rank, row or tensor."""


class DamagedRecord(RecordError):
    """A file is missing, cut off, or its bytes do not match their checksum."""

    def __init__(self, file: str, what: str, tensor: str | None = None) -> None:
        self.file, self.tensor, self.what = file, tensor, what
        place = f"{file}, tensor {tensor}" if tensor else file
        super().__init__(f"{place}: {what}; `areal-debug record verify` lists every damaged file")


class ForeignFormat(RecordError):
    """A file is not what its format says; names the file, what was expected and what was found."""


class UnsafePickle(RecordError):
    """A pickle asks for something that no importer needs, or breaks a limit."""
