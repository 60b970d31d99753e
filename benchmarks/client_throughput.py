"""Tokens per second of our SGLang client and executor, compared with a bare aiohttp load generator.

Starts a real SGLang server on the CPU with a tiny model, then runs the three in turn. Each keeps as
many requests in flight as a rollout does across training steps, until all are answered; the
executor returns them in batches. Prints one JSON line; the goal is a ratio of at least 0.98 for
both. On a busy machine the ratios are noise: there, the CPU time that each takes in this process
(`cpu_share`, relative to its wall time) shows its cost.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from areal_core.config import SGLangConfig
from areal_core.data.batch import Batch
from areal_core.launch.sglang_process import SGLangServer, cpu_environment, server_args
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import ModelRequest, Sampling, TokenSampler
from areal_core.rollout.workflow import episode_tensors
from areal_core.servers.client import FleetClient
from areal_core.servers.server import Server
from areal_core.servers.sglang import SGLANG
from areal_core.testing import make_tiny_model

GOAL = 0.98


def make_requests(num_requests: int, num_tokens: int) -> list[ModelRequest]:
    sampling = Sampling(max_new_tokens=num_tokens, ignore_eos=True)
    return [
        ModelRequest(input_ids=[10 + i % 80 + j % 7 for j in range(24)], sampling=sampling)
        for i in range(num_requests)
    ]


async def keep_in_flight(
    ask: Callable[[ModelRequest], Awaitable[int]], requests: list[ModelRequest], in_flight: int
) -> int:
    """Return the tokens of all answers, with `in_flight` requests in flight until none is left."""
    waiting = iter(requests)

    async def one_after_another() -> int:
        return sum([await ask(request) for request in waiting])

    return sum(await asyncio.gather(*(one_after_another() for _ in range(in_flight))))


async def run_bare(server: Server, requests: list[ModelRequest], in_flight: int) -> int:
    """Post the requests and count the tokens of the answers."""
    url = f"http://{server.address}/generate"

    async def ask(request: ModelRequest) -> int:
        payload = SGLANG.generate_payload(request.input_ids, request.sampling, request.num_new_tokens(), 0)
        async with session.post(url, json=payload) as reply:
            return json.loads(await reply.read())["meta_info"]["completion_tokens"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await keep_in_flight(ask, requests, in_flight)


async def run_client(server: Server, requests: list[ModelRequest], in_flight: int) -> int:
    """Send them through the client, which survives pauses, weight updates and dead servers."""
    client = FleetClient([server], SGLANG)

    async def ask(request: ModelRequest) -> int:
        return len((await client.agenerate(request)).output_tokens)

    num_tokens = await keep_in_flight(ask, requests, in_flight)
    await client.aclose()
    return num_tokens


class OneCompletion:
    """A workflow of one completion, without a reward."""

    async def arun_episode(self, engine: TokenSampler, data: dict[str, Any]) -> Batch:
        return episode_tensors(await engine.agenerate(data["request"]), 0.0)


class RequestFeed:
    """Returns the requests as rows of data."""

    def __init__(self, requests: list[ModelRequest]) -> None:
        self._rows = enumerate(requests)

    def take(self) -> tuple[int, dict[str, Any]]:
        prompt_id, request = next(self._rows)
        return prompt_id, {"request": request}


async def run_executor(server: Server, requests: list[ModelRequest], in_flight: int) -> int:
    """Run from rows to batches; in a thread, since the executor has its own event loop."""
    return await asyncio.to_thread(collect_batches, server, requests, in_flight)


def collect_batches(server: Server, requests: list[ModelRequest], in_flight: int) -> int:
    num_batches = len(requests) // in_flight
    control = StalenessControl(
        in_flight, in_flight, max_head_offpolicyness=num_batches, num_steps=num_batches
    )
    executor, feed, workflow = (
        Executor(FleetClient([server], SGLANG), control),
        RequestFeed(requests),
        OneCompletion(),
    )
    num_tokens = 0
    for version in range(num_batches):
        num_tokens += int(executor.prepare_batch(feed, workflow)["loss_mask"].sum())
        executor.set_version(version + 1)
    executor.close()
    return num_tokens


def measure(
    server: Server, rounds: int, requests: list[ModelRequest], in_flight: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return tokens per second and share of a core of each, per round; the order alternates."""
    arms = {"bare": run_bare, "client": run_client, "executor": run_executor}
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    shares: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        asyncio.run(arm(server, requests, in_flight))  # warm up
    for number in range(rounds):
        turn = number % len(arms)
        for name in [*arms][turn:] + [*arms][:turn]:
            began, cpu_began = time.perf_counter(), time.process_time()
            num_tokens = asyncio.run(arms[name](server, requests, in_flight))
            elapsed_s = time.perf_counter() - began
            speeds[name].append(num_tokens / elapsed_s)
            shares[name].append((time.process_time() - cpu_began) / elapsed_s)
        line = "  ".join(f"{name} {values[-1]:.0f}" for name, values in speeds.items())
        print(f"round {number + 1}/{rounds}, tokens/s: {line}", flush=True)
    return speeds, shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=256, help="a multiple of --in-flight")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        config = SGLangConfig(dtype="float32", context_length=1024, max_total_tokens=32768)
        log = Path(folder) / "llm_server_0.log"
        print("starting an SGLang server (half a minute)", flush=True)
        with SGLangServer(model, log, server_args(config, "cpu"), cpu_environment()) as running:
            speeds, shares = measure(
                running.server,
                options.rounds,
                make_requests(options.requests, options.tokens),
                options.in_flight,
            )
    # The median over rounds: in one round the machine is equally busy for all three.
    ratios = {
        name: median(ours / bare for ours, bare in zip(speeds[name], speeds["bare"], strict=True))
        for name in ("client", "executor")
    }
    result: dict[str, float] = {
        f"{name}_tokens_per_s": round(median(values)) for name, values in speeds.items()
    }
    result |= {f"{name}_cpu_share": round(median(values), 4) for name, values in shares.items()}
    result |= {f"{name}_ratio": round(ratio, 4) for name, ratio in ratios.items()}
    print(json.dumps({**result, "goal": GOAL, "reached": min(ratios.values()) >= GOAL}))


if __name__ == "__main__":
    main()
