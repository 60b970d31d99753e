"""A verb on each of several steps or records, in this process."""

import json

import pytest
from click.testing import CliRunner

from areal_debug.cli import main
from areal_debug.each import run_verb
from areal_debug.replay.sweep import settings_of
from recorder.testing import write_scripted_record


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def sentence(done):
    """The one sentence of an error."""
    assert done.exit_code == 2
    return done.stderr.removeprefix("Error: ").strip()


@pytest.fixture
def record(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2)
    return tmp_path / "record"


def test_steps_are_checked_one_by_one(recorded):
    done = run("crosscheck", recorded, "--steps", "1:", "--json")
    found = json.loads(done.stdout)["tasks"]
    assert [task["name"] for task in found] == ["step 1", "step 2"]
    alone = run("crosscheck", recorded, "--step", 2, "--json")
    assert found[1]["report"] == json.loads(alone.stdout)
    assert (found[1]["exit_code"], done.exit_code) == (alone.exit_code, 0)
    lines = run("crosscheck", recorded, "--steps", "1:2").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["1", "step:", "1", "healthy"],
        ["step", "stage", "option"],
        ["step", "1", "healthy", "-", "-"],
    ]


def test_a_sweep_lists_every_combination_and_checks_its_values_first(recorded):
    assert settings_of("actor.eps_clip=0.1,0.2,0.1") == ["actor.eps_clip=0.1", "actor.eps_clip=0.2"]
    assert settings_of("a.b=[1,2],[3]") == ["a.b=[1,2]", "a.b=[3]"]
    assert "give an option and its values" in sentence(run("replay", recorded, "--sweep", "actor.eps_clip"))
    wrong = run("replay", recorded, "--sweep", "actor.eps_clip=0.1,high")
    assert "actor.eps_clip" in sentence(wrong)
    assert "high" in sentence(wrong)


def test_a_defect_of_one_call_is_named_and_ends_no_other(record, monkeypatch):
    monkeypatch.setattr("recorder.reader.summarise_steps", lambda *_: 1 / 0)
    found = run_verb(["record", "ls", "--json", str(record)])
    assert (found.exit_code, found.report) == (2, None)
    assert "ZeroDivisionError" in found.error
    assert run_verb(["record", "nothing"]).error.startswith("there is no command 'nothing'")
