"""Runs a job under SLURM: one batch job, in which each server and the trainer are a step.

launcher (login node)                  batch job (first machine)                        steps
sbatch --wait slurm_job.sh             python -m areal_core.launch.slurm JOB.json
following thread:                      srun a server each; waits for its address        slurm_server.py -> SGLang -> llm_server_{i}.log
slurm.log -> our output                in LOGS/names and for /health
waits for sbatch                       srun the trainer, a task a machine               ranks.py -> ranks -> srun -> trainer.log
SIGTERM, SIGINT: scancel ------------> SIGTERM: any exit ends every step

Inside of an allocation (`salloc`, or your own batch script) the launcher is itself the second
column. sbatch reads SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT and its other variables from
the environment.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from areal_core.allocation import parse_allocation
from areal_core.config import DPOConfig, PPOConfig, RWConfig, SFTConfig, config_from_dict, config_to_dict
from areal_core.errors import ConfigError
from areal_core.launch.follow import following
from areal_core.launch.job import Job
from areal_core.launch.placement import Placement, place
from areal_core.launch.processes import start
from areal_core.launch.slurm_steps import run_steps
from areal_core.launch.torchrun import ended_on_signals

METHODS = {"sft": SFTConfig, "rw": RWConfig, "dpo": DPOConfig, "ppo": PPOConfig}


def launch(job: Job) -> int:
    """Run a job as a batch job, or in the SLURM allocation of this process; return its exit code.

    Raises:
        ConfigError: there is no SLURM here, it refused the job, or the job does not fit into the
            cluster.
    """
    placement = place(job)
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "scheduler.type is 'slurm' and there is no sbatch here: start the run on a login node"
        )
    if "SLURM_JOB_ID" in os.environ:
        return run_steps(job, placement)
    return submit(job, placement)


def submit(job: Job, placement: Placement) -> int:
    """Submit the job, show its output and wait for its end; cancel it if this process is ended."""
    job.log_dir.mkdir(parents=True, exist_ok=True)
    description = job.log_dir / "slurm_job.json"
    description.write_text(json.dumps(job_to_json(job), indent=1))
    script = job.log_dir / "slurm_job.sh"
    script.write_text(batch_script(job, placement, description))
    log = job.log_dir / "slurm.log"
    log.unlink(missing_ok=True)
    with ended_on_signals(), following(log):
        batch = start(["sbatch", "--parsable", "--wait", str(script)], {}, subprocess.PIPE)
        assert batch.stdout is not None
        job_id = batch.stdout.readline().decode().strip().partition(";")[0]
        if not job_id.isdigit():
            reason = job_id + " " + batch.stdout.read().decode().strip()
            raise ConfigError(f"sbatch refused the job: {reason}; see {script}")
        try:
            print(f"SLURM job {job_id}", flush=True)
            return batch.wait()
        finally:
            if batch.poll() is None:
                subprocess.run(["scancel", job_id], check=False)
                batch.wait()  # for the end of the job: sbatch waits for that
            batch.stdout.close()


def batch_script(job: Job, placement: Placement, description: Path) -> str:
    """Return the script that sbatch runs on the first machine."""
    options = {
        "job-name": f"{job.config.experiment_name}_{job.config.trial_name}",
        "nodes": str(placement.num_nodes),
        "ntasks-per-node": "1",
        "output": str(job.log_dir / "slurm.log"),
        "chdir": os.getcwd(),
        **machine_options(job, placement),
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in options.items())]
    lines += ["#SBATCH --no-requeue", *(job.config.launcher.slurm.additional_bash_cmds or [])]
    python = [sys.executable, "-m", "areal_core.launch.slurm", str(description)]
    return "\n".join([*lines, f"exec {shlex.join(python)}", ""])


def machine_options(job: Job, placement: Placement) -> dict[str, str]:
    """Return the largest needs of any machine of the job, as options of sbatch."""
    options = job.config.launcher
    devices, cpus, memory_mib = [], [], []
    for node in range(placement.num_nodes):
        ranks = placement.ranks_per_node if node < placement.num_trainer_nodes else 0
        served = placement.server_nodes.count(node) * placement.devices_per_server
        devices.append(ranks + served)
        cpus.append(ranks * options.trainer_cpus_per_gpu + served * options.inference_server_cpus_per_gpu)
        memory_mib.append(ranks * options.trainer_mem_per_gpu + served * options.inference_server_mem_per_gpu)
    needed = {
        "gpus-per-node": 0 if job.config.device == "cpu" else max(devices),
        "cpus-per-task": max(cpus),
        "mem": max(memory_mib),
    }
    return {name: str(amount) for name, amount in needed.items() if amount}


def job_to_json(job: Job) -> dict[str, object]:
    """Return a job as JSON types."""
    return {
        "script_argv": list(job.script_argv),
        "method": next(name for name, kind in METHODS.items() if isinstance(job.config, kind)),
        "config": config_to_dict(job.config),
        "allocation": str(job.allocation),
        "env": dict(job.env),
        "log_dir": str(job.log_dir),
        "with_servers": job.with_servers,
    }


def read_job(file: Path) -> Job:
    """Read the file that `job_to_json` describes."""
    content = json.loads(file.read_text())
    config_class = METHODS[content["method"]]
    return Job(
        tuple(content["script_argv"]),
        config_from_dict(content["config"], config_class, source=str(file)),
        parse_allocation(content["allocation"]),
        content["env"],
        Path(content["log_dir"]),
        content["with_servers"],
    )


if __name__ == "__main__":
    sys.exit(launch(read_job(Path(sys.argv[1]))))
