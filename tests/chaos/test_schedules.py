"""Seeded schedules of faults against scripted servers: nothing lost, doubled, too old or poisoned.

`areal-debug chaos --schedules 1 --seed N` repeats one, with its faults and what they violated.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_core.servers import client
from areal_debug.chaos.trial import BATCH_SIZE, N_SAMPLES, NUM_STEPS, run_trial
from areal_debug.cli import main

EVERYDAY, ALL = (0, 2), range(200)


def assert_clean(seed: int, folder: Path) -> None:
    trial = run_trial(seed, folder)
    assert not trial.violations, f"{trial.repeat}\n{json.dumps(trial.as_dict(), indent=1)}"
    assert trial.num_rows == NUM_STEPS * BATCH_SIZE * N_SAMPLES
    assert trial.num_replies >= trial.num_rows


@pytest.mark.parametrize("seed", EVERYDAY)
def test_a_schedule_of_faults_violates_nothing(seed, tmp_path):
    assert_clean(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", ALL)
def test_two_hundred_schedules_violate_nothing(seed, tmp_path):
    assert_clean(seed, tmp_path)


def test_a_seed_repeats_its_faults(tmp_path):
    first, again = (run_trial(11, tmp_path / name, ("delay", "reset")) for name in ("first", "again"))
    assert (first.schedule, first.staleness, first.restart_at) == (
        again.schedule,
        again.staleness,
        again.restart_at,
    )
    assert not first.violations


def test_a_client_that_trusts_every_reply_is_caught(tmp_path, monkeypatch):
    """Without its checks the client trains on what servers made up; the history shows it."""
    monkeypatch.setattr(client, "checked", lambda chunk, asked: chunk)
    trial = run_trial(0, tmp_path, ("nan",))
    assert trial.injected["nan"] > 0
    assert len(trial.violations.poisoned) > 0
    assert "as in a spoiled reply: nan from server " in trial.violations.poisoned[0]


def test_the_command_prints_a_verdict_and_the_same_facts_as_json():
    done = CliRunner().invoke(main, ["chaos", "--schedules", "1", "--faults", "delay,reset"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Clean: nothing lost, doubled, too old or poisoned; 1 schedules, 96 rows")
    done = CliRunner().invoke(main, ["chaos", "--schedules", "1", "--faults", "delay", "--json"])
    (trial,) = json.loads(done.stdout)
    assert (trial["lost"], trial["doubled"], trial["too_old"], trial["poisoned"], trial["ended"]) == (0,) * 5
    assert trial["rows"] == 96


def test_a_violation_is_printed_with_its_schedule_and_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setattr(client, "checked", lambda chunk, asked: chunk)
    done = CliRunner().invoke(main, ["chaos", "--schedules", "1", "--seed", "5", "--faults", "nan"])
    assert done.exit_code == 1
    assert done.stdout.startswith("Seed 5; again: areal-debug chaos --schedules 1 --seed 5 --faults nan\n")
    assert "poisoned: step " in done.stdout
    assert "server 1, generate request " in done.stdout
    assert "Violated in 1 of 1 schedules" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either CONFIG, for a training run, or --schedules N"),
        (["a.yaml", "--schedules", "1"], "give either CONFIG, for a training run, or --schedules N"),
        (["a.yaml"], "a.yaml cannot be read"),
        (["--schedules", "1", "--faults", "fire"], "there is no fault 'fire': choose from nan, "),
    ],
)
def test_misuse_is_one_sentence_and_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["chaos", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
