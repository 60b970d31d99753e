"""Run a job on a Ray cluster: a placement group, an actor per server, an actor per trainer machine.

driver (main thread)                          actors, one a bundle                children of the actors
placement group, wait for its machines
start servers, wait for /health               ServerActor 0..n-1                  SGLang -> llm_server_{i}.log
start agents                                  AgentActor 0..m-1: run() waits      torchrun -> ranks -> trainer.log
following thread: trainer.log -> our output
every 0.2 s: an agent ended?  a server ended?
one failed: the others get 1 s to report an earlier failure
any exit: stop() in each actor's second thread ends its children; then the group is removed
the driver dies: Ray ends the actors, and their children end with them (`processes.start`)

Each actor has three threads of Ray: one waits for the child, one ends it when the launcher calls
`stop`, one answers. A child ends with the thread that started it, and so with its actor.

Logs go to the run's log folder, which all machines must see.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_core.config.scheduling import RoleSpec
from areal_core.errors import ConfigError, ServerFailed
from areal_core.launch.job import Job, following, run_job, spec_of
from areal_core.launch.node import earliest_failure
from areal_core.launch.placement import Placement, ServerPlan, place, plan_servers, start_server
from areal_core.launch.processes import Child, end_tree, start
from areal_core.launch.server_process import InferenceServer, free_port
from areal_core.launch.torchrun import (
    POLL_S,
    Nodes,
    ended_on_signals,
    rank_command,
    rank_environment,
    shell_code,
    wait_for,
)
from areal_core.servers.server import Server

NOT_FORWARDED = ("RAY_", "CUDA_VISIBLE_DEVICES")  # which Ray sets for each actor
STOP_TIMEOUT_S = 30.0
SETTLE_S = 1.0  # in which other machines may report an earlier failure
CONNECT_TIMEOUT_S = 10.0


class RayServer:
    """A server in an actor, as the driver sees it."""

    def __init__(self, server: Server, end: "ray.ObjectRef[int]") -> None:
        self.server = server
        self._end = end

    def check(self) -> None:
        """Raise `ServerFailed` when the server, its actor or its machine has ended."""
        if not ray.wait([self._end], timeout=0)[0]:
            return
        try:
            ended = f"ended with exit code {ray.get(self._end)}"
        except RayError as error:
            ended = f"was lost ({type(error).__name__})"
        raise ServerFailed(f"{ended}: server {self.server.describe()}")


def launch(job: Job) -> int:
    """Run a job on the Ray cluster of `launcher.ray.address`; return its exit code (see `run_job`).

    Raises:
        ConfigError: there is no such cluster, or it lacks the resources for the job.
    """
    placement = place(job)
    with ended_on_signals(), connected(job.config.launcher.ray.address):
        device = device_of(job.config.device)
        actor, rollout = spec_of(job.config, "actor"), spec_of(job.config, "rollout")
        bundles = make_bundles(actor, rollout, placement, device)
        with placed(bundles, job.config.launcher.ray.placement_timeout_s) as group, ExitStack() as actors:
            plans = [
                replace(plan, env=forwarded_environment() | plan.env)
                for plan in plan_servers(job, device, share_devices=False)
            ]
            start_actor = partial(make_actor, actors, group, bundles)
            return run_job(
                job,
                lambda stack: start_servers(plans, start_actor, placement.num_trainer_nodes),
                lambda env, healthy: run_agents(job, placement, start_actor, env, healthy),
            )


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A connection to a cluster, unless this process has one already. Raises ConfigError."""
    if ray.is_initialized():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    where = address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = where.rpartition(":")
    try:
        if port.isdigit() and "/" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # a node that does not start in time raises no class of its own
        if where == "local":
            raise ConfigError(
                f"Ray did not start on this machine ({str(error).splitlines()[0]}): try again when it is less busy, "
                "or name a running Ray in RAY_ADDRESS"
            ) from None
        raise ConfigError(
            f"no Ray cluster can be reached at {where!r} ({str(error).splitlines()[0]}): start one with "
            "`ray start --head`, or leave launcher.ray.address and RAY_ADDRESS empty"
        ) from None
    signal.signal(signal.SIGTERM, before)  # Ray's own handler would end this process with code 15
    try:
        yield
    finally:
        ray.shutdown()


