"""Where to look: the address of a step, sample or token inside a record's page, and the command.

`PAGE#step=12&prompt=4&sample=1&token=7` selects them in the page; `token` counts from 0 at the
first token of the sample, its prompt included.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from recorder import Record


def fragment_of(step: int, prompt: int | None, sample: int | None, token: int | None) -> str:
    """Return a place as the fragment of a page's address."""
    place = {"step": step, "prompt": prompt, "sample": sample, "token": token}
    return "&".join(f"{name}={value}" for name, value in place.items() if value is not None)


def view_command(
    record: Path | str,
    step: int,
    prompt: int | None = None,
    sample: int | None = None,
    token: int | None = None,
    *,
    compare: Path | str | None = None,
) -> str:
    """Return the command that writes the page of a step and opens it at this sample and token.

    With `compare`, the same step of that record is shown beside it.
    """
    other = "" if compare is None else f" --compare {shlex.quote(str(compare))}"
    place = [str(number) for number in (prompt, sample, token) if number is not None]
    at = f" --at {'.'.join(place)}" if place else ""
    return f"areal-debug open {shlex.quote(str(record))}{other} --step {step}{at}"


@dataclass(frozen=True)
class RecordPage:
    """A record and the address of its page, relative to the pages that link to it."""

    record: "Record"
    page: str

    def address(
        self, step: int, prompt: int | None = None, sample: int | None = None, token: int | None = None
    ) -> str:
        """Return the address of a place in the page, "" if the step is not recorded."""
        if step not in self.record.steps:
            return ""
        return f"{quote(self.page)}#{fragment_of(step, prompt, sample, token)}"
