"""Servers are killed at random moments and others join: no sample is lost or doubled."""

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.launch.sglang_process import SGLangServer
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.servers.client import FleetClient
from areal_core.servers.discovery import Discovery, FolderNames, register_server
from areal_core.servers.identity import run_model
from areal_core.servers.pool import ServerPool
from areal_core.servers.server import Server
from areal_core.servers.sglang import SGLANG
from areal_core.servers.verification import WeightCheck
from areal_core.servers.weight_update import BroadcastUpdate, DiskUpdate, WeightUpdate
from areal_core.servers.wire import ASK_TIMEOUT_S, weight_version

NUM_TOKENS = 40


class Weights:
    """A model's tensors, a little different after each `change`."""

    def __init__(self, path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def __iter__(self):
        return iter([(name, p.detach()) for name, p in self.model.named_parameters()])

    @torch.no_grad()
    def change(self) -> None:
        for parameter in self.model.parameters():
            parameter.mul_(1.001)


class Run:
    """A trainer's use of servers, without training: requests and weight updates."""

    def __init__(
        self,
        start_server,
        tiny_model,
        tmp_path,
        kind: str,
        num_servers: int,
        ask_timeout_s: float = ASK_TIMEOUT_S,
    ) -> None:
        self.start_server = start_server
        self.names = FolderNames(tmp_path / "names")
        self.processes = [start_server() for _ in range(num_servers)]
        for process in self.processes:
            self.register(process)
        servers = [process.server for process in self.processes]
        discovery = Discovery((), self.names, "exp", "trial")
        options = {"discovery": discovery, "pause_mode": "abort"}
        self.client = FleetClient(
            servers,
            SGLANG,
            num_retries=2,
            retry_delay_s=0.02,
            health_interval_s=0.2,
            health_timeout_s=ask_timeout_s,
            server_wait_s=30.0,
            **options,
        )
        self.pool = ServerPool(
            servers,
            SGLANG,
            600.0,
            model=run_model(str(tiny_model)),
            watch_every_s=0.2,
            ask_timeout_s=ask_timeout_s,
            **options,
        )
        check = WeightCheck(every=1)
        self.weight_update: WeightUpdate = (
            DiskUpdate(self.pool, tmp_path / "update", tiny_model, check=check)
            if kind == "disk"
            else BroadcastUpdate(self.pool, "gloo", bucket_bytes=100_000, timeout_s=300.0, check=check)
        )
        self.weights = Weights(tiny_model)
        self.version = 0
        self.answers: Counter[int] = Counter()
        self.responses: list[ModelResponse] = []
        self.stopping = threading.Event()
        self.thread = LoopThread("requests")

    def register(self, process) -> None:
        register_server(self.names, "exp", "trial", process.wait_until_ready().server.address)

    def start_requests(self, concurrency: int) -> Future[int]:
        """Sample in `concurrency` tasks until `stopping`; return the number of prompts."""
        return self.thread.submit(self._requests(concurrency))

    async def _requests(self, concurrency: int) -> int:
        prompts = iter(range(10**9))
        requested = Counter()

        async def sample_sequentially() -> None:
            while not self.stopping.is_set():
                prompt = next(prompts)
                requested[prompt] += 1
                request = ModelRequest(
                    input_ids=[10 + prompt % 80, 11, 12],
                    sampling=Sampling(max_new_tokens=NUM_TOKENS, ignore_eos=True),
                    metadata={"prompt_id": prompt // 4, "sample_id": prompt % 4},
                )
                self.responses.append(await self.client.agenerate(request))
                self.answers[prompt] += 1

        await asyncio.gather(*(sample_sequentially() for _ in range(concurrency)))
        return len(requested)

    def update_weights(self) -> None:
        self.weights.change()
        self.version += 1
        self.weight_update.send(self.weights, self.version)
        self.client.set_version(self.version)

    def close(self) -> None:
        self.stopping.set()
        self.client.close()
        self.weight_update.close()
        self.thread.close()


@pytest.fixture
def start_run(start_server, tiny_model, tmp_path):
    runs = []

    def start(kind: str, num_servers: int = 2, servers=start_server, **options) -> Run:
        runs.append(Run(servers, tiny_model, tmp_path, kind, num_servers, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def kill_and_replace(run: Run, dice: random.Random) -> None:
    """Kill one of two at a random moment, start another, and update weights until it has joined."""
    victim = run.processes.pop(dice.randrange(2))
    run.processes.append(run.start_server())
    killing = threading.Timer(dice.uniform(0, 0.15), victim.kill)
    killing.start()
    run.update_weights()
    killing.join()
    run.register(run.processes[-1])
    run.update_weights()
    assert set(run.client.router.servers) == {process.server for process in run.processes}


def assert_every_prompt_answered_once(run: Run, requests: Future[int]) -> None:
    run.stopping.set()
    requested = requests.result(60)
    assert requested > 20
    assert run.answers == Counter(range(requested))
    for response in run.responses:
        assert len(response.output_tokens) == len(response.output_logprobs) == NUM_TOKENS
        assert response.output_versions == sorted(response.output_versions)
        assert response.output_versions[-1] <= run.version


def assert_kills_lose_nothing(run: Run, num_kills: int, seed: int) -> None:
    dice = random.Random(seed)
    requests = run.start_requests(concurrency=8)
    for _ in range(num_kills):
        kill_and_replace(run, dice)
    assert_every_prompt_answered_once(run, requests)
    assert run.version == 2 * num_kills
    assert any(len(set(response.output_versions)) > 1 for response in run.responses)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "seed"), [("disk", 3), ("broadcast", 4)])
def test_twenty_kills_lose_nothing(start_run, kind, seed):
    assert_kills_lose_nothing(start_run(kind), num_kills=20, seed=seed)


def assert_a_hung_server_is_left_out(run: Run, within_s: float, delay_s: float, caplog) -> None:
    """Stop one of two during a weight update; it is updated before it serves again."""
    requests, victim = run.start_requests(concurrency=8), run.processes[1]
    run.update_weights()
    stopping = threading.Timer(delay_s, victim.stop)
    stopping.start()
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        while victim.server in run.client.router.servers:
            run.update_weights()
        assert time.monotonic() - begin < within_s
        seen = len(run.responses)
        while len(run.responses) < seen + 8:
            time.sleep(0.01)
        assert time.monotonic() - begin < within_s
        stopping.join()
        old = weight_version(run.processes[0].server, SGLANG)
        victim.go_on()
        while victim.server not in run.client.router.servers:
            run.update_weights()
        assert int(weight_version(victim.server, SGLANG)) > int(old)
    named = [m for m in caplog.messages if m.startswith(f"inference server hung: {victim.server.address}")]
    assert len(named) == 1
    assert_run_continues(run, requests)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["disk", "broadcast"])
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_a_hung_server_delays_neither_requests_nor_updates(start_run, caplog, kind, delay_s):
    run = start_run(kind, ask_timeout_s=0.5)
    assert_a_hung_server_is_left_out(run, within_s=15.0, delay_s=delay_s, caplog=caplog)


class SGLangProcess:
    """A real SGLang server on the CPU, with the interface that `Run` needs."""

    def __init__(self, started: SGLangServer) -> None:
        self.started = started
        self.server = Server(started.server.address)

    def wait_until_ready(self) -> "SGLangProcess":
        self.started.wait_until_ready()
        return self

    def kill(self) -> None:
        os.killpg(self.started.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        os.killpg(self.started.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.started.process.pid, signal.SIGCONT)


@pytest.fixture
def start_sglang(tiny_model, sglang):
    with ExitStack() as started:

        def start() -> SGLangProcess:
            server = sglang(tiny_model, max_total_tokens=8192)
            started.callback(server.stop)
            return SGLangProcess(server)

        yield start


@pytest.mark.long
@pytest.mark.sglang
def test_kills_of_real_sglang_servers_lose_nothing(start_sglang, start_run):
    run = start_run("broadcast", servers=start_sglang)
    assert_kills_lose_nothing(run, num_kills=2, seed=6)


@pytest.mark.long
@pytest.mark.sglang
@pytest.mark.parametrize("kind", ["disk", "broadcast"])
def test_a_real_sglang_server_that_hangs_delays_nothing(start_sglang, start_run, caplog, kind):
    run = start_run(kind, servers=start_sglang)
    assert_a_hung_server_is_left_out(run, within_s=20.0, delay_s=0.1, caplog=caplog)


@pytest.mark.long
def test_a_server_that_is_restarted_at_its_address_gets_the_weights_again(start_run):
    run = start_run("broadcast")  # by disk: the schedules of `chaos`
    requests = run.start_requests(concurrency=4)
    run.update_weights()
    run.processes[0].kill()
    again = run.start_server(run.processes[0].server).wait_until_ready()
    run.update_weights()
    assert {process.server for process in run.processes} == set(run.client.router.servers)
    assert weight_version(again.server, SGLANG) == "2"
    assert_run_continues(run, requests)


@pytest.mark.long
def test_when_all_servers_have_died_requests_wait_for_one_that_joins(start_run):
    run = start_run("disk", num_servers=1)
    requests = run.start_requests(concurrency=2)
    run.processes.pop().kill()
    run.register(run.start_server())  # version 0 is what it starts with
    while not run.responses:
        threading.Event().wait(0.01)
    assert_run_continues(run, requests)


def assert_run_continues(run: Run, requests: Future[int]) -> None:
    seen = len(run.responses)
    while len(run.responses) < seen + 20 and not requests.done():
        threading.Event().wait(0.01)
    assert_every_prompt_answered_once(run, requests)
