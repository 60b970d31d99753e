"""What can be certified: the embedded engine in this process, and servers."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import aiohttp
import numpy as np
import torch
from torch import Tensor

from areal_core.embedded.generate import generate
from areal_core.embedded.replica import Replica
from areal_core.rollout.types import Sampling
from consistency.engine.connect import connect, gather_limited
from consistency.engine.http import HttpClient, base_url, open_session
from consistency.engine.reply import Engine, SamplingParams
from consistency.errors import EngineError
from consistency.live import Vocabulary


@dataclass(frozen=True)
class Request:
    """A prompt, and a seed where the engine has seeds."""

    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class Completed:
    """Sampled tokens with the log-probs that the engine reported, and its cached tokens."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int | None


class Target(Protocol):
    """An engine. Every call raises `EngineError` if it cannot be made."""

    facts: dict[str, str | None]
    vocabulary_size: int

    def sample(self, requests: Sequence[Request], batch_size: int, max_new_tokens: int) -> list[Completed]:
        """Sample at temperature 1, at most `batch_size` requests at a time."""
        ...

    def flush(self) -> bool:
        """Empty the prefix cache; return whether the engine did."""
        ...


class EmbeddedTarget:
    """The embedded engine with `attn_impl=batch_invariant`, or the fast one to compare with it."""

    def __init__(self, path: str, dtype: str, *, is_invariant: bool = True) -> None:
        """Load the model. Raises ModelError."""
        self._replica = Replica(path, getattr(torch, dtype), torch.device("cpu"), is_invariant=is_invariant)
        self.vocabulary_size = self._replica.model.config.get_text_config().vocab_size
        self.facts: dict[str, str | None] = {"software": "embedded engine", "dtype": dtype}

    def sample(self, requests: Sequence[Request], batch_size: int, max_new_tokens: int) -> list[Completed]:
        """Sample in batches of exactly `batch_size`, but for the last one."""
        found = []
        for start in range(0, len(requests), batch_size):
            batch = requests[start : start + batch_size]
            found += generate(
                self._replica,
                [request.prompt for request in batch],
                [Sampling(max_new_tokens=max_new_tokens)] * len(batch),
                [max_new_tokens] * len(batch),
                [request.seed for request in batch],
                vocab_size=self.vocabulary_size,
            )
        return [Completed(row.tokens, row.logprobs, row.cached_tokens) for row in found]

    def flush(self) -> bool:
        """Empty the prefix cache."""
        self._replica.prefixes.clear()
        return True

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights, as a weight update of training does."""
        self._replica.load(weights)


class ServerTarget:
    """A server with SGLang's native API, vLLM's, or OpenAI's with log-probs of tokens."""

    def __init__(self, address: str, vocabulary: Vocabulary) -> None:
        """Identify the server. Raises EngineError."""
        self._address, self._vocabulary = base_url(address), vocabulary
        self.vocabulary_size = vocabulary.size
        identity = asyncio.run(self._identify()).identity
        self.facts: dict[str, str | None] = {
            "software": identity.software,
            "dtype": identity.dtype,
            "quantization": identity.quantization,
            "kv_cache_dtype": identity.kv_cache_dtype,
        }

    def sample(self, requests: Sequence[Request], batch_size: int, max_new_tokens: int) -> list[Completed]:
        """Send `batch_size` requests at a time; the server chooses the seeds."""
        params = SamplingParams(max_new_tokens=max_new_tokens)

        async def query() -> list[Completed]:
            async with open_session() as session:
                (engine,) = await self._connect(session)
                calls = [partial(engine.sample, request.prompt, params) for request in requests]
                replies = await gather_limited(calls, batch_size, lambda _: None)
            return [
                # The trainer's log-probs are float32; a server may print fewer or more digits.
                Completed(
                    list(reply.output_ids),
                    np.array(reply.logprobs, dtype=np.float32).tolist(),
                    reply.cached_tokens,
                )
                for reply in replies
            ]

        return asyncio.run(query())

    def flush(self) -> bool:
        """Ask for an empty prefix cache by SGLang's route; a server without it keeps its cache."""

        async def post() -> bool:
            async with open_session() as session, session.post(self._address + "/flush_cache") as reply:
                return reply.status == 200

        return asyncio.run(post())

    def load_from_disk(self, folder: str) -> None:
        """Load a checkpoint by SGLang's route. Raises EngineError."""

        async def post() -> dict[str, object]:
            async with open_session() as session:
                client = HttpClient(self._address, session)
                reply: dict[str, object] = await client.post(
                    "/update_weights_from_disk", {"model_path": folder}
                )
                return reply

        reply = asyncio.run(post())
        if not reply.get("success"):
            raise EngineError(f"{self._address} did not load {folder}: {reply.get('message')}")

    async def _identify(self) -> Engine:
        async with open_session() as session:
            (engine,) = await self._connect(session)
            return engine

    async def _connect(self, session: aiohttp.ClientSession) -> list[Engine]:
        return await connect(session, [self._address], self._vocabulary.decode, self._vocabulary.size)
