"""What can be wrong with a replay. Errors of the record itself are those of `recorder.errors`.

ReplayError (ValueError)
├── WrongModel        not the weights that the recorded run started from
├── NothingToBisect   revisions without a commit between them, or with the same numbers
├── WrongFilter       an expression over rows that says nothing, or more than it may
└── WrongEdit         an edit script or a reward function that cannot be used on a record
"""


class ReplayError(ValueError):
    """A record cannot be replayed as asked."""


class WrongModel(ReplayError):
    """The folder does not hold the files that the recorded run started from."""


class WrongFilter(ReplayError):
    """The expression cannot be parsed, or asks for what a row does not have."""


class WrongEdit(ReplayError):
    """The script has no `edit`, the reward function needs what a record lacks, or what they return is no batch."""


class NothingToBisect(ReplayError):
    """No commit can be found between the revisions."""
