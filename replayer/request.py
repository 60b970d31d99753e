"""A request to replay, defined once by a command or a test, and passed to every rank as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """Steps `first` to `last` of a record, both included.

    Args:
        model: current path of the model that the run started from, if it has moved.
        settings: overrides of options, as `actor.eps_clip=0.3`.
        row_filter: expression that a row must satisfy to be trained on (`replayer.expression`).
        edit: Python file whose `edit(batch, step)` returns the batch to train on.
        reward: reward function by its import path, or `file.py:function`; recomputes every reward.
        record_to: folder for a new record of this replay.
        stop_at_difference: end at the first step that differs.
    """

    record: str
    first: int
    last: int
    model: str | None = None
    settings: tuple[str, ...] = ()
    row_filter: str | None = None
    edit: str | None = None
    reward: str | None = None
    record_to: str | None = None
    stop_at_difference: bool = False

    @property
    def edits(self) -> tuple[str, ...]:
        """Describe the changes of the recorded rows, a phrase each."""
        phrases = {
            "rows are filtered by": self.row_filter,
            "batches are edited by": self.edit,
            "rewards are computed by": self.reward,
        }
        return tuple(f"{phrase} {value}" for phrase, value in phrases.items() if value)


def request_text(request: Request) -> str:
    """Serialize the request as one line of JSON."""
    return json.dumps(asdict(request))


def parse_request(text: str) -> Request:
    """Parse a request; the inverse of `request_text`."""
    members: dict[str, Any] = json.loads(text)
    return Request(**{**members, "settings": tuple(members["settings"])})
