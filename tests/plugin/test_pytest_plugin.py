"""The plugin in a separate pytest, with a fake replay; test_regression.py tests replaying."""

import pytest

from areal_debug import regression
from replayer.check import ReplayReport, StepResult
from replayer.noise import Guarantee

pytest_plugins = "pytester"

TEST = """
import pytest

@pytest.mark.replay("records/one", steps=(0, 1), exact=True)
def test_it(replay_record):
    assert len(replay_record(model="here").steps) == 2
"""


@pytest.fixture
def requested(monkeypatch):
    """Record the plugin's requests instead of replaying."""
    found = []

    def check_spec(spec, mode, ranks):
        found.append((spec, mode))
        steps = [StepResult(step, 1, 1, 0.5, 1.0, (), {}, {}) for step in (0, 1)]
        report = ReplayReport("record", steps=steps, guarantee=Guarantee("noise"))
        if spec.path.name == "red":
            raise regression.RegressionError("the numbers differ\nto reproduce it: areal-debug replay red")
        changes = ["step 0: 3 values"] if mode == "rewrite" else None
        return regression.CheckedRecord(
            report, ("torch is another",) if spec.path.name == "old" else (), changes
        )

    monkeypatch.setattr(regression, "check_spec", check_spec)
    return found


@pytest.fixture
def run(pytester):
    """Run pytest on a test file: `run(TEST, "--areal-record=all")` returns its result."""

    def call(source, *options, records=("one",)):
        pytester.makepyfile(test_sample=source)
        pytester.makeini("[pytest]\nareal_records = records")
        for name in records:
            (pytester.path / "records" / name).mkdir(parents=True)
            (pytester.path / "records" / name / "record.json").touch()
        return pytester.runpytest_inprocess("-p", "areal_debug.pytest_plugin", "--strict-markers", *options)

    return call


def test_mark_and_arguments_reach_the_replay_and_steps_are_counted(run, requested, pytester):
    result = run(TEST)
    result.assert_outcomes(passed=1)
    ((spec, mode),) = requested
    assert (spec.path, spec.steps, spec.exact, spec.model) == (
        pytester.path / "records/one",
        (0, 1),
        True,
        "here",
    )
    assert (spec.test, mode) == ("test_sample.py::test_it", "none")
    result.stdout.fnmatch_lines(["*2 steps of 1 record replayed"])


def test_a_difference_fails_the_test_with_its_message_and_no_traceback(run, requested):
    result = run(TEST.replace("one", "red"), records=("red",))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the numbers differ", "to reproduce it: areal-debug replay red"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*During handling*")
    assert result.stdout.str().count("to reproduce it: areal-debug replay red") == 1
    result.stdout.no_fnmatch_line("*replay_record(model*")


@pytest.mark.parametrize("mode", ["once", "all", "rewrite"])
def test_the_mode_is_passed_on_and_what_was_written_is_shown(mode, run, requested):
    result = run(TEST, f"--areal-record={mode}")
    assert requested[0][1] == mode
    if mode == "rewrite":
        result.stdout.fnmatch_lines(["records/one was written:", "  step 0: 3 values"])


def test_stale_and_unused_records_are_reported(run, requested):
    result = run(TEST.replace("one", "old"), records=("old", "forgotten"))
    result.stdout.fnmatch_lines(
        [
            "records/old is stale*: torch is another",
            "*--areal-record=rewrite*",
            "records/forgotten is unused: no test names it",
        ]
    )
    result.stdout.no_fnmatch_line("records/old is unused*")
