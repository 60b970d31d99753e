"""What a page shows: one record or two beside each other, and the data of each step by name.

a-12-text, a-12-numbers      step 12 of the record
a-12-images, a-12-calls      its pictures, and the calls of agents, if it has any
b-15-text, b-15-numbers      step 15 of the one it is compared with
pair-12                      which rows of both belong together, and what differs
"""

import re
import threading
from dataclasses import asdict, dataclass
from typing import Any

from areal_debug.report.links import fragment_of
from areal_debug.view.data import run_document
from areal_debug.view.followed import FollowedRecord
from areal_debug.view.pack import pack_json, pack_numbers, pack_text
from areal_debug.view.pairs import pair_document
from recorder import StepNotRecorded

BLOB_NAME = re.compile(r"(?:([ab])-([0-9]{1,18})-(text|numbers|images|calls)|pair-([0-9]{1,18}))")
PACKERS = {"text": pack_text, "numbers": pack_numbers}


@dataclass(frozen=True)
class Place:
    """What a page opens at: a step, and a sample and token of it."""

    step: int
    prompt: int | None = None
    sample: int | None = None
    token: int | None = None

    def fragment(self) -> str:
        """Return the place as the fragment of a page's address."""
        return fragment_of(**asdict(self))


class Contents:
    """The data of a page, for several threads.

    Args:
        record: the record.
        other: the one it is compared with, or None.
        shift: step N of the record is compared with step N + `shift` of the other.
    """

    def __init__(self, record: FollowedRecord, other: FollowedRecord | None = None, shift: int = 0) -> None:
        self.record, self.other, self.shift = record, other, shift
        self._lock = threading.Lock()

    def document(self, stored: list[int] | None, opens: Place | None) -> dict[str, Any]:
        """Return what a page needs to begin.

        Args:
            stored: the steps that the page has; None if it has a server, which has all.
        """
        with self._lock:
            sides = [self.record, *([self.other] if self.other else [])]
            runs = [run_document(side.run()) for side in sides]
            stored = list(self.record.steps) if stored is None else stored
            return {
                "sides": runs,
                "stored": stored,
                "paired": [step for step in stored if self.has_partner(step)],
                "shift": self.shift,
                "opens": opens and asdict(opens),
            }

    def has_partner(self, step: int) -> bool:
        return self.other is not None and step + self.shift in self.other.steps

    def names(self, step: int) -> list[str]:
        """Return the names of the data of a step."""
        other = step + self.shift
        names = [f"a-{step}-{kind}" for kind in self.kinds(self.record, step)]
        if self.other is not None and self.has_partner(step):
            names += [f"b-{other}-{kind}" for kind in self.kinds(self.other, other)] + [f"pair-{step}"]
        return names

    def kinds(self, side: FollowedRecord, step: int) -> list[str]:
        """Return the kinds of data of a step."""
        view = side.view(step)
        return [*PACKERS, *(["images"] if view.images else []), *(["calls"] if "calls" in view.rows else [])]

    def blob(self, name: str) -> bytes:
        """Return the data of a name that `BLOB_NAME` matches. Raises `RecordError`."""
        found = BLOB_NAME.fullmatch(name)
        assert found, name
        with self._lock:
            side, step, kind, paired = found.groups()
            if side == "a":
                return packed_step(self.record, int(step), kind)
            if self.other is None:
                raise StepNotRecorded("the page compares with no other record")
            if side == "b":
                return packed_step(self.other, int(step), kind)
            steps = self.record.step(int(paired)), self.other.step(int(paired) + self.shift)
            return pack_json(pair_document(*steps, (self.record.is_foreign, self.other.is_foreign)))


def packed_step(record: FollowedRecord, step: int, kind: str) -> bytes:
    if kind in PACKERS:
        return PACKERS[kind](record.view(step))
    return pack_json(record.images(step) if kind == "images" else record.calls(step))
