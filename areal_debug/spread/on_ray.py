"""Run tasks on Ray: at most as many at a time as it has CPUs for, lost ones again.

    driver                                              worker of Ray, one CPU a process of the task
    RAY_ADDRESS, or a Ray started here for the tasks
    submit, in order, while CPUs are free ────────────> run_there(): folder, variables, run_verb()
    waits for any task <───────────── outcome, or Ray's error: the worker or its node is gone
    the latter: submits it again, at most RETRIES times

A task never raises: whatever Ray raises is about the worker. A finished outcome is fetched at once,
so a node that ends later takes no result with it.
"""

import os
import socket
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of versions to come, at its import
    import ray
from ray.exceptions import RayError, RayTaskError

from areal_core.errors import ConfigError
from areal_core.launch.ray_cluster import cluster_resources, connected
from areal_debug.spread.tasks import Outcome, Task, run_verb

RETRIES = 2
FORWARDED = ("AREAL_DEBUG_", "HF_", "TOKENIZERS_", "OMP_NUM_THREADS")  # variables that tasks inherit


def run_on_ray(tasks: Sequence[Task], workers: int | None, tick: Callable[[object], None]) -> list[Outcome]:
    """Run the tasks on the Ray of RAY_ADDRESS, else on one that is started for them.

    Args:
        workers: tasks at a time; by default as many as there are CPUs for.
        tick: called after each task.

    Raises:
        ConfigError: there is no such cluster, or no node of it has the CPUs for a task.
    """
    num_cpus = max((task.num_cpus for task in tasks), default=1)
    address = os.environ.get("RAY_ADDRESS")
    own_cpus = max(num_cpus, num_cpus * workers if workers else os.cpu_count() or 1)
    # Ray prints of lost workers on standard output, which has the report.
    with redirect_stdout(sys.stderr), connected(address or "local", None if address else own_cpus):
        check_nodes(num_cpus)
        at_a_time = workers or max(1, int(cluster_resources()["CPU"]) // num_cpus)
        return run_submitted(tasks, at_a_time, tick)


def check_nodes(num_cpus: int) -> None:
    """Raise ConfigError if no node has the CPUs for a task, which would wait indefinitely."""
    nodes: Any = ray.nodes  # Ray leaves it without annotations
    largest = max((node["Resources"].get("CPU", 0) for node in nodes() if node["Alive"]), default=0)
    if largest < num_cpus:
        raise ConfigError(
            f"a task needs {num_cpus} CPUs, one a rank, and the largest node of the Ray cluster has {largest:g}: "
            "use a larger node, or fewer ranks with --nproc"
        )


def run_submitted(tasks: Sequence[Task], at_a_time: int, tick: Callable[[object], None]) -> list[Outcome]:
    start: Any = ray.remote(run_there)
    environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    waiting = deque(range(len(tasks)))
    running: dict[Any, int] = {}
    outcomes: dict[int, Outcome] = {}
    num_lost: Counter[int] = Counter()
    while waiting or running:
        while waiting and len(running) < at_a_time:
            number = waiting.popleft()
            task = tasks[number]
            submitted = start.options(num_cpus=task.num_cpus, max_retries=0).remote(
                task.arguments, os.getcwd(), seen_here(task.arguments), environment
            )
            running[submitted] = number
        [ended], _ = ray.wait([*running])
        number = running.pop(ended)
        try:
            outcome = ray.get(ended)
        except RayTaskError as error:  # the worker cannot load this package, or not this version
            outcome = Outcome(2, error=f"a worker of Ray cannot run it: {error.cause}")
        except RayError as error:
            num_lost[number] += 1
            if num_lost[number] <= RETRIES:
                waiting.appendleft(number)
                continue
            outcome = Outcome(2, error=f"its worker died {RETRIES + 1} times ({type(error).__name__})")
            num_lost[number] = RETRIES
        outcomes[number] = replace(outcome, num_retries=num_lost[number])
        tick(tasks[number])
    return [outcomes[number] for number in range(len(tasks))]


def seen_here(arguments: Sequence[str]) -> list[str]:
    values = [argument.partition("=")[2] if argument.startswith("--") else argument for argument in arguments]
    return [os.path.abspath(value) for value in values if value and os.path.exists(value)]


def run_there(
    arguments: Sequence[str], folder: str, needed: Sequence[str], environment: Mapping[str, str]
) -> Outcome:
    missing = [path for path in needed if not os.path.exists(path)]
    if missing:
        return Outcome(
            2,
            error=f"node {socket.gethostname()} does not see {missing[0]}: put it into a folder that all nodes "
            "share, or give the URL of an archive",
        )
    if os.path.isdir(folder):
        os.chdir(folder)
    os.environ.update(environment)
    return run_verb(arguments)
