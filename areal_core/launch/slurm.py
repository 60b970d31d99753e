"""Run a job under SLURM: one batch job, in which each server and the trainer are a step.

launcher (login node)                  batch job (first machine)                        steps
sbatch --wait slurm_job.sh             python -m areal_core.launch.slurm JOB.json
following thread:                      srun a server each; waits for its address        slurm_server.py -> SGLang -> llm_server_{i}.log
slurm.log -> our output                in LOGS/names and for /health
waits for sbatch                       srun the trainer, a task a machine               task.py -> node.py -> ranks -> trainer.log
SIGTERM, SIGINT: scancel ------------> SIGTERM: any exit ends every step

A server's step chooses its port on its own machine and writes the address to LOGS/names, where the
batch job waits for it.

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
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from areal_core.config import config_from_dict, config_to_dict
from areal_core.config.allocation import parse_allocation
from areal_core.config.experiment import METHODS
from areal_core.config.scheduling import RoleSpec
from areal_core.errors import ConfigError, ServerFailed
from areal_core.launch.job import Job, following, run_job, spec_of
from areal_core.launch.node import earliest_failure
from areal_core.launch.placement import Placement, ServerPlan, place, plan_servers
from areal_core.launch.processes import Child, end_tree, start
from areal_core.launch.server_process import free_port
from areal_core.launch.torchrun import (
    POLL_S,
    Nodes,
    ended_on_signals,
    rank_command,
    rank_environment,
    run_command,
)
from areal_core.rollout.errors import ServerDied
from areal_core.safety.interpreter import python_command
from areal_core.servers.discovery import FolderNames
from areal_core.servers.server import Server, wait_until_healthy

NAMES = "names"  # folder below the logs in which servers publish their addresses


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
    description.touch(mode=0o600)  # the job needs the values of its variables and keys
    description.chmod(0o600)
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
    python = python_command("-m", "areal_core.launch.slurm", str(description))
    return "\n".join([*lines, f"exec {shlex.join(python)}", ""])


def machine_options(job: Job, placement: Placement) -> dict[str, str]:
    actor, rollout = spec_of(job.config, "actor"), spec_of(job.config, "rollout")
    devices, cpus, memory_mib = [], [], []
    for node in range(placement.num_nodes):
        ranks = placement.ranks_per_node if node < placement.num_trainer_nodes else 0
        served = placement.server_nodes.count(node) * placement.devices_per_server
        devices.append(ranks * placement.devices_per_rank + served)
        cpus.append(ranks * actor.cpus_per_gpu + served * rollout.cpus_per_gpu)
        memory_mib.append(ranks * actor.mem_per_gpu + served * rollout.mem_per_gpu)
    needed = {
        "gpus-per-node": 0 if job.config.device == "cpu" else max(devices),
        "cpus-per-task": max(cpus),
        "mem": max(memory_mib),
    }
    return {name: str(amount) for name, amount in needed.items() if amount}


def job_to_json(job: Job) -> dict[str, object]:
    return vars(job) | {
        "method": next(name for name, kind in METHODS.items() if isinstance(job.config, kind)),
        "config": config_to_dict(job.config),
        "allocation": str(job.allocation),
        "env": dict(job.env),
        "log_dir": str(job.log_dir),
    }


def read_job(file: Path) -> Job:
    content = json.loads(file.read_text())
    config_class = METHODS[content.pop("method")]
    parsed = {
        "script_argv": tuple(content["script_argv"]),
        "config": config_from_dict(content["config"], config_class, source=str(file)),
        "allocation": parse_allocation(content["allocation"]),
        "log_dir": Path(content["log_dir"]),
    }
    return Job(**content | parsed)


def run_steps(job: Job, placement: Placement) -> int:
    """Run the job's servers and ranks as steps of the SLURM allocation that this process is in."""
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


def hosts_of_allocation() -> list[str]:
    done = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


def run_ranks(
    job: Job, placement: Placement, hosts: list[str], env: Mapping[str, str], healthy: Callable[[], bool]
) -> int:
    """Run the ranks as one step; return the exit code of the first that failed on any machine."""
    hosts = hosts[: placement.num_trainer_nodes]
    nodes = Nodes(len(hosts), hosts[0], free_port()) if len(hosts) > 1 else None
    spec = spec_of(job.config, "actor")
    num_gpus = 0 if job.config.device == "cpu" else placement.ranks_per_node * placement.devices_per_rank
    step = step_command(spec, hosts, num_gpus=num_gpus, num_units=placement.ranks_per_node)
    task = python_command("-m", "areal_core.launch.task")
    ranks = rank_command(job.script_argv, placement.ranks_per_node, nodes, spec.command)
    command = [*step, *task, *ranks]
    code = run_command(command, rank_environment(env, job.log_dir), job.log_dir / "trainer.log", healthy)
    failure = earliest_failure(job.log_dir / "ranks")
    return failure.exit_code if failure is not None else code


