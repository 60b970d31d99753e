"""Runs killed at random moments end with the bits of undisturbed runs.

Checked by a script that does it any number of times.
"""

import json
import subprocess
import sys

import pytest


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
