"""The rollout client against 8, 64 and 512 simulated servers: what was lost, doubled or slow.

The executor, the client and its router run in one process; servers differ in speed, die, restart
with old weights and get new ones ten times. Each row of the table is the run with the median lag.

main thread                              event loop thread
Executor.prepare_batch  <--------------- Pipeline -> workflow -> client -> router -> SimulatedFleet
counts rows, checks tokens and versions  a task that ticks every 10 ms: its delay is the lag
new version: fleet, client, executor --> requests in flight are aborted and sent again
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from areal_core.data import PromptLoader
from areal_core.data.batch import Batch
from areal_core.rollout.loop_thread import short_collections
from areal_core.rollout.pipeline import Executor, PromptFeed
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import Sampling
from areal_core.servers.client import FleetClient
from areal_core.servers.server import Server
from areal_core.servers.sglang import SGLANG
from areal_core.testing import TokensWorkflow
from areal_debug.agent.loop_monitor import running_time
from benchmarks.harness import read_options
from benchmarks.rollout_fleet import SimulatedFleet, first_token

SIZES = ((8, 10_000), (64, 50_000), (512, 50_000))  # servers, requests
MEDIAN_LATENCY_S = 4.0  # of a completion
TICK_S = 0.01
NUM_VERSIONS = 10  # batches of a simulation, and weight updates between them
GROUP = 4  # samples of a prompt
STALENESS = 2  # the bound; three batches are in flight
NUM_PROMPT_TOKENS = 64
MAX_NEW_TOKENS = 64
SAMPLING = Sampling(max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)


class SimulatedClient(FleetClient):
    """The client of a run, whose servers are simulated."""

    def __init__(self, servers: Sequence[Server], fleet: SimulatedFleet) -> None:
        super().__init__(servers, SGLANG, retry_delay_s=0.05, knows_versions=True, connect=lambda _: fleet)
        self._fleet = fleet

    def _ask_version(self, server: Server) -> str | None:
        return self._fleet.version_of(server)


class LoopLag:
    """The delays of a task that ticks on an event loop."""

    def __init__(self) -> None:
        self.max_s = 0.0

    async def tick(self, threads: Sequence[threading.Thread]) -> None:
        """Tick until cancelled. While one of `threads` waits for a core, the others wait for it."""
        while True:
            began, began_waits = time.monotonic(), waits_for_cores(threads)
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - began - TICK_S
            self.max_s = max(self.max_s, late_s - (waits_for_cores(threads) - began_waits))


def waits_for_cores(threads: Sequence[threading.Thread]) -> float:
    """Return the seconds for which these threads were ready and had no core, in total."""
    return sum(time.monotonic() - running_time(thread) for thread in threads)


class Ledger:
    """Counts the rows of every batch."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[int, int]] = Counter()
        self.oldest_version_lag = 0

    def count(self, batch: Batch, version: int) -> None:
        """Count the rows that are trained on at `version`; one with wrong tokens is none."""
        tokens, mask = batch["input_ids"], batch["loss_mask"] != 0
        assert bool(mask.any())
        lag = version - int(batch["versions"][mask].min())
        self.oldest_version_lag = max(self.oldest_version_lag, lag)
        for row in range(len(tokens)):
            prompt_id = int(batch["prompt_id"][row])
            first = first_token(prompt_id)
            wanted = torch.arange(first, first + MAX_NEW_TOKENS, dtype=tokens.dtype)
            if int(tokens[row, 0]) == prompt_id and torch.equal(tokens[row][mask[row]], wanted):
                self.rows[prompt_id, int(batch["sample_id"][row])] += 1


def simulate(num_servers: int, num_requests: int, seed: int, median_latency_s: float) -> dict[str, float]:
    """Run one simulation; return its row.

    Args:
        num_requests: samples, rounded up to a multiple of those of all batches; one that is aborted
            or loses its server is several replies.
    """
    servers = [Server(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}:30000") for i in range(num_servers)]
    batch_size = -(-num_requests // (NUM_VERSIONS * GROUP))
    num_requests = batch_size * NUM_VERSIONS * GROUP
    num_deaths = min(num_servers // 2, 2 * NUM_VERSIONS)
    deaths = [num_requests * (i + 1) // (num_deaths + 1) for i in range(num_deaths)]
    fleet = SimulatedFleet(servers, seed, median_latency_s, NUM_PROMPT_TOKENS, deaths)
    client = SimulatedClient(servers, fleet)
    control = StalenessControl(batch_size, (STALENESS + 1) * batch_size, STALENESS, num_steps=NUM_VERSIONS)
    executor = Executor(client, control)
    lag, ledger = LoopLag(), Ledger()
    ticking = executor.loop.submit(lag.tick((executor.loop.thread, threading.main_thread())))
    cpu_began = time.process_time()
    try:
        rows = [{"tokens": [i, *range(NUM_PROMPT_TOKENS - 1)]} for i in range(batch_size * NUM_VERSIONS)]
        feed = PromptFeed(PromptLoader(rows, batch_size, shuffle=False))
        workflow = TokensWorkflow(SAMPLING)
        for version in range(NUM_VERSIONS):
            ledger.count(executor.prepare_batch(feed, workflow, n_samples=GROUP), version)
            executor.loop.run(fleet.update(version + 1))
            client.set_version(version + 1)
            executor.set_version(version + 1)
    finally:
        cpu_s = time.process_time() - cpu_began
        ticking.cancel()
        executor.close()
    expected = {(prompt, sample) for prompt in range(batch_size * NUM_VERSIONS) for sample in range(GROUP)}
    return {
        "servers": num_servers,
        "requests": num_requests,
        "max_lag_ms": 1000 * lag.max_s,
        "cpu_s": cpu_s,
        "requests_per_s": num_requests / cpu_s,
        "lost": len(expected - ledger.rows.keys()),
        "doubled": sum(count > 1 for count in ledger.rows.values()) + len(ledger.rows.keys() - expected),
        "oldest_version_lag": ledger.oldest_version_lag,
    }


def measure(servers: int, requests: int, seed: int) -> dict[str, Any]:
    """Run one simulation in a process of its own: its peak memory is that of the process."""
    command = [sys.executable, "-m", "benchmarks.rollout_scale", "--one", f"{servers},{requests},{seed}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    options = read_options(__doc__, rounds=3, one="")
    if options.one:
        servers, requests, seed = map(int, options.one.split(","))
        with short_collections():
            print(json.dumps(simulate(servers, requests, seed, MEDIAN_LATENCY_S)))
        return
    for number, (servers, requests) in enumerate(SIZES):
        rounds = [measure(servers, requests, seed) for seed in range(1, options.rounds + 1)]
        median = sorted(rounds, key=lambda facts: facts["max_lag_ms"])[len(rounds) // 2]
        if number == 0:
            print("| " + " | ".join(median) + " |\n|" + "---|" * len(median))
        print("| " + " | ".join(f"{value:,.4g}" for value in median.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
