"""A real one-node SLURM: a job of two tasks, collected from outside its step."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hangdoctor.collect.write import read_manifest
from tests.command_line import installed, invoke

START_SLURM = Path(__file__).parents[2] / "slurm/start_slurm.sh"
RANK = """
import sys, time
def wait_for_peers():
    open(f"{sys.argv[1]}/ready-{sys.argv[2]}", "w").close()
    time.sleep(600)
wait_for_peers()
"""


@pytest.fixture
def slurm():
    """A SLURM that answers; started here when there is none and we may."""
    installed(START_SLURM)


@pytest.fixture
def job(slurm, tmp_path):
    """The id of a running job of two tasks that wait."""
    program = tmp_path / "train.py"
    program.write_text(RANK)
    batch = f"#!/bin/sh\nsrun --ntasks=2 --overlap sh -c 'exec {sys.executable} {program} {tmp_path} $SLURM_PROCID'\n"
    submitted = subprocess.run(
        ["sbatch", "--parsable", "--ntasks=2", f"--output={tmp_path}/job.log"],
        input=batch,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    number = submitted.stdout.strip()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline, (tmp_path / "job.log").read_text()
        time.sleep(0.1)
    yield number
    subprocess.run(["scancel", "--full", number], check=True, timeout=60)


@pytest.mark.long
def test_tasks_of_a_slurm_job_are_collected_beside_its_own_step(job, tmp_path):
    out = tmp_path / "out"
    done = invoke(
        "hang",
        "collect",
        "--slurm",
        job,
        "--to",
        out,
        "--samples",
        "2",
        "--interval",
        "0.5",
        "--python",
        sys.executable,
    )
    assert done.exit_code == 0, done.output
    manifest = read_manifest(out)
    [host] = manifest.hosts
    assert (host.status, manifest.job_size) == ("ok", 2)
    assert [(p.name, p.status, p.host) for p in manifest.processes] == [
        ("rank_0", "dumped", host.host),
        ("rank_1", "dumped", host.host),
    ]
    [thread] = json.loads((out / "samples/1/rank_1.json").read_text())
    assert thread["frames"][0]["name"] == "wait_for_peers"
    assert json.loads((out / "env/rank_1.json").read_text())["SLURM_JOB_ID"] == job
