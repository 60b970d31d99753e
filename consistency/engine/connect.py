"""Identify the engine at an address, and send many requests concurrently.

prompts x samples ──> one task each, MAX_CONCURRENT per server ──> engine i, round robin ──> Reply
                      the first EngineError cancels the rest
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from consistency.engine import openai, sglang, vllm
from consistency.engine.http import HttpClient, base_url
from consistency.engine.reply import Engine, EngineIdentity, Pictures, Reply, SamplingParams
from consistency.errors import EngineError

MAX_CONCURRENT = 64
T = TypeVar("T")
Decode = Callable[[list[int]], str]


async def identify(client: HttpClient, decode: Decode, vocabulary_size: int) -> Engine:
    """Identify the engine at an address by its routes. Raises EngineError."""
    info = await client.get("/server_info")
    if info is not None and "vllm_config" not in info:  # vLLM's servers of a run have this route, too
        return sglang.SGLang(
            client, sglang.parse_identity(client.address, info, await client.get("/model_info"))
        )
    version, models = await client.get("/version"), await client.get("/v1/models")
    if models is None:
        raise EngineError(
            f"{client.address} answers neither /server_info (SGLang) nor /v1/models (vLLM, OpenAI): is it an inference server?"
        )
    if version is not None:
        return vllm.VLLM(client, *vllm.parse_identity(client.address, version, models))
    name = parse_model_name(client.address, models)
    return openai.OpenAI(
        client,
        EngineIdentity("an OpenAI-compatible server", name),
        name,
        openai.ids_of_texts(decode, vocabulary_size),
    )


def parse_model_name(address: str, models: Any) -> str:
    try:
        return str(models["data"][0]["id"])
    except (IndexError, KeyError, TypeError) as error:
        raise EngineError(f"{address}/v1/models names no model") from error


async def connect(
    session: Any, addresses: Sequence[str], decode: Decode, vocabulary_size: int
) -> list[Engine]:
    """Identify the engines at all addresses. Raises EngineError if one is not an engine."""
    clients = [HttpClient(base_url(address), session) for address in addresses]
    return list(await asyncio.gather(*(identify(client, decode, vocabulary_size) for client in clients)))


async def gather_limited(
    calls: Sequence[Callable[[], Awaitable[T]]], limit: int, done: Callable[[int], None]
) -> list[T]:
    """Run `limit` calls at a time and return all results in order.

    The first exception cancels the other calls and is raised.
    """
    semaphore = asyncio.Semaphore(limit)

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        async with semaphore:
            result = await call()
        done(1)
        return result

    tasks = [asyncio.ensure_future(one(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def sample_all(
    engines: Sequence[Engine],
    prompts: Sequence[tuple[Sequence[int], Pictures | None]],
    params: SamplingParams,
    done: Callable[[int], None],
) -> list[Reply]:
    """Sample one reply per prompt; prompt i goes to engine i modulo their number."""
    calls = [
        partial(engines[worker_of(i, len(engines))].sample, prompt, params, pictures)
        for i, (prompt, pictures) in enumerate(prompts)
    ]
    return await gather_limited(calls, MAX_CONCURRENT * len(engines), done)


async def rescore_all(
    engines: Sequence[Engine],
    rows: Sequence[Sequence[int]],
    num_prompts: Sequence[int],
    workers: Sequence[int],
    pictures: Sequence[Pictures | None],
) -> list[tuple[float, ...]]:
    calls = [
        partial(engines[worker].rescore, row, num_prompt, seen)
        for row, num_prompt, worker, seen in zip(rows, num_prompts, workers, pictures, strict=True)
    ]
    return await gather_limited(calls, MAX_CONCURRENT * len(engines), lambda num_calls: None)


def worker_of(prompt: int, num_engines: int) -> int:
    """Return the index of the engine that answers a prompt: round robin."""
    return prompt % num_engines
