"""A real training run behind fault proxies: servers and ranks are processes.

    server process x N <-- FaultProxy x N (threads here) <-- ranks (torchrun) --> record
                                 |                                                  |
                              replies ----------------> check_history <-------- rows

The faults end after the given time. Then training must make progress again, and is ended.
"""

import importlib.util
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.config import GRPOConfig, load_expr_config
from areal_core.config.loading import read_yaml
from areal_core.environment import ADDRESSES_VARIABLE, DETERMINISTIC
from areal_core.errors import ConfigError
from areal_core.launch.job import NCCL_WITH_SERVERS, Job
from areal_core.launch.local import device_of
from areal_core.launch.placement import ServerPlan, plan_servers
from areal_core.launch.processes import Child, end_tree, find_members, send, start
from areal_core.launch.sglang_process import SGLangServer
from areal_core.launch.torchrun import rank_command, rank_environment
from areal_core.servers.server import last_lines
from areal_debug.chaos.faults import Durations, make_schedule
from areal_debug.chaos.history import Plan, TrainedRow, Violations, check_history
from areal_debug.chaos.proxy import FaultProxy
from recorder import open_record

EMBEDDED = "areal_core.embedded.http_server"
MISSING = "???"
REQUEST_TIMEOUT_S = 10.0
PROGRESS_STEPS, PROGRESS_S = 2, 90.0  # after the faults have ended
READY_S = 600.0  # until the first step: servers and ranks start
POLL_S = 0.5
NEVER = 10**6  # steps and epochs: the time ends the run
DURATIONS = Durations(delay=(0.1, 2.0), late=REQUEST_TIMEOUT_S + 2, stop=(2.0, 20.0), restart=(1.0, 6.0))
REQUESTS_A_SERVER = 100_000  # more than a run of some minutes sends


@dataclass
class ChaosReport:
    """What a run went through, and what is wrong with what it trained on."""

    seed: int
    engine: str
    minutes: float
    steps: int
    rows: int
    replies: int
    injected: Counter[str]
    violations: Violations
    record: str
    log: str
    rank_output: str = field(default="", repr=False)  # the end of it, of a run that ended early

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as JSON types."""
        return {
            **{
                name: getattr(self, name)
                for name in ("seed", "engine", "minutes", "steps", "rows", "replies")
            },
            "injected": dict(sorted(self.injected.items())),
            **self.violations.counts(),
            "violations": vars(self.violations),
            "record": self.record,
            "log": self.log,
        }


class ServerProcess:
    """An inference server in a process of its own; a `FaultyServer`."""

    def __init__(self, plan: ServerPlan, module: str) -> None:
        self._plan, self._module = plan, module
        self._running = self._start(0)
        self.server = self._running.server

    def _start(self, port: int) -> SGLangServer:
        plan = self._plan
        return SGLangServer(
            plan.model_path,
            Path(plan.log),
            plan.args,
            plan.env,
            port=port,
            ready_timeout_s=plan.ready_timeout_s,
            module=self._module,
        )

    def wait_until_ready(self) -> None:
        """Wait until it answers. Raises `ServerFailed`."""
        self._running.wait_until_ready()

    def kill(self) -> None:
        """Send SIGKILL to all its processes."""
        self._signal(signal.SIGKILL)
        self._running.process.wait()

    def restart(self) -> None:
        """Start it again at its port."""
        self._running = self._start(int(self.server.address.rpartition(":")[2]))
        self.wait_until_ready()

    def stop(self) -> None:
        """Send SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def proceed(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self.proceed()
        self._running.stop()

    def _signal(self, number: int) -> None:
        for member in find_members(self._running.process):
            send(member, number)


def chaos_arguments(config_file: str, overrides: Sequence[str], output: Path, num_servers: int) -> list[str]:
    """Return the arguments of the training script. A model that the file does not name is tiny.

    Raises:
        ConfigError: the file cannot be read.
    """
    tree = read_yaml(config_file)
    options = [f"cluster.name_resolve.nfs_record_root={output}/names", f"cluster.fileroot={output}/runs"]
    if tree.get("actor", {}).get("path", MISSING) == MISSING and not names_option(overrides, "actor.path"):
        options.append(f"actor.path={tiny_model(output)}")
    own = ["--config", config_file, *options, *overrides]
    train = load_expr_config(own, GRPOConfig)[0].allocation.train
    if train is None:
        raise ConfigError(f"{config_file} has no training part in its allocation: add one, such as fsdp:d2")
    last = [
        f"allocation_mode=sglang:d{num_servers}+{train}",
        f"rollout.request_timeout={REQUEST_TIMEOUT_S:g}",
        f"total_train_steps={NEVER}",
        f"total_train_epochs={NEVER}",
        "debug.dump_rollout_data=true",
        f"debug.path={output}/record",
    ]
    return [*own, *last]


def names_option(overrides: Sequence[str], name: str) -> bool:
    return any(override.partition("=")[0].lstrip("+") == name for override in overrides)


def tiny_model(output: Path) -> Path:
    from transformers.utils import logging

    from areal_core.testing import make_tiny_model

    logging.disable_progress_bar()
    return make_tiny_model(output / "model")


def make_plans(config: GRPOConfig, output: Path, engine: str) -> tuple[list[ServerPlan], str]:
    """Return how to start each server, and the module that serves.

    Raises:
        ConfigError: SGLang is wanted and not installed.
    """
    job = Job((), config, config.allocation, {}, output)
    plans = plan_servers(job, device_of(config), share_devices=True)
    if engine == "sglang":
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError("--backend sglang needs SGLang: pip install 'areal-debug[sglang]'")
        return plans, "sglang.launch_server"
    args = ["--dtype", config.actor.dtype]
    return [replace(plan, args=[*args, "--random-seed", str(i)]) for i, plan in enumerate(plans)], EMBEDDED


def run_chaos(
    arguments: Sequence[str],
    output: Path,
    minutes: float,
    seed: int,
    engine: str,
    kinds: tuple[str, ...],
    report: Callable[[str], None],
) -> ChaosReport:
    """Run a training with faults for some minutes and check it.

    Args:
        arguments: of `chaos_arguments`.
        kinds: of the faults.
        report: gets a line of progress from time to time.

    Raises:
        ConfigError: the options do not agree.
        ServerFailed: a server does not start.
    """
    config = load_expr_config(list(arguments), GRPOConfig)[0]
    plans, module = make_plans(config, output, engine)
    schedule = make_schedule(seed, len(plans), REQUESTS_A_SERVER, DURATIONS, kinds)
    log = output / "trainer.log"
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(ServerProcess(plan, module))) for plan in plans]
        for server in servers:
            server.wait_until_ready()
        proxies = [
            stack.enter_context(
                closing(FaultProxy(server, f"server {i}", [f for f in schedule if f.server == i]))
            )
            for i, server in enumerate(servers)
        ]
        report(f"{len(servers)} servers are ready, with a fault proxy before each; starting the ranks")
        env = {
            **DETERMINISTIC,
            **NCCL_WITH_SERVERS,
            ADDRESSES_VARIABLE: ",".join(proxy.server.address for proxy in proxies),
        }
        ranks = start_ranks(arguments, config, env, log)
        stack.callback(end_tree, ranks)
        ended = watch(ranks, proxies, output / "record", minutes, report)
        end_tree(ranks)
    replies = [reply for proxy in proxies for reply in proxy.replies]
    rows = recorded_rows(output / "record") if count_steps(output / "record") else []
    violations = check_history(rows, replies, plan_of(config))
    violations.ended += [ended] if ended else []
    return ChaosReport(
        seed,
        engine,
        minutes,
        len({row.step for row in rows}),
        len(rows),
        len(replies),
        sum((proxy.injected for proxy in proxies), Counter[str]()),
        violations,
        str(output / "record"),
        str(log),
        last_lines(log, 12) if ended else "",
    )