class StepServer:
    """A server as the batch job sees it: a step, and an address once the step has published it."""

    def __init__(self, server: Server, step: Child, step_log: Path) -> None:
        self.server = server
        self._step = step
        self._step_log = step_log

    def check(self) -> None:
        """Raise `ServerFailed` when the step has ended."""
        if (code := self._step.poll()) is None:
            return
        started = self.server.log is not None and self.server.log.exists()
        server = self.server if started else replace(self.server, log=self._step_log)
        raise ServerFailed(f"ended with exit code {code}: server {server.describe()}")


def start_servers(job: Job, placement: Placement, hosts: list[str], stack: ExitStack) -> list[StepServer]:
    """Start every server as a step, then wait for all; `stack` ends them. Raises `ServerFailed`."""
    shutil.rmtree(job.log_dir / NAMES, ignore_errors=True)
    plans = plan_servers(job, "cpu" if job.config.device == "cpu" else "cuda", share_devices=False)
    waiting = []
    for i, plan in enumerate(plans):
        Path(plan.log).unlink(missing_ok=True)
        step_log = job.log_dir / f"llm_server_{i}_step.log"
        step = start_server_step(job, placement, hosts, i, plan, step_log)
        stack.callback(end_tree, step)
        # Port 0 until the step has published its own.
        waiting.append(
            StepServer(Server(f"{hosts[placement.server_nodes[i]]}:0", Path(plan.log)), step, step_log)
        )
    for i, (plan, server) in enumerate(zip(plans, waiting, strict=True)):
        address = wait_for_address(job.log_dir / NAMES, i, server.check, plan.ready_timeout_s)
        server.server = replace(server.server, address=address)
    for plan, server in zip(plans, waiting, strict=True):
        try:
            wait_until_healthy([server.server], plan.ready_timeout_s, server.check)
        except ServerDied as death:
            raise ServerFailed(str(death)) from death
    return waiting


def start_server_step(
    job: Job, placement: Placement, hosts: list[str], index: int, plan: ServerPlan, log: Path
) -> Child:
    host = hosts[placement.server_nodes[index]]
    size = placement.devices_per_server
    num_gpus = 0 if job.config.device == "cpu" else size
    step = step_command(spec_of(job.config, "rollout"), [host], num_gpus=num_gpus, num_units=size)
    file = job.log_dir / f"llm_server_{index}.json"
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(json.dumps(asdict(plan)))
    listen = "127.0.0.1" if placement.num_nodes == 1 else host
    server = python_command("-m", "areal_core.launch.slurm_server", str(file), listen)
    with log.open("wb") as output:
        return start([*step, *server, str(job.log_dir / NAMES), str(index)], {}, output)


def wait_for_address(names: Path, index: int, check: Callable[[], None], timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while not (found := FolderNames(names).below("servers")) or f"servers/{index}" not in found:
        check()
        if time.monotonic() > deadline:
            raise ServerFailed(f"SLURM had not started server {index} after {timeout_s:.0f} s")
        time.sleep(POLL_S)
    return found[f"servers/{index}"]


def step_command(spec: RoleSpec, hosts: list[str], *, num_gpus: int, num_units: int) -> list[str]:
    """Return an srun prefix with one task per host, in a container if there is an image.

    Args:
        num_gpus: of each task; 0 on a CPU.
        num_units: GPUs, or what counts as one on a CPU, whose cores and memory a task gets.
    """
    num_cpus, memory_mib = num_units * spec.cpus_per_gpu, num_units * spec.mem_per_gpu
    command = ["srun", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1"]
    command += [f"--nodelist={','.join(hosts)}", "--kill-on-bad-exit=1", "--unbuffered"]
    if num_gpus:  # exact: two steps on one machine never see the same GPU
        command += ["--exact", f"--gpus-per-node={num_gpus}", f"--cpus-per-task={num_cpus or 1}"]
    else:
        command += ["--overlap"]
    command += [f"--mem={memory_mib}"] if memory_mib else []
    command += shlex.split(os.path.expandvars(spec.srun_additional_args))
    if spec.image is None or spec.container_type == "none":
        return command
    return [*command, spec.container_type, "exec", "--nv", "--bind", spec.mount, spec.image]


if __name__ == "__main__":
    sys.exit(launch(read_job(Path(sys.argv[1]))))
