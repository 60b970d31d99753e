"""Faults behind the HTTP of SGLang, vLLM or plain OpenAI, for tests of everything that asks a live engine: a `FaultyEngine`, or any rows.

asker (any thread) ── HTTP ──> event loop of one thread: samples or scores, one request after another
`serving` ends: the loop is stopped, its thread joined
"""

import asyncio
import itertools
import math
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from aiohttp import web

from consistency.testing import FaultyEngine, report, sample_rows, sequences_of
from consistency.tokens import Sequences

Answer = Callable[[dict[str, Any]], Any]
Decode = Callable[[list[int]], str]
NAME = "faulty"


@contextmanager
def serving(
    engine: FaultyEngine, dialect: str, decode: Decode = str, scoring: FaultyEngine | None = None
) -> Iterator[str]:
    """Yields `http://127.0.0.1:port`.

    Args:
        dialect: sglang, vllm or openai, which alone needs `decode`.
        scoring: answers when a prompt is to be scored, if not the engine that samples.
    """
    model = OneModel(engine, scoring or engine)
    routes: dict[str, Callable[[OneModel], dict[str, Any]]] = {
        "sglang": sglang_routes,
        "vllm": vllm_routes,
        "openai": partial(openai_routes, decode=decode),
    }
    with hosting(application(routes[dialect](model))) as address:
        yield address


@contextmanager
def serving_rows(sequences: Sequences) -> Iterator[str]:
    """Yields the address of an SGLang that answers each prompt of some rows with what was sampled and told there, in their order."""
    with hosting(application(row_routes(sequences))) as address:
        yield address


@contextmanager
def hosting(served: web.Application) -> Iterator[str]:
    """Yields the address of a server of the application, on an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="faulty-engine", daemon=True)
    thread.start()
    runner = web.AppRunner(served)
    try:
        port = asyncio.run_coroutine_threadsafe(listen(runner), loop).result()
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def listen(runner: web.AppRunner) -> int:
    """Start on a free port of the loopback and tell it."""
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port: int = runner.addresses[0][1]
    return port


def application(routes: dict[str, Any | Answer]) -> web.Application:
    """GET for constants, POST for functions of the request's JSON."""

    def computing(answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(answer(await request.json()))

        return handle

    def telling(value: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(value)

        return handle

    built = web.Application()
    for path, route in routes.items():
        if callable(route):
            built.router.add_post(path, computing(route))
        else:
            built.router.add_get(path, telling(route))
    return built


class OneModel:
    """Samples and scores single rows; each request has a seed of its own, so that noise is fresh."""

    def __init__(self, engine: FaultyEngine, scoring: FaultyEngine) -> None:
        self.engine = engine
        self.scoring = scoring
        self._seeds = itertools.count()

    def sample(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Ids and reported logprobs of one completion, which no EOS ends."""
        told = sample_rows(self.engine, torch.tensor([prompt]), num_tokens, next(self._seeds))
        return told.input_ids[len(prompt) :].tolist(), told.engine_logprobs[len(prompt) :].tolist()

    def score(self, ids: list[int], num_prompt: int) -> list[float]:
        """Logprobs of the tokens after a prompt, as the engine reports them."""
        rows = sequences_of(torch.tensor([ids]), num_prompt)
        scored: list[float] = np.asarray(report(self.scoring, rows, next(self._seeds))).tolist()
        return scored


def sglang_routes(model: OneModel) -> dict[str, Any]:
    """`/generate` both ways: new tokens, or logprobs of the prompt's own."""

    def generate(asked: dict[str, Any]) -> Any:
        ids, num_new = asked["input_ids"], asked["sampling_params"]["max_new_tokens"]
        meta: dict[str, Any] = {"weight_version": "default", "cached_tokens": 0}
        if num_new:
            tokens, logprobs = model.sample(ids, num_new)
            rows = [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)]
            told = {"output_token_logprobs": rows, "output_top_logprobs": [[row] for row in rows]}
            return {"meta_info": meta | told}
        begin = asked["logprob_start_len"] + 1
        scored = zip(model.score(ids, begin), ids[begin:], strict=True)
        return {
            "meta_info": meta
            | {"input_token_logprobs": [[None, 0, None], *([*pair, None] for pair in scored)]}
        }

    return {"/server_info": SGLANG, "/model_info": {"model_path": NAME}, "/generate": generate}


SGLANG = {
    "version": "0.5.23",
    "dtype": "auto",
    "quantization": None,
    "enable_lora": False,
    "kv_cache_dtype": "auto",
}


def row_routes(sequences: Sequences) -> dict[str, Any]:
    """`/generate` from rows of one turn; the versions and cached tokens that the rows hold are told with them."""
    left: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
    num_prompt = [int((~sequences.sampled[sequences.row(row)]).sum()) for row in range(sequences.num_rows)]
    for row in range(sequences.num_rows):
        left[tuple(sequences.input_ids[sequences.row(row)][: num_prompt[row]].tolist())].append(row)

    def generate(asked: dict[str, Any]) -> Any:
        if asked["sampling_params"]["max_new_tokens"] == 0:
            raise web.HTTPBadRequest(text="recorded rows are not scored again")
        row = left[tuple(asked["input_ids"])].popleft()
        where = slice(sequences.row(row).start + num_prompt[row], sequences.row(row).stop)
        told = zip(
            sequences.engine_logprobs[where].tolist(), sequences.input_ids[where].tolist(), strict=True
        )
        # JSON has no NaN: a server that has none sends null.
        rows = [[None if math.isnan(value) else value, token, None] for value, token in told]
        cached = 0 if sequences.cached_tokens is None else int(sequences.cached_tokens[row])
        meta = {"weight_version": "default", "cached_tokens": cached, "output_token_logprobs": rows}
        return {"meta_info": meta | {"output_top_logprobs": [[] for _ in rows]}}

    return {"/server_info": SGLANG, "/model_info": {"model_path": NAME}, "/generate": generate}


def vllm_routes(model: OneModel) -> dict[str, Any]:
    """`/v1/completions` with ids, and `prompt_logprobs`."""

    def complete(asked: dict[str, Any]) -> Any:
        ids = asked["prompt"]
        if "prompt_logprobs" in asked:
            scored = zip(ids[1:], model.score(ids, 1), strict=True)
            rows = [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in scored)]
            return {"choices": [{"prompt_logprobs": rows}]}
        tokens, logprobs = model.sample(ids, asked["max_tokens"])
        tops = [{f"token_id:{token}": value} for token, value in zip(tokens, logprobs, strict=True)]
        told = {"token_logprobs": logprobs, "top_logprobs": tops}
        return {"choices": [{"token_ids": tokens, "logprobs": told}]}

    card = {"id": NAME, "root": NAME, "parent": None}
    return {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [card]}, "/v1/completions": complete}


def openai_routes(model: OneModel, decode: Decode) -> dict[str, Any]:
    """`/v1/completions` that tells tokens as text, and echoes."""

    def complete(asked: dict[str, Any]) -> Any:
        ids = asked["prompt"]
        if asked["max_tokens"] == 0:
            tokens, logprobs = ids, [None, *model.score(ids, 1)]
        else:
            tokens, logprobs = model.sample(ids, asked["max_tokens"])  # type: ignore[assignment]
        told = {"tokens": [decode([token]) for token in tokens], "token_logprobs": logprobs}
        return {"choices": [{"logprobs": told}]}

    return {"/v1/models": {"data": [{"id": NAME}]}, "/v1/completions": complete}
