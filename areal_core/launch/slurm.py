"""Runs a job under SLURM: one batch job, in which each server and the trainer are a step.

launcher (login node)                  batch job (first machine)                        steps
sbatch --wait slurm_job.sh             python -m areal_core.launch.slurm JOB.json
following thread:                      srun a server each; waits for its address        slurm_server.py -> SGLang -> llm_server_{i}.log
slurm.log -> our output                in LOGS/names and for /health
waits for sbatch                       srun the trainer, a task a machine               ranks.py -> ranks -> srun -> trainer.log
SIGTERM, SIGINT: scancel ------------> SIGTERM: any way out ends every step

Inside of an allocation (`salloc`, or a batch script of one's own) the launcher is itself the second column.
sbatch reads SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT and its other variables from the environment.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from areal_core.allocation import parse_allocation
from areal_core.config import PPOConfig, SFTConfig, config_from_dict, config_to_dict
from areal_core.config.experiment import SlurmLauncherConfig
from areal_core.errors import ConfigError
from areal_core.launch.errors import ServerFailed
from areal_core.launch.follow import following
from areal_core.launch.job import Job, run_job
from areal_core.launch.placement import Placement, place
from areal_core.launch.processes import Child, end_tree, start
from areal_core.launch.ranks import earliest_failure
from areal_core.launch.server_plan import ServerPlan, plan_servers
from areal_core.launch.sglang_server import free_port
from areal_core.launch.torchrun import (
    POLL_S,
    Nodes,
    ended_on_signals,
    rank_command,
    rank_environment,
    run_command,
)
from areal_core.rollout.errors import ServerDied
from areal_core.rollout.name_service import FolderNames
from areal_core.rollout.servers import Server, wait_until_healthy

NAMES = "names"  # folder below the logs in which servers leave their addresses


def launch(job: Job) -> int:
    """Runs a job as a batch job, or in the allocation that this process is in; its exit code, as `run_job` gives it.

    Raises:
        ConfigError: there is no SLURM here, it refused the job, or the job does not fit into the cluster.
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
    """Hands the job to sbatch, shows its output, and waits for its end; cancels it when this process is ended."""
    job.log_dir.mkdir(parents=True, exist_ok=True)
    description = job.log_dir / "slurm_job.json"
    description.write_text(json.dumps(job_to_json(job), indent=1))
    script = job.log_dir / "slurm_job.sh"
    script.write_text(batch_script(job, placement, description))
    log = job.log_dir / "slurm.log"
    log.unlink(missing_ok=True)
    with ended_on_signals(), following(log):
        batch = start(["sbatch", "--parsable", "--wait", str(script)], {}, subprocess.PIPE)
        job_id = batch.stdout.readline().decode().strip().partition(";")[0]
        if not job_id.isdigit():
            reason = job_id + " " + batch.stdout.read().decode().strip()
            raise ConfigError(f"sbatch refused the job: {reason}; {script} is what it was given")
        try:
            print(f"SLURM job {job_id}", flush=True)
            return batch.wait()
        finally:
            if batch.poll() is None:
                subprocess.run(["scancel", job_id], check=False)
                batch.wait()  # for the end of the job: sbatch waits for that
            batch.stdout.close()


def batch_script(job: Job, placement: Placement, description: Path) -> str:
    """What sbatch runs on the first machine."""
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
    """What the fullest machine of the job needs, as options of sbatch."""
    options = job.config.launcher
    devices, cpus, memory_mib = [], [], []
    for node in range(placement.num_nodes):
        ranks = placement.ranks_per_node if node < placement.num_trainer_nodes else 0
        served = placement.server_nodes.count(node) * placement.devices_per_server
        devices.append(ranks + served)
        cpus.append(ranks * options.trainer_cpus_per_gpu + served * options.inference_server_cpus_per_gpu)
        memory_mib.append(ranks * options.trainer_mem_per_gpu + served * options.inference_server_mem_per_gpu)
    asked = {
        "gpus-per-node": 0 if job.config.device == "cpu" else max(devices),
        "cpus-per-task": max(cpus),
        "mem": max(memory_mib),
    }
    return {name: str(amount) for name, amount in asked.items() if amount}


def run_steps(job: Job, placement: Placement) -> int:
    """Runs the job's servers and ranks as steps of the allocation that this process is in."""
    hosts = hosts_of_allocation()
    if len(hosts) < placement.num_nodes:
        raise ConfigError(
            f"the job needs {placement.num_nodes} machines and the SLURM allocation has {len(hosts)}: ask for more"
        )
    return run_job(
        job,
        lambda stack: start_servers(job, placement, hosts, stack),
        lambda env, healthy: run_ranks(job, placement, hosts, env, healthy),
    )


def run_ranks(
    job: Job, placement: Placement, hosts: list[str], env: Mapping[str, str], healthy: Callable[[], bool]
) -> int:
    """Runs the ranks as one step; the exit code of the first that failed on any machine."""
    hosts = hosts[: placement.num_trainer_nodes]
    nodes = Nodes(len(hosts), hosts[0], free_port()) if len(hosts) > 1 else None
    options = job.config.launcher
    step = step_command(
        options.slurm,
        hosts,
        options.slurm.trainer_image,
        num_gpus=0 if job.config.device == "cpu" else placement.ranks_per_node,
        num_cpus=placement.ranks_per_node * options.trainer_cpus_per_gpu,
        memory_mib=placement.ranks_per_node * options.trainer_mem_per_gpu,
    )
    task = [sys.executable, "-m", "areal_core.launch.task"]
    command = [*step, *task, *rank_command(job.script_argv, placement.ranks_per_node, nodes)]
    code = run_command(command, rank_environment(env, job.log_dir), job.log_dir / "trainer.log", healthy)
    failure = earliest_failure(job.log_dir / "ranks")
    return failure.exit_code if failure is not None else code


