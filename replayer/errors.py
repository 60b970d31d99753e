"""What can be wrong with a replay. Errors of the record itself are those of `recorder.errors`.

ReplayError (ValueError)
├── WrongRankCount    recorded with another number of data-parallel ranks
└── WrongModel        not the weights that the recorded run started from
"""


class ReplayError(ValueError):
    """A record cannot be replayed as asked."""


class WrongRankCount(ReplayError):
    """The record has one batch per data-parallel rank, and the run has another number of them."""

    def __init__(self, recorded: int, running: int) -> None:
        super().__init__(
            f"recorded with {recorded} data-parallel ranks, replayed with {running}: run it with {recorded}"
        )


class WrongModel(ReplayError):
    """The folder does not hold the files that the recorded run started from."""
