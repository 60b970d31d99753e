"""Real runs of fault programs: label and culprits must be right; healthy jobs have no culprit."""

import pytest

from .conftest import PROGRAMS, read_program

HEALTHY = sorted(path.stem for path in PROGRAMS.glob("healthy_*.py"))
FAULTS = sorted({path.stem for path in PROGRAMS.glob("*.py")} - {*HEALTHY, "hang_point"})


def expected_of(program: str) -> tuple[str, tuple[int, ...]]:
    described = read_program(program)
    return described.label, described.culprits


def accuses(diagnosis) -> bool:
    """True if a diagnosis claims a hang with more than low confidence."""
    return diagnosis.label not in ("straggler_or_not_hung", "unknown") and diagnosis.confidence != "low"


EVERYDAY = {label: name for name in reversed(FAULTS) if (label := expected_of(name)[0]) != "nccl_timeout"}


def daily(programs: list[str], chosen: set[str]) -> list:
    """Return parameters; a program that is not chosen is for the long tests."""
    return [pytest.param(name, marks=[pytest.mark.long] * (name not in chosen)) for name in programs]


ATTEMPTS = [0, *(pytest.param(attempt, marks=pytest.mark.long) for attempt in range(1, 5))]


@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("program", daily(FAULTS, {*EVERYDAY.values()}))
def test_fault_is_named_with_its_culprits_every_time(program, attempt, diagnosis):
    assert (diagnosis.label, diagnosis.culprit_ranks) == expected_of(program), diagnosis.summary


@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("program", daily(HEALTHY, {"healthy_training"}))
def test_healthy_program_is_never_accused(program, attempt, diagnosis):
    assert not accuses(diagnosis), diagnosis.summary
