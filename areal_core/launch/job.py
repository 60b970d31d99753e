"""One attempt at a run: servers and ranks are started and monitored in order, on any scheduler.

launcher (main thread)                       children
start servers, wait for /health              server 0..n-1                 output -> llm_server_{i}.log
start ranks                                  an agent per node -> ranks    output -> trainer.log and our output
every 0.2 s: ranks ended?  a server ended?
a server ended: others left -> continue; none left -> the ranks get 30 s to report it and exit
any exit (end, error, SIGTERM, SIGINT): every child is ended

`local.py`, `ray_cluster.py` and `slurm.py` define only how a server and the ranks are started. The
latter two run them on other machines, and show their output by `following` the log files.

Servers that run already (`Job.given_servers`) are checked instead of started, and left running.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from areal_core.config import BaseExperimentConfig, PPOConfig
from areal_core.config.allocation import Allocation
from areal_core.config.scheduling import ProcessRole, RoleSpec, role_spec
from areal_core.config.servers import server_options, serves_adapters
from areal_core.environment import ADDRESSES_VARIABLE, DETERMINISTIC
from areal_core.errors import ConfigError, ServerFailed
from areal_core.launch.torchrun import POLL_S, ended_on_signals
from areal_core.rollout.errors import WrongServer
from areal_core.servers.identity import RunModel, run_model
from areal_core.servers.server import LOGS_VARIABLE, Server, environment_of, servers_from_environment
from areal_core.servers.wire import Wire
from areal_core.servers.wires import wire_of

MISUSE = 2  # exit code of a mistake that the user has to correct
MAX_THREADS = 32  # that query servers
# A group that spans trainer and server works only without these.
NCCL_WITH_SERVERS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@dataclass(frozen=True)
class Job:
    """A job: what to run.

    Args:
        script_argv: script and its arguments, or `-m`, module and arguments.
        config: the run's options.
        allocation: the devices of rollout and training.
        env: changes to the environment of the ranks.
        log_dir: folder for `trainer.log`, `llm_server_{i}.log` and `ranks/`; shared by all
            machines.
        with_servers: False for a replay, which needs none.
        given_servers: `host:port,host:port` of servers that run already; by default those in
            `AREAL_LLM_SERVER_ADDRS`.
    """

    script_argv: tuple[str, ...]
    config: BaseExperimentConfig
    allocation: Allocation
    env: Mapping[str, str]
    log_dir: Path
    with_servers: bool = True
    given_servers: str = field(default_factory=lambda: os.environ.get(ADDRESSES_VARIABLE, ""))

    @property
    def num_servers(self) -> int:
        """Inference servers to start."""
        rollout = self.allocation.rollout
        if not self.with_servers or not self.allocation.has_servers or rollout is None:
            return 0
        return 0 if self.uses_given_servers else rollout.data

    @property
    def uses_given_servers(self) -> bool:
        """True if the ranks sample from servers that run already."""
        has_rollouts = isinstance(self.config, PPOConfig) and self.allocation.has_servers
        has_ranks = self.allocation.kind != "servers_only"
        return has_rollouts and has_ranks and self.with_servers and bool(self.given_servers)


class RunningServer(Protocol):
    """A server that was started, on any machine."""

    server: Server

    def check(self) -> None:
        """Raise `ServerFailed` when it has ended."""


StartServers = Callable[[ExitStack], Sequence[RunningServer]]  # the stack stops them
RunRanks = Callable[[Mapping[str, str], Callable[[], bool]], int]  # (env, healthy) -> exit code


def run_job(job: Job, start_servers: StartServers, run_ranks: RunRanks) -> int:
    """Start the servers that the job needs, then its ranks, and wait for their end.

    Returns:
        The exit code of the first rank that failed, 0 when none did, 1 when the servers failed, 2
        when servers that run already cannot be used.
    """
    env = {
        **(DETERMINISTIC if job.config.deterministic else {}),
        **spec_of(job.config, "actor").env_vars,
        **parse_environment("launcher.trainer_env_vars", job.config.launcher.trainer_env_vars),
        **job.env,
    }
    with ended_on_signals(), ExitStack() as stack:
        if job.uses_given_servers:
            if problems := problems_of_given_servers(job):
                print("\n".join(f"Error: {problem}" for problem in problems), file=sys.stderr)
                return MISUSE
            print(f"inference servers, which keep running: {job.given_servers}", flush=True)
            addresses = {ADDRESSES_VARIABLE: job.given_servers, LOGS_VARIABLE: ""}
            return run_ranks({**NCCL_WITH_SERVERS, **env, **addresses}, lambda: True)
        if not job.num_servers:
            return run_ranks(env, lambda: True)
        try:
            servers = list(start_servers(stack))
        except ServerFailed as failure:
            print(failure, file=sys.stderr)
            return 1
        print(f"inference servers: {', '.join(s.server.address for s in servers)}", flush=True)
        addresses = environment_of([s.server for s in servers])
        if not job.allocation.num_ranks:
            print(
                f"for other processes: AREAL_LLM_SERVER_ADDRS={addresses['AREAL_LLM_SERVER_ADDRS']}",
                flush=True,
            )
            while any_left(servers):
                time.sleep(POLL_S)
            return 1
        return run_ranks({**NCCL_WITH_SERVERS, **env, **addresses}, partial(any_left, servers))


def problems_of_given_servers(job: Job) -> list[str]:
    config, rollout = job.config, job.allocation.rollout
    assert isinstance(config, PPOConfig)  # because `uses_given_servers` is true
    assert rollout is not None
    if job.allocation.shares_devices:
        return [
            f"{ADDRESSES_VARIABLE} is {job.given_servers!r}, and the allocation {job.allocation} starts its servers on the trainer's "
            "devices, awake: unset the variable"
        ]
    try:
        servers = servers_from_environment({ADDRESSES_VARIABLE: job.given_servers})
    except WrongServer as error:
        return [f"{ADDRESSES_VARIABLE}: {error}"]
    check = partial(
        problem_of, wire_of(job.allocation), served_model(config), rollout.world_size // rollout.data
    )
    with ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="query-servers") as threads:
        return [problem for problem in threads.map(check, servers) if problem]


def problem_of(wire: Wire, model: RunModel, num_devices: int, server: Server) -> str:
    """Return why a server cannot serve a model on so many devices; "" if it can."""
    try:
        identity = wire.ask_identity(server)
        wire.check_identity(server, identity, model)
        if (found := identity.num_devices) != num_devices:
            return (
                f"the server at {server.address} has {found} devices and the allocation has {num_devices} for "
                f"each server, which weight updates rely on: give an allocation with t{found}, as 'sglang:d1t{found}+fsdp:d1'"
            )
    except WrongServer as error:
        return str(error)
    except OSError as error:
        return (
            f"no inference server answers at {server.address}, which {ADDRESSES_VARIABLE} names ({error}): start one with "
            "areal-debug serve --model M --background, or unset the variable to let the run start its own"
        )
    return ""


def served_model(config: PPOConfig) -> RunModel:
    path = server_options(config, config.allocation).model
    if Path(path).is_dir():
        path = str(Path(path).resolve())  # a server may have another working directory
    return run_model(path, needs_adapters=serves_adapters(config))


def any_left(servers: list[RunningServer]) -> bool:
    """Return whether a server still runs; report and remove each that has ended."""
    for server in list(servers):
        try:
            server.check()
        except ServerFailed as failure:
            print(failure, file=sys.stderr, flush=True)
            servers.remove(server)
    return bool(servers)


def parse_environment(option: str, text: str) -> dict[str, str]:
    """Parse 'A=1,B=2' as a dict. Raises ConfigError."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    for name, equals, _ in pairs:
        if not equals or not name.strip().isidentifier():
            raise ConfigError(f"{option} is {text!r}; expected variables as 'A=1,B=2'")
    return {name.strip(): value.strip() for name, _, value in pairs}


def spec_of(config: BaseExperimentConfig, role: ProcessRole) -> RoleSpec:
    of_rollout = config.rollout.scheduling_spec if isinstance(config, PPOConfig) else None
    return role_spec(config.actor.scheduling_spec if role == "actor" else of_rollout, config.launcher, role)


@contextmanager
def following(log: Path) -> Iterator[None]:
    """Show a file as it is written, from its start, until the block ends; create it if missing."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    over = threading.Event()

    def follow(file: BinaryIO) -> None:
        last = False
        while not last:
            last = over.wait(POLL_S)  # a shared file system does not report changes
            try:
                sys.stdout.buffer.write(file.read())
                sys.stdout.buffer.flush()
            except BrokenPipeError:  # the reader of our output is gone; the run continues
                return

    with log.open("rb") as file:
        thread = threading.Thread(target=follow, args=(file,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
