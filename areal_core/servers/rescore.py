"""A second server's log-probs of some completions: finds a server whose numbers are wrong.

The reply rules (`reply.py`) find what cannot be right. A server with other weights, or a faulty
kernel, answers with log-probs that are finite and wrong; only another server shows that. A third
one decides which of the two is wrong; without a third the difference is reported and neither is
quarantined.
"""

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable

import aiohttp

from areal_core.rollout.errors import MalformedReply, RequestRefused
from areal_core.rollout.types import ModelRequest, ModelResponse
from areal_core.servers.health import Health
from areal_core.servers.reply import Scored
from areal_core.servers.server import Server

# Mean absolute difference in nats. Servers in bfloat16 with other batches differ by up to 0.02.
TOLERANCE = 0.1
logger = logging.getLogger(__name__)
Score = Callable[[Server, ModelRequest, list[int], int], Awaitable[Scored]]


class Rescorer:
    """Compares servers on a share of the completions.

    Args:
        share: of the completions, 0 to 1.
        score: returns a server's log-probs of tokens after a request's prompt, at temperature 1;
            the last argument is the version, of the adapter where adapters are served.
        health: knows the servers, and takes the counts.
        reject: called with a server that is wrong, a rule and the evidence.
    """

    def __init__(
        self, share: float, score: Score, health: Health, reject: Callable[[Server, str, str], None]
    ) -> None:
        self.share = share
        self._score = score
        self._health = health
        self._reject = reject
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_supported = True

    def start(self, req: ModelRequest, response: ModelResponse, server: Server) -> None:
        """Compare one completion in the background, if it is of the share."""
        drawn = zlib.crc32(repr(sorted(req.metadata.items())).encode()) / 2**32
        if drawn < self.share and self._is_supported and response.output_tokens:
            task = asyncio.create_task(self._compare(req, response, server))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the comparisons that run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _compare(self, req: ModelRequest, response: ModelResponse, server: Server) -> None:
        try:
            await self._judge(req, response, server)
        except RequestRefused as refused:
            self._is_supported = False
            logger.warning("rollout.rescore_share has no effect, the server cannot score: %s", refused)
        except (aiohttp.ClientError, TimeoutError, MalformedReply):
            return  # the health task finds out whether the server is gone

    async def _judge(self, req: ModelRequest, response: ModelResponse, server: Server) -> None:
        tokens, version = response.output_tokens, response.output_versions[-1]
        others = [other for other in self._health.serving() if other != server][:2]
        if not others or min(response.output_versions) != version:
            return  # tokens of two versions have no one distribution
        sampled = Scored(response.output_logprobs, version)
        if has_other_distribution(req):
            sampled = await self._score(server, req, tokens, version)
        first = await self._score(others[0], req, tokens, version)
        if not sampled.version == first.version == version:
            return  # a weight update came between
        self._health.rescored += 1
        if (gap := distance(sampled, first)) <= TOLERANCE:
            return
        self._health.disagreed += 1
        num_tokens = len(first.logprobs)
        text = f"{gap:.3g} nats from {{}} in the mean over {num_tokens} tokens of the same row"
        if len(others) < 2:
            logger.warning(
                "inference servers disagree: the log-probs of %s are %s; a third server would show "
                "which is wrong",
                *(server.address, text.format(others[0].address)),
            )
            return
        second = await self._score(others[1], req, tokens, version)
        if second.version != version:
            return
        if distance(first, second) <= TOLERANCE:
            self._reject(server, "rescored", text.format("those of two other servers"))
        elif distance(sampled, second) <= TOLERANCE:
            self._reject(others[0], "rescored", text.format("those of two other servers"))


def has_other_distribution(req: ModelRequest) -> bool:
    sampling = req.sampling
    is_penalized = sampling.frequency_penalty != 0.0 or bool(sampling.server_only)
    return sampling.greedy or sampling.temperature != 1.0 or is_penalized


def distance(one: Scored, other: Scored) -> float:
    """Return the mean absolute difference in nats."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return sum(abs(x - y) for x, y in pairs) / len(one.logprobs)