def forwarded_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(NOT_FORWARDED)}


def device_of(device: str) -> str:
    """Return the configured device, or that of the cluster for "auto": "cpu" or "cuda"."""
    if device != "auto":
        return device
    return "cuda" if "GPU" in cluster_resources() else "cpu"


def cluster_resources() -> dict[str, float]:
    """Return the CPUs, GPUs and bytes of memory of the cluster, by Ray's names of them."""
    resources: Any = ray.cluster_resources  # Ray leaves it without annotations
    return resources()


def make_bundles(
    actor: RoleSpec, rollout: RoleSpec, placement: Placement, device: str
) -> list[dict[str, float]]:
    """Return the resources of each Ray actor: the trainer's machines, then the servers."""
    ranks_per_node, per_server = placement.ranks_per_node, placement.devices_per_server
    trainer = (placement.devices_per_rank, ranks_per_node, actor.cpus_per_gpu, actor.mem_per_gpu)
    server = (1, per_server, rollout.cpus_per_gpu, rollout.mem_per_gpu)
    requested = [trainer] * placement.num_trainer_nodes + [server] * len(placement.server_nodes)
    bundles = []
    for gpus, count, cpus, memory_mib in requested:
        needs = {
            "CPU": float(cpus * count),
            "GPU": float(gpus * count if device == "cuda" else 0),
            "memory": float(memory_mib * count * 2**20),
        }
        needed = {name: amount for name, amount in needs.items() if amount}
        bundles.append(needed or {"CPU": 0.01})  # Ray refuses an empty bundle
    return bundles


@contextmanager
def placed(bundles: list[dict[str, float]], timeout_s: float) -> Iterator[PlacementGroup]:
    """A placement group with a bundle for each actor.

    Raises ConfigError when Ray lacks the resources.
    """
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(1.0):
            print(f"waiting for Ray to provide {describe(bundles)}", flush=True)
            ray.get(group.ready(), timeout=timeout_s)
        yield group
    except GetTimeoutError:
        raise ConfigError(
            f"Ray did not provide {describe(bundles)} within {timeout_s:.0f} s (launcher.ray.placement_timeout_s); "
            f"it has {describe([cluster_resources()])} in all: lower launcher.*_cpus_per_gpu or "
            "launcher.*_mem_per_gpu (0 requests none), or wait until other jobs end"
        ) from None
    finally:
        remove_placement_group(group)


def describe(bundles: list[dict[str, float]]) -> str:
    """Return bundles as `4 CPU, 8 GiB + 2 CPU`."""
    scales = {"CPU": (1, "CPU"), "GPU": (1, "GPU"), "memory": (2**30, "GiB")}
    return " + ".join(
        ", ".join(
            f"{bundle[name] / scale:.4g} {unit}" for name, (scale, unit) in scales.items() if name in bundle
        )
        for bundle in bundles
    )


