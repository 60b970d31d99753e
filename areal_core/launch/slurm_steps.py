"""The steps of a SLURM job: srun per server and for the ranks, from the first machine of the job.

A server's step chooses its port on its own machine and writes the address to LOGS/names, where this
process waits for it.
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

from areal_core.config.services import SlurmLauncherConfig
from areal_core.errors import ConfigError
from areal_core.launch.errors import ServerFailed
from areal_core.launch.job import Job, run_job
from areal_core.launch.placement import Placement
from areal_core.launch.processes import Child, end_tree, start
from areal_core.launch.ranks import earliest_failure
from areal_core.launch.server_plan import ServerPlan, plan_servers
from areal_core.launch.sglang_server import free_port
from areal_core.launch.torchrun import POLL_S, Nodes, rank_command, rank_environment, run_command
from areal_core.rollout.errors import ServerDied
from areal_core.rollout.name_service import FolderNames
from areal_core.rollout.servers import Server, wait_until_healthy

NAMES = "names"  # folder below the logs in which servers publish their addresses


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


def run_ranks(
    job: Job, placement: Placement, hosts: list[str], env: Mapping[str, str], healthy: Callable[[], bool]
) -> int:
    """Run the ranks as one step; return the exit code of the first that failed on any machine."""
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
    """Start a step that runs a server, on the loopback interface if the job has one machine."""
    host = hosts[placement.server_nodes[index]]
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
    listen = "127.0.0.1" if placement.num_nodes == 1 else host
    server = [sys.executable, "-m", "areal_core.launch.slurm_server", str(file), listen]
    with log.open("wb") as output:
        return start([*step, *server, str(job.log_dir / NAMES), str(index)], {}, output)


def wait_for_address(names: Path, index: int, check: Callable[[], None], timeout_s: float) -> str:
    """Wait for the address that a server's step publishes. Raises `ServerFailed`."""
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
    """Return an srun prefix with one task per host, in a container if there is an image."""
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
    """Return the machines of the SLURM allocation that this process is in."""
    done = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()
