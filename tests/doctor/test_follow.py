"""Doctor during a run: alarms once, a hook that cannot do harm, and a stop."""

import json
import subprocess
import sys

import pytest

from areal_debug.doctor.follow import Follower
from areal_debug.doctor.hooks import Hooks, make_hooks, run_hooks
from hangdoctor.watch.loop import lives
from tests.command_line import invoke

ALARM = {
    "id": "D17",
    "severity": "error",
    "title": "gradients are not finite",
    "metric": "grad_norm",
    "found": "2 of 9 steps are not finite",
    "evidence": [[7, float("nan")]],
    "advice": ["look at step 7"],
}


# Enough columns for more than a third of the checks.
SOUND = {
    "kl": 0.01,
    "entropy": 0.8,
    "clip_ratio": 0.02,
    "approx_kl": 0.001,
    "completion_length": 200.0,
    "frac_reward_zero_std": 0.1,
}


def log_steps(file, steps, grad_norm=0.5):
    with file.open("a") as out:
        for step in steps:
            norm = grad_norm if grad_norm == grad_norm else "nan"
            row = {"step": step, "reward": 0.5 + step / 100, "grad_norm": norm} | SOUND
            out.write(json.dumps(row) + "\n")


@pytest.fixture
def sleeper():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def follower_of(file, **settings):
    announced, notes = [], []
    follower = Follower(file, lambda alarm: announced.append(alarm["id"]), notes.append, **settings)
    return follower, announced, notes


def test_an_alarm_is_announced_once_and_only_after_two_looks_with_new_steps(tmp_path):
    file = tmp_path / "log.jsonl"
    follower, announced, notes = follower_of(file)
    follower.look()
    follower.look()
    assert [note.startswith("no metrics could be read: ") for note in notes] == [True]
    log_steps(file, range(10))
    follower.look()
    assert (follower.verdict, announced, follower.exit_code) == ("unknown", [], 2)  # too few
    log_steps(file, [10], float("nan"))
    follower.look()
    follower.look()
    assert announced == []
    log_steps(file, [11], float("nan"))
    for _ in range(3):
        follower.look()
    assert (announced, follower.exit_code, len(notes)) == (["D17"], 1, 1)


def test_the_verb_follows_until_nothing_is_logged_and_its_exit_code_is_the_verdict(tmp_path):
    file = tmp_path / "log.jsonl"
    log_steps(file, range(20))
    follow = ["doctor", str(file), "--follow", "--every", "0.1", "--idle", "0.5"]
    done = invoke(*follow)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "followed 20 steps: healthy, 0 findings\n"
    log_steps(file, range(20, 30), float("nan"))
    done = invoke(*follow, "--json")
    alarms = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.exit_code, [alarm["id"] for alarm in alarms].count("D17")) == (1, 1)
    done = invoke(*follow)
    assert "D17  gradients are not finite from step 20: " in done.stdout.replace("Gradients", "gradients")
    done = invoke("doctor", tmp_path / "none", "--follow", "--idle", "0.1")
    assert (done.exit_code, "no metrics could be read" in done.stderr) == (2, True)


def test_the_command_gets_the_alarm_in_its_environment_and_never_as_its_text(tmp_path):
    alarm = ALARM | {"title": "$(touch bad) `touch bad`\0\n;touch bad"}
    notes = []
    command = (
        f'cd {tmp_path}; echo "$AREAL_DEBUG_ALARM_ID $AREAL_DEBUG_ALARM_STEP $AREAL_DEBUG_ALARM_RUN" > ok'
    )
    run_hooks(alarm, "my-run", Hooks(command), notes.append)
    assert ((tmp_path / "ok").read_text(), notes) == ("D17 7 my-run\n", [])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ok"]
    run_hooks(alarm | {"onset": 3}, "my-run", Hooks(command), notes.append)
    assert (tmp_path / "ok").read_text() == "D17 3 my-run\n"  # where it began, as --follow prints it
    run_hooks(alarm, "my-run", Hooks("exit 4"), notes.append)
    assert notes == ["the command of --on-alarm ended with status 4"]


@pytest.mark.parametrize("chosen", ["D17", "error", "all"])
def test_a_chosen_finding_stops_the_run(tmp_path, sleeper, chosen):
    file = tmp_path / "log.jsonl"
    log_steps(file, range(10), float("nan"))
    follower, announced, notes = follower_of(file, hooks=make_hooks("", chosen), pid=sleeper.pid)
    follower.look()
    assert lives(sleeper.pid)
    log_steps(file, [10], float("nan"))
    follower.look()
    assert sleeper.wait(10) == -15
    assert (announced[0], follower.is_stopped) == ("D17", True)
    assert notes == [f"stopping the run for D17: SIGTERM to process {sleeper.pid}"]
