"""What is printed about a cut: its numbers, and where a record that is replayed was cut from."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from areal_debug.render import count, format_number, note

if TYPE_CHECKING:
    from recorder import Record


def note_cut(record: "Record") -> None:
    """Print what a record was cut from, if it was."""
    from replayer.bug.carried import read_cut

    if (found := read_cut(record)) is None:
        return
    rows = "" if found.kept is None else f", {len(found.kept)} of its {count(found.num_rows, 'row')}"
    symptom = "" if found.symptom is None else f", cut for: {found.symptom}"
    note(f"step {found.step} of {found.source}{rows}{symptom} (there {numbers_of(found.numbers)})")
    if found.error is not None:
        note(f"expected: {found.error}")


def numbers_of(numbers: Mapping[str, float]) -> str:
    """Format loss and gradient norm."""
    return ", ".join(f"{name} {format_number(value)}" for name, value in numbers.items()) or "not recorded"