class StepServer:
    """A server as the batch job sees it: a step, and an address once the step has left it."""

    def __init__(self, server: Server, step: Child) -> None:
        self.server = server
        self._step = step

    def check(self) -> None:
        """Raises `ServerFailed` when the step has ended."""
        if (code := self._step.poll()) is not None:
            raise ServerFailed(f"ended with exit code {code}: server {self.server.describe()}")


def start_servers(job: Job, placement: Placement, hosts: list[str], stack: ExitStack) -> list[StepServer]:
    """Starts every server as a step, then waits for all; `stack` ends them. Raises `ServerFailed`."""
    shutil.rmtree(job.log_dir / NAMES, ignore_errors=True)
    plans = plan_servers(job, "cpu" if job.config.device == "cpu" else "cuda", share_devices=False)
    steps = []
    for i, plan in enumerate(plans):
        host = hosts[placement.server_nodes[i]]
        steps.append(start_server_step(job, placement, host, i, plan, alone=placement.num_nodes == 1))
        stack.callback(end_tree, steps[-1])
    servers = []
    for i, (plan, step) in enumerate(zip(plans, steps, strict=True)):
        waiting = StepServer(Server(f"llm_server_{i}", Path(plan.log)), step)
        address = wait_for_address(job.log_dir / NAMES, i, waiting.check, plan.ready_timeout_s)
        servers.append(StepServer(Server(address, Path(plan.log)), step))
    for plan, server in zip(plans, servers, strict=True):
        try:
            wait_until_healthy([server.server], plan.ready_timeout_s, server.check)
        except ServerDied as death:
            raise ServerFailed(str(death)) from death
    return servers


def start_server_step(
    job: Job, placement: Placement, host: str, index: int, plan: ServerPlan, alone: bool
) -> Child:
    """Starts a step that runs a server on `host`; it listens to this machine only if the job is `alone` on it."""
    options, size = job.config.launcher, placement.devices_per_server
    step = step_command(
        options.slurm,
        [host],
        options.slurm.inference_server_image,
        num_gpus=0 if job.config.device == "cpu" else size,
        num_cpus=size * options.inference_server_cpus_per_gpu,
        memory_mib=size * options.inference_server_mem_per_gpu,
    )
    file = job.log_dir / f"llm_server_{index}.json"
    file.write_text(json.dumps(asdict(plan)))
    server = [
        sys.executable,
        "-m",
        "areal_core.launch.slurm_server",
        str(file),
        "127.0.0.1" if alone else host,
    ]
    command = [*step, *server, str(job.log_dir / NAMES), str(index)]
    with (job.log_dir / f"llm_server_{index}_step.log").open("wb") as log:
        return start(command, {}, log)


def wait_for_address(names: Path, index: int, check: Callable[[], None], timeout_s: float) -> str:
    """The address that a server's step leaves when the server has been started. Raises `ServerFailed`."""
    deadline = time.monotonic() + timeout_s
    while not (found := FolderNames(names).below("servers")) or f"servers/{index}" not in found:
        check()
        if time.monotonic() > deadline:
            raise ServerFailed(f"SLURM had not started server {index} after {timeout_s:.0f} s")
        time.sleep(POLL_S)
    return found[f"servers/{index}"]


def step_command(
    options: SlurmLauncherConfig,
    hosts: list[str],
    image: str | None,
    *,
    num_gpus: int,
    num_cpus: int,
    memory_mib: int,
) -> list[str]:
    """srun with one task on each host, up to the command that it runs, in a container if there is an image."""
    command = ["srun", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1"]
    command += [f"--nodelist={','.join(hosts)}", "--kill-on-bad-exit=1", "--unbuffered"]
    if num_gpus:  # exact: two steps on one machine never see the same GPU
        command += ["--exact", f"--gpus-per-node={num_gpus}", f"--cpus-per-task={num_cpus or 1}"]
    else:
        command += ["--overlap"]
    command += [f"--mem={memory_mib}"] if memory_mib else []
    command += shlex.split(os.path.expandvars(options.srun_additional_args))
    if image is None or options.container_type == "none":
        return command
    return [*command, options.container_type, "exec", "--nv", "--bind", options.mount, image]


def hosts_of_allocation() -> list[str]:
    """The machines of the allocation that this process is in."""
    done = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


def job_to_json(job: Job) -> dict[str, object]:
    """A job in JSON types."""
    return {
        "script_argv": list(job.script_argv),
        "method": "sft" if isinstance(job.config, SFTConfig) else "ppo",
        "config": config_to_dict(job.config),
        "allocation": str(job.allocation),
        "env": dict(job.env),
        "log_dir": str(job.log_dir),
        "with_servers": job.with_servers,
    }


def read_job(file: Path) -> Job:
    """The inverse of `job_to_json`."""
    content = json.loads(file.read_text())
    config_class = {"sft": SFTConfig, "ppo": PPOConfig}[content["method"]]
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
