"""Errors of replays. Errors of the record itself are those of `recorder.errors`.

ReplayError (ValueError)
├── WrongModel        the weights differ from those that the recorded run started from
├── NothingToBisect   revisions without a commit between them, or that cannot be replayed
│   └── SameNumbers   revisions with equal numbers
├── CannotReplay      a record and a trainer of TRL that do not belong together
├── WrongFilter       a row filter that cannot be parsed, or uses names that are not allowed
└── WrongEdit         an edit script or a reward function that cannot be used on a record
"""


class ReplayError(ValueError):
    """A record cannot be replayed as requested."""


class WrongModel(ReplayError):
    """The folder does not have the files that the recorded run started from."""


class CannotReplay(ReplayError):
    """The record and the trainer do not belong together."""


class WrongFilter(ReplayError):
    """The expression cannot be parsed, or uses a name that a row does not have."""


class WrongEdit(ReplayError):
    """The edit script or reward function is invalid, or its result is not a batch."""


class NothingToBisect(ReplayError):
    """There is no commit to find between the revisions."""


class SameNumbers(NothingToBisect):
    """Both revisions produce the same numbers."""
