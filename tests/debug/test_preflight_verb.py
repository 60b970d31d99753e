"""How `areal-debug preflight` repeats steps, and what it concludes; the runs are scripted."""

import pytest

from areal_debug.preflight import command
from areal_debug.verbs.preflight import OTHER_ORDERS, Repeats, repeat_steps
from recorder import Outcome
from replayer.preflight.other_orders import REVERSED_LISTINGS
from replayer.preflight.repeats import write_repeat


class Scripted(Repeats):
    """Runs whose loss in the last step follows `bits(environment, number of the run)`."""

    def run(self, folder, keep=(), **environment):
        folder.mkdir()
        value = self.bits(environment, next(self.numbers))
        losses = (1.0, 1.0 + value)
        outcomes = [Outcome(step, step + 1, (), {"loss": loss}, {}) for step, loss in enumerate(losses)]
        write_repeat(folder, outcomes, [])
        return folder


def report_of(tmp_path, bits, num_runs=2):
    repeats = Scripted([], 1, 2, num_runs, False)
    object.__setattr__(repeats, "bits", bits)
    object.__setattr__(repeats, "numbers", iter(range(100)))
    return repeat_steps(tmp_path, repeats)


def test_equal_runs_are_deterministic(tmp_path):
    report = report_of(tmp_path, lambda environment, number: 0.0)
    assert (report.identical, report.num_runs, report.step, report.findings) == (True, 2, None, ())


def test_a_difference_of_every_run_is_no_matter_of_orders(tmp_path):
    report = report_of(tmp_path, lambda environment, number: float(number))
    assert (report.identical, report.step, report.findings) == (False, 1, ())


def test_what_follows_the_hash_seed_is_a_note_as_deterministic_mode_fixes_it(tmp_path):
    report = report_of(tmp_path, lambda environment, number: float("PYTHONHASHSEED" in environment))
    assert report.identical
    (found,) = report.findings
    assert (found.check, found.status) == ("order", "note")
    assert "1 values of step 1 differ with another PYTHONHASHSEED" in found.seen


def test_what_follows_listings_is_a_problem(tmp_path):
    report = report_of(tmp_path, lambda environment, number: float(environment.get(REVERSED_LISTINGS) == "1"))
    assert report.identical
    (found,) = report.problems
    assert "differ when folders are listed in reverse" in found.seen


@pytest.mark.parametrize("num_runs", [3, 8])
def test_more_runs_find_what_two_miss(num_runs, tmp_path):
    """A choice that differs in the last of the runs alone, the one in other orders aside."""
    report = report_of(tmp_path, lambda environment, number: float(number == num_runs - 2), num_runs)
    assert not report.identical
    assert report.num_runs == num_runs


def test_thorough_is_eight_runs_of_four_steps():
    assert (command.THOROUGH_RUNS, command.THOROUGH_STEPS) == (8, 4)
    assert OTHER_ORDERS == {"PYTHONHASHSEED": "1", REVERSED_LISTINGS: "1"}