def start_ranks(arguments: Sequence[str], config: GRPOConfig, env: dict[str, str], log: Path) -> Child:
    """Start the ranks under torchrun; their output goes to a file."""
    train = config.allocation.train
    assert train is not None  # `chaos_arguments` has checked it
    command = rank_command(["-m", "areal_debug.chaos.chaos_script", *arguments], train.world_size)
    with log.open("wb") as file:
        return start(command, rank_environment(env, log.parent), file)


def watch(
    ranks: Child,
    proxies: Sequence[FaultProxy],
    record: Path,
    minutes: float,
    report: Callable[[str], None],
) -> str:
    """Wait for the end of the time, and for progress after the faults; return what went wrong."""
    began, lines = time.monotonic(), 0

    def wait_for(num_steps: int, limit_s: float) -> bool:
        nonlocal lines
        deadline = time.monotonic() + limit_s
        while count_steps(record) < num_steps and time.monotonic() < deadline:
            if ranks.poll() is not None:
                return False
            if (seconds := time.monotonic() - began) > 15 * (lines + 1):
                lines = int(seconds // 15)
                injected = sum(proxy.injected.total() for proxy in proxies)
                report(f"{seconds:.0f} s: {count_steps(record)} steps, {injected} faults")
            time.sleep(POLL_S)
        return ranks.poll() is None

    if not wait_for(1, READY_S) or not wait_for(NEVER, 60 * minutes):
        return f"the ranks ended with exit code {ranks.returncode} after {count_steps(record)} steps"
    if not count_steps(record):
        return f"no step in {READY_S:.0f} s"
    for proxy in proxies:
        proxy.end_faults()
    wanted = count_steps(record) + PROGRESS_STEPS
    report(f"the faults have ended after {wanted - PROGRESS_STEPS} steps; waiting for {PROGRESS_STEPS} more")
    if not wait_for(wanted, PROGRESS_S):
        return f"the ranks ended with exit code {ranks.returncode} after the faults had ended"
    if count_steps(record) < wanted:
        return f"no {PROGRESS_STEPS} steps in the {PROGRESS_S:.0f} s after the faults had ended"
    return ""


def count_steps(record: Path) -> int:
    """Return the number of committed steps."""
    return len(list((record / "steps").glob("*/step.json")))


def plan_of(config: GRPOConfig) -> Plan:
    from areal_core.data import get_dataset
    from areal_core.data.loader import PromptOrder

    data = config.train_dataset
    order = PromptOrder(len(get_dataset(data)), data.batch_size, data.shuffle, config.seed, data.drop_last)
    return Plan(
        data.batch_size,
        config.gconfig.n_samples,
        config.rollout.max_head_offpolicyness,
        order.rows_per_epoch,
    )


def recorded_rows(record: Path) -> list[TrainedRow]:
    """Return the rows of every committed step."""
    opened, rows = open_record(record), []
    for step in opened.steps:
        recorded = opened.step(step)
        for rank in range(recorded.manifest.num_ranks):
            batch = recorded.batch(rank)
            for i, (begin, end) in enumerate(pairwise(batch["cu_seqlens"])):
                rows.append(
                    TrainedRow(
                        step,
                        int(batch["prompt_id"][i]),
                        int(batch["sample_id"][i]),
                        batch["input_ids"][begin:end].astype(np.int64),
                        batch["loss_mask"][begin:end] != 0,
                        batch["logprobs"][begin:end],
                        batch["versions"][begin:end],
                    )
                )
    return rows
