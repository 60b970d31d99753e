"""Simulated servers: latencies, deaths, restarts and weight updates, without sockets.

    client.post -> one future per request                     set by
                     "done"   after its latency               a timer of the event loop
                     "abort"  with the tokens so far          a weight update
                     error    the connection is lost          the death of its server

Latencies are real sleeps, and not those of a virtual clock: a clock that jumps to the next timer
would not advance while callbacks compute, so that no amount of work could delay a reply or a tick.
Draws come from one seed. Deaths happen after given numbers of replies and not at given times, so
that every run of a seed has the same number of them.

A reply is the JSON of `/generate`, and a request is serialised as for a socket. What a socket adds
(HTTP, the kernel) is not simulated.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from areal_core.servers.connections import Connections
from areal_core.servers.server import Server

LATENCY_SIGMA = 0.3  # of the logarithm
NUM_DRAWS = 8192  # latencies, used in turn
SLOW_EVERY, SLOW_FACTOR = 16, 3.0  # one of 16 servers takes three times as long
NUM_FIRST_TOKENS, NUM_TOKENS = 2048, 4096  # completions count up from one of the first
ENTRIES = [f"[-{1 + token % 7 / 8},{token},null]" for token in range(NUM_TOKENS)]
DONE, ABORT = "done", "abort"


@dataclass(eq=False)
class SimulatedServer:
    """One server: the version of its weights, and the requests in flight."""

    server: Server
    factor: float  # of every latency
    version: str = "default"
    is_alive: bool = True
    in_flight: set["asyncio.Future[str]"] = field(default_factory=set)


class SimulatedFleet(Connections):
    """All servers, in place of connections to them.

    Used on one event loop, except `version_of`.

    Args:
        servers: their addresses, to which nothing is ever sent.
        seed: of latencies and of the choice of servers that die.
        median_s: median latency of a whole completion.
        num_prompt_tokens: length of every prompt; what follows in a request was sampled before.
        deaths: numbers of replies after which a server dies; the previous one starts again.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        seed: int,
        median_s: float,
        num_prompt_tokens: int,
        deaths: Sequence[int],
    ) -> None:
        self.num_replies = 0
        self._dice = random.Random(seed)
        self._latencies = [median_s * self._dice.lognormvariate(0, LATENCY_SIGMA) for _ in range(NUM_DRAWS)]
        self._num_requests = 0
        self._prompt = num_prompt_tokens
        self._deaths = sorted(deaths, reverse=True)
        self._dead: SimulatedServer | None = None
        self._by_address = {
            server: SimulatedServer(server, SLOW_FACTOR if i % SLOW_EVERY == SLOW_EVERY - 1 else 1.0)
            for i, server in enumerate(servers)
        }

    def version_of(self, server: Server) -> str | None:
        """Return the version of a server's weights; None while it is dead."""
        simulated = self._by_address[server]
        return simulated.version if simulated.is_alive else None

    async def update(self, version: int) -> None:
        """Load new weights on every living server; requests in flight are aborted."""
        for simulated in self._by_address.values():
            if simulated.is_alive:
                simulated.version = str(version)
                for reply in simulated.in_flight:
                    if not reply.done():
                        reply.set_result(ABORT)

    async def get(self, server: Server, path: str, timeout_s: float) -> bytes:
        """Return the reply to a query of the weight version."""
        version = self.version_of(server)
        if version is None:
            raise aiohttp.ClientConnectionError(f"connection refused by {server.address}")
        return json.dumps({"weight_version": version}).encode()

    def hang_up(self, server: Server) -> None:
        """End the requests that wait for a server."""
        fail_all(self._by_address[server])

    async def close(self) -> None:
        for simulated in self._by_address.values():
            fail_all(simulated)

    async def post(self, server: Server, path: str, payload: dict[str, Any]) -> bytes:
        """Return the reply to `/generate`. Raises `aiohttp.ClientError` where the server dies."""
        simulated, loop = self._by_address[server], asyncio.get_running_loop()
        if not simulated.is_alive:
            raise aiohttp.ClientConnectionError(f"connection refused by {server.address}")
        json.dumps(payload)  # the cost of the body that a socket would need
        num_new = payload["sampling_params"]["max_new_tokens"]
        num_sampled = len(payload["input_ids"]) - self._prompt
        latency_s = self._latencies[self._num_requests % NUM_DRAWS] * simulated.factor
        latency_s *= num_new / (num_new + num_sampled)  # the rest of one that was aborted
        self._num_requests += 1
        began, reply = loop.time(), loop.create_future()
        timer = loop.call_later(latency_s, settle, reply)
        simulated.in_flight.add(reply)
        version = simulated.version
        try:
            finish = await reply
        finally:
            timer.cancel()
            simulated.in_flight.discard(reply)
        if finish == ABORT:
            num_new = min(num_new - 1, int(num_new * (loop.time() - began) / latency_s))
        self.num_replies += 1
        if self._deaths and self.num_replies >= self._deaths[-1]:
            self._deaths.pop()
            self._next_death()
        first = first_token(payload["input_ids"][0]) + num_sampled
        return generate_reply(payload["rid"], first, num_new, version, finish)

    def _next_death(self) -> None:
        if self._dead is not None:
            self._dead.is_alive, self._dead.version = True, "default"
        living = [simulated for simulated in self._by_address.values() if simulated.is_alive]
        self._dead = self._dice.choice(living)
        self._dead.is_alive = False
        fail_all(self._dead)


def fail_all(simulated: SimulatedServer) -> None:
    for reply in simulated.in_flight:
        if not reply.done():
            reply.set_exception(aiohttp.ServerDisconnectedError())


def settle(reply: "asyncio.Future[str]") -> None:
    """End a request whose latency is over."""
    if not reply.done():
        reply.set_result(DONE)


def first_token(prompt_id: int) -> int:
    return prompt_id * 97 % NUM_FIRST_TOKENS


def generate_reply(rid: str, first: int, count: int, version: str, finish: str) -> bytes:
    """Return the JSON of `count` tokens, which count up from `first`."""
    entries = ",".join(ENTRIES[first : first + count])
    reason = "length" if finish == DONE else "abort"
    return (
        f'{{"text":"","meta_info":{{"id":"{rid}","finish_reason":{{"type":"{reason}"}},"completion_tokens":{count},'
        f'"weight_version":"{version}","output_token_logprobs":[{entries}]}}}}'
    ).encode()
