"""Who answers at an address, and many questions at once.

prompts x samples ──> one task each, LIMIT a server at a time ──> engine i, in turn ──> Reply
                      the first EngineError cancels the rest
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from consistency.engine import openai, sglang, vllm
from consistency.engine.reply import Engine, Identity, Law, Reply
from consistency.engine.wire import Wire, base_url
from consistency.errors import EngineError

AT_A_TIME = 64
T = TypeVar("T")
Decode = Callable[[list[int]], str]


async def identify(wire: Wire, decode: Decode, vocabulary_size: int) -> Engine:
    """The engine behind an address, by the routes that it has. Raises EngineError."""
    info = await wire.get("/server_info")
    if info is not None:
        return sglang.SGLang(wire, sglang.parse_identity(wire.address, info, await wire.get("/model_info")))
    version, models = await wire.get("/version"), await wire.get("/v1/models")
    if models is None:
        raise EngineError(
            f"{wire.address} answers neither /server_info (SGLang) nor /v1/models (vLLM, OpenAI): is it an inference server?"
        )
    if version is not None:
        return vllm.VLLM(wire, *vllm.parse_identity(wire.address, version, models))
    name = parse_model_name(wire.address, models)
    return openai.OpenAI(
        wire,
        Identity("an OpenAI-compatible server", name),
        name,
        openai.ids_of_texts(decode, vocabulary_size),
    )


def parse_model_name(address: str, models: Any) -> str:
    """The first name in `/v1/models`. Raises EngineError."""
    try:
        return str(models["data"][0]["id"])
    except (IndexError, KeyError, TypeError) as error:
        raise EngineError(f"{address}/v1/models names no model") from error


async def connect(
    session: Any, addresses: Sequence[str], decode: Decode, vocabulary_size: int
) -> list[Engine]:
    """Engines at all addresses. Raises EngineError for the first that is none."""
    wires = [Wire(base_url(address), session) for address in addresses]
    return list(await asyncio.gather(*(identify(wire, decode, vocabulary_size) for wire in wires)))


async def gather_limited(
    calls: Sequence[Callable[[], Awaitable[T]]], limit: int, done: Callable[[int], None]
) -> list[T]:
    """All results in order, `limit` calls at a time; the first exception cancels the others and is raised."""
    room = asyncio.Semaphore(limit)

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        async with room:
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
    engines: Sequence[Engine], prompts: Sequence[Sequence[int]], law: Law, done: Callable[[int], None]
) -> list[Reply]:
    """One reply a prompt; prompt i goes to engine i modulo their number."""
    calls = [
        partial(engines[worker_of(i, len(engines))].sample, prompt, law) for i, prompt in enumerate(prompts)
    ]
    return await gather_limited(calls, AT_A_TIME * len(engines), done)


async def rescore_all(
    engines: Sequence[Engine],
    rows: Sequence[Sequence[int]],
    num_prompts: Sequence[int],
    workers: Sequence[int],
) -> list[tuple[float, ...]]:
    """Prefill logprobs of each row after its prompt, by the engine that sampled it."""
    calls = [
        partial(engines[worker].rescore, row, num_prompt)
        for row, num_prompt, worker in zip(rows, num_prompts, workers, strict=True)
    ]
    return await gather_limited(calls, AT_A_TIME * len(engines), lambda num_calls: None)


def worker_of(prompt: int, num_engines: int) -> int:
    """The engine that answers a prompt: all in turn."""
    return prompt % num_engines