def make_actor(
    actors: ExitStack, group: PlacementGroup, bundles: list[dict[str, float]], index: int, kind: type
) -> Any:
    needs = {"CPU": 0.0, "GPU": 0.0, "memory": 0.0} | bundles[index]
    actor: Any = (
        ray.remote(kind)
        .options(
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            memory=needs["memory"] or None,
            max_concurrency=3,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
    )
    actors.callback(stop_actor, actor)
    return actor


def stop_actor(actor: Any) -> None:
    """Let an actor end its children, then end the actor; it, or its machine, may be gone."""
    try:
        ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
    except RayError as error:
        print(f"an actor could not be stopped: {type(error).__name__}", flush=True)
    ray.kill(actor)


def start_servers(
    plans: list[ServerPlan], start_actor: Callable[[int, type], Any], first_bundle: int
) -> list[RayServer]:
    """Start every server, then wait for all. Raises `ServerFailed`."""
    actors = [start_actor(first_bundle + i, ServerActor) for i in range(len(plans))]
    addresses = ray.get([actor.start.remote(plan) for actor, plan in zip(actors, plans, strict=True)])
    try:
        ray.get([actor.wait_until_ready.remote() for actor in actors])
    except RayTaskError as error:
        raise ServerFailed(str(error.cause)) from None
    return [
        RayServer(Server(address, Path(plan.log)), actor.wait.remote())
        for actor, plan, address in zip(actors, plans, addresses, strict=True)
    ]


def run_agents(
    job: Job,
    placement: Placement,
    start_actor: Callable[[int, type], Any],
    env: Mapping[str, str],
    healthy: Callable[[], bool],
) -> int:
    """Run the ranks; return the exit code of the first that failed."""
    num_nodes = placement.num_trainer_nodes
    actors = [start_actor(i, AgentActor) for i in range(num_nodes)]
    nodes = Nodes(num_nodes, *ray.get(actors[0].address.remote())) if num_nodes > 1 else None
    python = spec_of(job.config, "actor").command
    command = rank_command(job.script_argv, placement.ranks_per_node, nodes, python)
    env = forwarded_environment() | rank_environment(env, job.log_dir)
    logs = [job.log_dir / ("trainer.log" if i == 0 else f"trainer_node_{i}.log") for i in range(num_nodes)]
    for log in logs:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
    with ExitStack() as shown:
        for log in logs:
            shown.enter_context(following(log))
        running = [
            actor.run.remote(command, env | {"PET_NODE_RANK": str(i)}, str(log), os.getcwd())
            for i, (actor, log) in enumerate(zip(actors, logs, strict=True))
        ]
        code = wait_for(partial(poll_agents, running), healthy)
        if code and running:  # a machine that failed earlier may report it later
            ray.wait(running, num_returns=len(running), timeout=SETTLE_S)
    failure = earliest_failure(job.log_dir / "ranks")
    return failure.exit_code if failure is not None else code


def poll_agents(running: list["ray.ObjectRef[int]"]) -> int | None:
    """Return the code of an agent that failed, 0 when all have succeeded, None while some run."""
    for ended in ray.wait(running, timeout=POLL_S)[0]:
        running.remove(ended)
        try:
            code = ray.get(ended)
        except RayError as error:
            print(f"a machine of the trainer was lost ({type(error).__name__}): {error}", flush=True)
            return 1
        if code:
            return code
    return None if running else 0


class AgentActor:
    """Runs one command on its machine. `stop` is called while `run` waits."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def address(self) -> tuple[str, int]:
        """Return this machine's address, and a free port on it."""
        host = own_address()
        return host, free_port(host)

    def run(self, command: list[str], env: dict[str, str], log: str, folder: str) -> int:
        """Run a command to its end in `folder`; return its exit code as a shell would show it."""
        with open(log, "wb") as output:
            self._child = start(command, env, output, Path(folder))
            code = self._child.wait()
            if code < 0:
                output.write(f"killed by {signal.Signals(-code).name}\n".encode())
        end_tree(self._child)
        return shell_code(code)

    def stop(self) -> None:
        """End the command and everything that it has started."""
        if self._child is not None:
            end_tree(self._child)


class ServerActor:
    """Runs one inference server on its machine. `stop` is called while `wait` waits."""

    def __init__(self) -> None:
        self._server: InferenceServer | None = None

    def start(self, plan: ServerPlan) -> str:
        self._server = start_server(plan, own_address())
        return self._server.server.address

    def wait_until_ready(self) -> None:
        """Wait until `/health` answers. Raises `ServerFailed`."""
        self._started().wait_until_ready()

    def wait(self) -> int:
        """Wait for the end of the server; return its exit code."""
        return self._started().process.wait()

    def stop(self) -> None:
        """End the server and all its workers."""
        if self._server is not None:
            self._server.stop()

    def _started(self) -> InferenceServer:
        assert self._server is not None, "start() comes first"
        return self._server


def own_address() -> str:
    address: Any = ray.util.get_node_ip_address  # Ray leaves it without annotations
    return address()
