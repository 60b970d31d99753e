"""Every label on hand-written stacks, with the culprits; and cases without a culprit."""

import re
from pathlib import Path

import pytest

from hangdoctor.diagnose import diagnose
from hangdoctor.parse.read import read_snapshot

CASES = Path(__file__).parent / "cases"


def cases() -> list:
    """Return the cases of all files: `##### title | label | culprits | world N`, then stacks."""
    found = []
    for path in sorted(CASES.glob("*.txt")):
        for block in path.read_text().split("##### ")[1:]:
            head, text = block.split("\n", 1)
            title, label, culprits, *world = [part.strip() for part in head.split("|")]
            ranks = tuple(int(rank) for rank in re.findall(r"\d+", culprits))
            size = int(world[0].split()[1]) if world else None
            found.append(pytest.param(label, ranks, size, text, id=f"{path.stem}: {title}"))
    return found


@pytest.mark.parametrize(("label", "culprits", "world_size", "text"), cases())
def test_stacks_get_their_label_and_culprits(tmp_path, label, culprits, world_size, text):
    (tmp_path / "stacks.txt").write_text(text)
    diagnosis = diagnose(read_snapshot([tmp_path], world_size))
    assert (diagnosis.label, diagnosis.culprit_ranks) == (label, culprits), diagnosis.summary
    assert diagnosis.confidence != "high"  # one sample cannot distinguish slow from stuck
    assert diagnosis.evidence
    assert diagnosis.would_refute
