"""A verb on many records, steps or settings, in this process: the code that Ray runs."""

import json
import sys
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from areal_debug.cli import main
from areal_debug.replay.sweep import settings_of
from areal_debug.spread.records import places_below
from areal_debug.spread.tasks import Outcome, Task, arguments_of, run_verb
from recorder import open_record
from recorder.testing import write_scripted_record


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def sentence(done):
    """The one sentence of an error."""
    assert done.exit_code == 2
    return done.stderr.removeprefix("Error: ").strip()


@pytest.fixture
def records(tmp_path):
    """Three records; the second is damaged, and a fourth is not there."""
    folders = [tmp_path / name / "record" for name in "abcd"]
    for folder in folders[:3]:
        write_scripted_record(folder, num_steps=2)
    damaged = next((folders[1] / "steps/000001").glob("batch*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    return folders


def test_each_record_has_the_report_of_its_own_command(records):
    done = run("record", "verify", *records, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["retries"] == {}
    assert [task["name"] for task in found["tasks"]] == [str(record) for record in records]
    assert [task["exit_code"] for task in found["tasks"]] == [0, 1, 0, 2]
    for record, task in zip(records[:3], found["tasks"], strict=False):
        assert task["report"] == json.loads(run("record", "verify", record, "--json").stdout)
        assert task["error"] is None
    missing = found["tasks"][3]
    assert (missing["report"], missing["error"]) == (None, sentence(run("record", "verify", records[3])))


def test_the_table_names_each_problem_and_the_next_command(records):
    lines = run("record", "verify", *records).stdout.splitlines()
    assert lines[0] == "4 records: 1 problem found; 1 inconclusive; 2 healthy"
    assert lines[1].split() == ["record", "steps", "problems", "first"]
    assert lines[2].split() == [str(records[0]), "healthy", "2", "0", "-"]
    assert lines[3].split()[1:5] == ["problem", "found", "1", "1"]
    assert "steps/000001/batch" in lines[3]
    assert lines[5].startswith(f"{records[3]}: inconclusive: {records[3]} does not exist")
    assert lines[6] == f"Next  areal-debug record verify {records[1]}"


def test_the_code_is_0_if_all_are_healthy_and_2_if_one_is_inconclusive(records):
    assert run("record", "verify", records[0], records[2]).exit_code == 0
    assert run("record", "verify", records[0], records[3]).exit_code == 2


def test_archives_lie_below_the_destination_as_the_records_do(records, tmp_path):
    done = run("record", "archive", records[0], records[2], "--to", tmp_path / "kept", "--json")
    assert done.exit_code == 0, done.output
    places = [task["report"]["location"] for task in json.loads(done.stdout)["tasks"]]
    assert places == [str(tmp_path / "kept/a/record"), str(tmp_path / "kept/c/record")]
    assert [open_record(place).steps for place in places] == [(0, 1)] * 2
    shown = run("record", "archive", records[0], records[2], "--to", tmp_path / "again").stdout.splitlines()
    assert shown[0] == "2 records: 2 archived"
    assert shown[2].split()[:4] == [str(records[0]), "archived", "2", "42"]


def test_places_below_a_url():
    places = places_below(["runs/a/record", "runs/b"], "s3://bucket/runs/")
    assert places == {"runs/a/record": "s3://bucket/runs/a/record", "runs/b": "s3://bucket/runs/b"}


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "3"], "--steps 3: give A:B, steps from A up to and without B, or : for all"),
        (["--steps", "9:"], "has no such step; its 2 steps are from 0 to 1"),
        (["--steps", ":", "--step", "1"], "--step is for one report and --steps for one of each step"),
        (["--workers", "2"], "--workers is the number of tasks at a time on Ray: give --on ray, too"),
    ],
)
def test_a_wrong_choice_of_steps_is_one_sentence(records, arguments, expected):
    assert expected in sentence(run("crosscheck", records[0], *arguments))
    assert expected in sentence(run("consistency", records[0], *arguments))


def test_a_record_that_is_given_twice_is_refused(records):
    assert f"{records[0]} is given 2 times" in sentence(run("record", "verify", records[0], records[0]))


def test_options_that_are_for_one_report_are_refused(records, tmp_path):
    page = ["--steps", ":", "-o", tmp_path / "page.html"]
    assert "leave out --engine, --layers and --output" in sentence(run("consistency", records[0], *page))
    assert "are for --sweep" in sentence(run("replay", records[0], "--on", "ray"))


