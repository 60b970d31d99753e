"""The plugin under pytest-xdist: the process that prints knows what its workers replayed."""

import sys
import xml.etree.ElementTree as ET

import pytest

pytest.importorskip("xdist")
pytest_plugins = "pytester"

FAKE = """
import pytest
from areal_debug import regression
from replayer.check import ReplayReport, StepResult
from replayer.noise import Guarantee

def check_spec(spec, mode, ranks):
    first, last = spec.steps
    steps = [StepResult(step, 1, 1, 0.5, 1.0, (), {}, {}) for step in range(first, last + 1)]
    if spec.path.name == "red":
        raise regression.RegressionError("the numbers differ\\nfirst in step 2, stage loss: row 7")
    stale = ("torch is another",) if spec.path.name == "old" else ()
    changes = [f"step {first}: 3 values"] if mode == "rewrite" else None
    return regression.CheckedRecord(ReplayReport("r", steps=steps, guarantee=Guarantee("noise")), stale, changes)

regression.check_spec = check_spec
"""
TEST = """
import pytest

@pytest.mark.parametrize("part", range(4))
@pytest.mark.replay("records/{name}", steps=(0, 2))
def test_it(replay_record, part):
    assert len(replay_record().steps) == 3
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run two test files, of the records `one` and `name`; return pytest's result."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def call(*options, name="old"):
        pytester.makeconftest(FAKE)
        pytester.makeini("[pytest]\nareal_records = records")
        pytester.makepyfile(test_one=TEST.format(name="one"), test_other=TEST.format(name=name))
        for record in ("one", name, "forgotten"):
            (pytester.path / "records" / record).mkdir(parents=True)
            (pytester.path / "records" / record / "record.json").touch()
        plugins = ("-p", "xdist", "-p", "areal_debug.pytest_plugin", "-p", "no:cacheprovider")
        command = (sys.executable, "-m", "pytest", *plugins, "--junitxml=report.xml", *options)
        return pytester.run(*command, timeout=120)

    return call


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.long),
        ("-n", "2"),
        pytest.param(("-n", "0"), marks=pytest.mark.long),
        pytest.param(("-n", "2", "--dist", "loadfile"), marks=pytest.mark.long),
        pytest.param(("-n", "1", "--maxprocesses", "1"), marks=pytest.mark.long),
    ],
)
def test_counts_stale_and_unused_records_are_those_of_all_workers(run, options):
    result = run(*options)
    result.assert_outcomes(passed=8)
    assert result.ret == 0
    shown = result.stdout.str()
    assert "24 steps of 2 records replayed" in shown
    assert shown.count("records/old is stale, compared with the noise floor") == 1
    assert shown.count("records/forgotten is unused: no test names it") == 1
    assert "records/one is unused" not in shown
    assert "records/old is unused" not in shown


def test_a_failure_is_one_message_in_the_output_and_in_the_xml(run, pytester):
    result = run("-n", "2", name="red")
    result.assert_outcomes(passed=4, failed=4)
    assert result.ret == 1
    shown = result.stdout.str()
    assert "12 steps of 1 record replayed" in shown
    assert "During handling" not in shown
    assert shown.count("first in step 2, stage loss: row 7") == 4
    suite = ET.parse(pytester.path / "report.xml").getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("8", "4", "0")
    failures = [case.find("failure") for case in suite if case.find("failure") is not None]
    assert [failure.text for failure in failures] == [
        "the numbers differ\nfirst in step 2, stage loss: row 7"
    ] * 4


@pytest.mark.long
def test_a_worker_that_crashes_takes_only_its_own_test_along(run, pytester):
    pytester.makepyfile(test_crash="import os\ndef test_crash():\n    os._exit(3)")
    result = run("-n", "2")
    assert result.ret == 1
    shown = result.stdout.str()
    assert "24 steps of 2 records replayed" in shown
    assert shown.count("records/forgotten is unused") == 1
