"""The SLURM launcher on a real one-node SLURM, and its requests to a larger one."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from areal_core.config import PPOConfig, config_from_dict, config_to_dict
from areal_core.config.allocation import parse_allocation
from areal_core.config.scheduling import role_spec
from areal_core.launch import slurm
from areal_core.launch.job import Job
from areal_core.launch.placement import place
from tests.command_line import installed
from tests.launch.conftest import TINY, TRAIN, overrides

HERE = Path(__file__).parent
SERVER_OPTIONS = {
    "device": "cpu",
    "launcher.inference_server_cpus_per_gpu": 1,
    "launcher.inference_server_mem_per_gpu": 0,
}


@pytest.fixture(scope="session")
def cluster():
    """A running SLURM; skips the test where none can be started."""
    installed(HERE.parent / "slurm" / "start_slurm.sh")


def run(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*TRAIN, script, "--config", TINY, *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.long
def test_reinforcement_learning_runs_under_slurm(cluster, tiny_model, tmp_path):
    options = overrides(
        tmp_path, tiny_model, "slurm", allocation_mode="embedded|fsdp:d2", total_train_steps=2
    )
    done = run(HERE.parent / "debug" / "train_tiny.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SLURM job " in done.stdout
    assert "step 1 (2 of 2)" in done.stdout
    [logs] = tmp_path.glob("logs/*/tiny/test")
    assert [json.loads(line)["step"] for line in (logs / "stats.jsonl").read_text().splitlines()] == [0, 1]
    assert "step 1 (2 of 2)" in (logs / "trainer.log").read_text()


@pytest.mark.long
def test_a_rank_that_fails_under_slurm_gives_its_code_and_error_and_nothing_stays(cluster, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, subprocess, sys, time
            if os.environ["RANK"] == "0":
                left = subprocess.Popen(["sleep", "600"], start_new_session=True)
                pathlib.Path({str(tmp_path)!r}, f"{{left.pid}}.pid").touch()
                time.sleep(600)
            while not list(pathlib.Path({str(tmp_path)!r}).glob("*.pid")):
                time.sleep(0.01)
            print("no such weights", file=sys.stderr)
            sys.exit(7)
            """
        )
    )
    done = run(script, *overrides(tmp_path, tmp_path, "slurm", allocation_mode="embedded|fsdp:d2"))
    assert done.returncode == 7, done.stdout + done.stderr
    assert (
        "rank 1 failed first, with exit code 7; the last lines of its standard error:\n    no such weights"
        in (done.stdout)
    )
    [left] = tmp_path.glob("*.pid")
    assert not psutil.pid_exists(int(left.stem))


@pytest.mark.long
def test_a_server_is_a_separate_step_and_the_ranks_get_its_address(cluster, stop_file, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os; print('servers', os.environ['AREAL_LLM_SERVER_ADDRS'])")
    options = overrides(
        tmp_path, "some/model", "slurm", allocation_mode="sglang:d2+fsdp:d1", **SERVER_OPTIONS
    )
    done = run(script, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("inference servers: ")]
    addresses = line.removeprefix("inference servers: ").split(", ")
    assert len(set(addresses)) == 2
    assert f"servers {','.join(addresses)}" in done.stdout
    [logs] = tmp_path.glob("logs/*/tiny/test")
    assert (logs / "llm_server_1.log").read_text().startswith("model some/model\n")
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(process.info["cmdline"] or ())
    ]


@pytest.mark.long
def test_a_server_that_cannot_start_under_slurm_is_reported_with_its_last_line(cluster, stop_file, tmp_path):
    Path(f"{stop_file}1").touch()
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(5)")
    done = run(
        script,
        *overrides(tmp_path, "some/model", "slurm", allocation_mode="sglang:d1+fsdp:d1", **SERVER_OPTIONS),
    )
    assert done.returncode == 1
    assert "no such model" in done.stdout


@pytest.mark.long
def test_the_end_of_the_launcher_cancels_the_job(cluster, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import time; print('started', flush=True); time.sleep(600)")
    command = [*TRAIN, script, "--config", TINY, *overrides(tmp_path, tmp_path, "slurm")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        job_id = next(line.split()[2] for line in launcher.stdout if line.startswith("SLURM job "))
        assert "started\n" in iter(launcher.stdout.readline, "")
        launcher.send_signal(signal.SIGTERM)
        launcher.stdout.read()
    assert launcher.returncode == 128 + signal.SIGTERM
    # A completing job has ended, and is listed until its node has reported it.
    listing = ["squeue", "--noheader", "--format=%T", f"--jobs={job_id}"]
    queue = subprocess.run(listing, capture_output=True, text=True)
    assert queue.stdout.strip() in ("", "COMPLETING", "CANCELLED")


def gpu_job(tmp_path: Path, allocation: str, **launcher: object) -> Job:
    config = PPOConfig(experiment_name="e", trial_name="t")
    config.train_dataset.path, config.train_dataset.type, config.actor.path = "arithmetic", "rl", "m"
    config.cluster.n_nodes, config.cluster.n_gpus_per_node = 4, 8
    config.launcher.slurm.additional_bash_cmds = ["module load cuda"]
    return Job(
        ("train.py", "--config", "a b.yaml"), config, parse_allocation(allocation), {"A": "1"}, tmp_path
    )


def test_the_batch_script_requests_what_the_fullest_machine_needs(tmp_path):
    job = gpu_job(tmp_path, "sglang:d2t4+fsdp:d16")
    script = slurm.batch_script(job, place(job), tmp_path / "job.json").splitlines()
    assert script[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=3", "#SBATCH --gpus-per-node=8", "#SBATCH --cpus-per-task=32"} <= set(script)
    assert f"#SBATCH --mem={8 * 32 * 1024}" in script
    assert script[-2] == "module load cuda"
    assert script[-1] == f"exec {sys.executable} -P -m areal_core.launch.slurm {tmp_path}/job.json"


def test_a_step_gets_its_own_gpus_and_its_container():
    launcher = PPOConfig(experiment_name="e", trial_name="t").launcher
    launcher.slurm.trainer_image = "/x.sif"
    spec = role_spec({"mem": 1}, launcher, "actor")
    step = slurm.step_command(spec, ["a", "b"], num_gpus=4, num_units=4)
    assert step[0] == "srun"
    assert {"--nodes=2", "--nodelist=a,b", "--exact", "--gpus-per-node=4", "--mem=4096", "-K"} <= set(step)
    assert "--cpus-per-task=16" in step
    assert step[step.index("--chdir") + 1] == os.environ["PWD"]
    assert step[-6:] == ["apptainer", "exec", "--nv", "--bind", "/storage:/storage", "/x.sif"]
    on_cpu = slurm.step_command(role_spec({"mem": 0}, launcher, "rollout"), ["a"], num_gpus=0, num_units=1)
    assert "--overlap" in on_cpu
    assert not any(part.startswith("--mem") for part in on_cpu)


def test_a_job_survives_its_way_through_json(tmp_path):
    job = gpu_job(tmp_path, "sglang:d2+fsdp:d4")
    file = tmp_path / "job.json"
    file.write_text(json.dumps(slurm.job_to_json(job)))
    assert slurm.read_job(file) == job
    assert config_from_dict(config_to_dict(job.config), PPOConfig) == job.config