def test_a_sweep_lists_every_combination_and_checks_its_values_first(recorded):
    assert settings_of("actor.eps_clip=0.1,0.2,0.1") == ["actor.eps_clip=0.1", "actor.eps_clip=0.2"]
    assert settings_of("a.b=[1,2],[3]") == ["a.b=[1,2]", "a.b=[3]"]
    assert "give an option and its values" in sentence(run("replay", recorded, "--sweep", "actor.eps_clip"))
    wrong = run("replay", recorded, "--sweep", "actor.eps_clip=0.1,high")
    assert "actor.eps_clip" in sentence(wrong)
    assert "high" in sentence(wrong)


def test_arguments_of_a_verb_are_those_that_were_given(records):
    @click.command()
    @click.argument("names", nargs=-1)
    @click.option("-n", "--number", type=int, default=3)
    @click.option("--each", multiple=True)
    @click.option("--flag", is_flag=True)
    @click.pass_context
    def verb(context, **given):
        click.echo(json.dumps(arguments_of(context, {"names": ("-x", "y")})))

    done = CliRunner().invoke(verb, ["a", "-n", "4", "--each", "b c", "--each", "d", "--flag"])
    assert json.loads(done.stdout) == ["--number=4", "--each=b c", "--each=d", "--flag", "--", "-x", "y"]
    assert json.loads(CliRunner().invoke(verb, ["a"]).stdout) == ["--", "-x", "y"]


def test_a_defect_of_one_task_is_named_and_ends_no_other(records, monkeypatch):
    monkeypatch.setattr("recorder.reader.summarise_steps", lambda *_: 1 / 0)
    found = run_verb(["record", "ls", "--json", str(records[0])])
    assert (found.exit_code, found.report) == (2, None)
    assert "ZeroDivisionError" in found.error
    assert run_verb(["record", "nothing"]).error.startswith("there is no command 'nothing'")


def test_a_node_that_does_not_see_the_record_is_named(records, monkeypatch):
    pytest.importorskip("ray")
    from areal_debug.spread.on_ray import run_there, seen_here

    monkeypatch.setattr("socket.gethostname", lambda: "gpu-7")
    arguments = (
        "record",
        "verify",
        f"--signed-by={records[0]}/record.json",
        "--",
        str(records[0]),
        "nothing",
    )
    assert seen_here(arguments) == [f"{records[0]}/record.json", str(records[0])]
    found = run_there(arguments, str(records[0]), ["/absent/record"], {})
    assert found.exit_code == 2
    assert found.error.startswith("node gpu-7 does not see /absent/record: put it into a folder that all")


def test_without_ray_the_sentence_names_what_to_install(records, monkeypatch):
    monkeypatch.delitem(sys.modules, "areal_debug.spread.on_ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run("record", "verify", records[0], "--on", "ray")
    assert "pip install 'areal-debug[ray]'" in sentence(done)


class LossyRay:
    """The functions of Ray that tasks use; a task's worker dies as often as `deaths` says."""

    def __init__(self, deaths):
        self.deaths, self.arguments, self.most_at_a_time = dict(deaths), {}, 0

    def remote(self, function):
        self.function = function
        return self

    def options(self, **resources):
        assert resources == {"num_cpus": 1, "max_retries": 0}
        return SimpleNamespace(remote=self.submit)

    def submit(self, arguments, *others):
        number = len(self.arguments)
        self.arguments[number] = arguments
        return number

    def wait(self, running):
        self.most_at_a_time = max(self.most_at_a_time, len(running))
        return running[-1:], running[:-1]

    def get(self, number):
        from ray.exceptions import WorkerCrashedError

        [name] = self.arguments[number]
        if self.deaths.get(name, 0):
            self.deaths[name] -= 1
            raise WorkerCrashedError
        return Outcome(0, report=name)


def test_a_task_whose_worker_dies_runs_again_and_outcomes_keep_their_order(monkeypatch):
    pytest.importorskip("ray")
    from areal_debug.spread import on_ray

    fake, finished = LossyRay({"b": 2, "c": 3}), []
    monkeypatch.setattr(on_ray, "ray", fake)
    tasks = [Task(name, (name,)) for name in "abcd"]
    outcomes = on_ray.run_submitted(tasks, 2, finished.append)
    assert [outcome.report for outcome in outcomes] == ["a", "b", None, "d"]
    assert [outcome.num_retries for outcome in outcomes] == [0, 2, 2, 0]
    assert outcomes[2].error == "its worker died 3 times (WorkerCrashedError)"
    assert (outcomes[2].exit_code, fake.most_at_a_time) == (2, 2)
    assert sorted(task.name for task in finished) == list("abcd")


def test_a_ray_that_does_not_answer_is_named(records, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    done = run("record", "verify", records[0], "--on", "ray")
    assert sentence(done).startswith("no Ray cluster can be reached at '127.0.0.1:1'")
