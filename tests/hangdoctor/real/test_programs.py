"""Programs that are the faults, run for real: the label and the culprits must be right, and the healthy unaccused."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"
HEALTHY = sorted(path.stem for path in PROGRAMS.glob("healthy_*.py"))
FAULTS = sorted({path.stem for path in PROGRAMS.glob("*.py")} - {*HEALTHY, "hang_point"})


def told_by(path: Path) -> tuple[str, tuple[int, ...]]:
    """The label and the culprits that a program's docstring gives."""
    told = dict(
        line.split(": ", 1)
        for line in path.read_text().splitlines()
        if line.startswith(("label: ", "culprits: "))
    )
    return told["label"], tuple(int(word) for word in told["culprits"].split() if word.isdigit())


@pytest.mark.parametrize("program", FAULTS)
def test_fault_is_named_with_its_culprits(program, diagnoses):
    diagnosis = diagnoses[program].result()
    assert (diagnosis.label, diagnosis.culprit_ranks) == told_by(PROGRAMS / f"{program}.py"), (
        diagnosis.summary
    )


@pytest.mark.parametrize("program", HEALTHY)
def test_healthy_program_is_not_accused(program, diagnoses):
    diagnosis = diagnoses[program].result()
    accused = diagnosis.label not in ("straggler_or_not_hung", "unknown") and diagnosis.confidence != "low"
    assert not accused, diagnosis.summary


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(5))
@pytest.mark.parametrize("program", FAULTS)
def test_fault_is_named_every_time(program, attempt, diagnose_under_torchrun):
    diagnosis = diagnose_under_torchrun(program)
    assert (diagnosis.label, diagnosis.culprit_ranks) == told_by(PROGRAMS / f"{program}.py"), (
        diagnosis.summary
    )


def test_there_are_enough_programs():
    assert len(FAULTS) >= 24
