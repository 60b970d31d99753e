"""Restarts of failed runs, and runs killed at random moments: the final weights are unaffected."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal_core.config import PPOConfig
from areal_core.config.allocation import parse_allocation
from areal_core.errors import ConfigError
from areal_core.launch import run as launching
from areal_core.launch.job import Job
from areal_core.safety.lock import take
from recorder import open_record
from tests.forks import COMMAND, run_forked

HERE = Path(__file__).parent


@pytest.fixture
def attempts(tmp_path, monkeypatch):
    """Run with scripted exit codes: `attempts([1, 0], mode="auto", hook="command")`.

    Returns the final exit code and the jobs that were started.
    """

    def run(codes: list[int], mode: str, retries: int = 3, hook: str = "") -> tuple[int, list[Job]]:
        config = PPOConfig(experiment_name="e", trial_name="t", post_exit_hook=hook)
        config.recover.mode, config.recover.retries = mode, retries
        job = Job((), config, parse_allocation("fsdp:d1"), {}, tmp_path)
        started: list[Job] = []

        def launch(job: Job) -> int:
            started.append(job)
            (tmp_path / "trainer.log").write_text(f"attempt {len(started)}")
            return codes.pop(0)

        monkeypatch.setattr(launching, "launch", launch)
        monkeypatch.setattr(launching.time, "sleep", lambda seconds: None)
        return launching.run(lambda attempt: replace(job, script_argv=(str(attempt),))), started

    return run


@pytest.mark.parametrize(
    ("mode", "codes", "last", "num_started"),
    [
        ("auto", [0], 0, 1),  # never after success
        ("fault", [1, 0], 0, 2),
        ("on", [137, 1, 0], 0, 3),
        ("auto", [1, 1, 1, 1], 1, 4),  # retries is 3
        ("auto", [2], 2, 1),  # a retry does not fix misuse
        ("auto", [1, 2], 2, 2),
        ("disabled", [1], 1, 1),
        ("resume", [1], 1, 1),
    ],
)
def test_a_run_is_restarted_as_its_mode_defines(attempts, mode, codes, last, num_started):
    code, started = attempts(codes, mode)
    assert code == last
    assert [job.script_argv for job in started] == [(str(i),) for i in range(num_started)]
    assert [job.env["AREAL_RECOVER_RUN"] for job in started] == ["0", "1", "1", "1"][:num_started]


def test_a_second_run_of_the_same_name_is_refused(attempts, tmp_path):
    other = take(tmp_path / "run.lock", "run-1", "e/t")
    words = rf"belongs to a run that has not ended, run run-1 \(e/t\), process {os.getpid()}.*give another trial_name \(it is 't'\)"
    with pytest.raises(ConfigError, match=words):
        attempts([0], "auto")
    assert sorted(os.listdir(tmp_path)) == ["run.lock"]
    other.release()
    code, started = attempts([1, 0], "auto")
    assert code == 0
    assert len({job.env["AREAL_RUN_ID"] for job in started}) == 1
    assert not (tmp_path / "run.lock").exists()


def train(model: Path, files: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(COMMAND, "train", HERE / "train_killed_once.py"),
        "--config",
        HERE.parent / "debug" / "tiny.yaml",
        f"cluster.fileroot={files}",
        *options,
    ]
    command += [f"actor.path={model}", "deterministic=true", "total_train_steps=3", "recover.freq_steps=1"]
    environment = (
        os.environ | {"OMP_NUM_THREADS": "1", "RANK_TO_KILL": "0", "KILL_IN_STEP": "-1"} | environment
    )
    return run_forked(list(map(str, command)), environment)


def facts_of_run(files: Path) -> tuple[dict[str, object], list[dict[str, float]]]:
    """Return the last checkpoint with checksums of its files, and all statistics except times."""
    [checkpoint] = files.glob("checkpoints/*/tiny/test/recover/step-000003")
    facts = json.loads((checkpoint / "checkpoint.json").read_text())["content"]
    facts["state"].pop("timers")
    [stats] = files.glob("logs/*/tiny/test/stats.jsonl")
    lines = [json.loads(line) for line in stats.read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if "time" not in k and "per_s" not in k} for line in lines]
    return facts, kept


def assert_killed_and_undisturbed_runs_agree(
    model: Path, tmp_path: Path, *options: str, **environment: str
) -> None:
    killed = train(model, tmp_path / "killed", "recover.mode=auto", *options, KILL_IN_STEP="1", **environment)
    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert "ended with exit code 137; restarting in 1 s, restart 1 of at most 3" in killed.stderr
    undisturbed = train(model, tmp_path / "whole", "recover.mode=fault", *options)
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    assert "restarting" not in undisturbed.stderr
    facts, stats = facts_of_run(tmp_path / "killed")
    expected_facts, expected_stats = facts_of_run(tmp_path / "whole")
    assert facts == expected_facts  # weights, optimizer, schedule, random states, position in the data
    assert stats == expected_stats
    assert [line["step"] for line in stats] == [0, 1, 2]


def test_a_killed_run_continues_to_the_same_bits_with_no_step_repeated(tiny_model, tmp_path):
    assert_killed_and_undisturbed_runs_agree(tiny_model, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("step", ["0", "1"])  # before and after the first checkpoint
def test_a_run_that_is_recorded_and_killed_leaves_one_complete_record_that_replays(
    tiny_model, tmp_path, step
):
    record = tmp_path / "record"
    recording = ("recover.mode=auto", "debug.dump_rollout_data=true", f"debug.path={record}")
    done = train(tiny_model, tmp_path, *recording, KILL_IN_STEP=step)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restarting" in done.stderr
    assert list(open_record(record).steps) == [0, 1, 2]
    replayed = run_forked([COMMAND, "replay", str(record)])
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_the_hook_runs_once_after_the_last_attempt_and_changes_no_exit_code(attempts, tmp_path, capsys):
    code, _ = attempts([1, 0], mode="fault", hook='echo run >> "$LOG_DIR/hook"; exit 3')
    assert (code, (tmp_path / "hook").read_text()) == (0, "run\n")
    assert "post_exit_hook: ended with exit code 3" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("--method=grpo", "--ranks=2", "--victims=all", "--mode=async"),
        ("--method=ppo", "--ranks=2", "--victims=one"),
        ("--method=async", "--ranks=1", "--victims=all"),
        ("--method=sft", "--ranks=1", "--victims=job", "--mode=async"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_killed_run_ends_with_the_same_bits(arguments):
    command = [
        sys.executable,
        "-m",
        "benchmarks.kill_and_resume",
        *arguments,
        "--kills=2",
        "--steps=12",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert len(trials) == 2
    assert all(trial["kills"] and trial["is_identical"] for trial in trials)
