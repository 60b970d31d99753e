"""Serve a `FaultyEngine`, or any rows, over the HTTP API of SGLang, vLLM or OpenAI.

client (any thread) ── HTTP ──> event loop of one thread: samples or scores, one request at a time
`serving` ends: the loop is stopped, its thread joined
"""

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from aiohttp import web

from areal_core.rollout.http_thread import HttpThread
from consistency.tokens import Sequences

from .faulty_engine import FaultyEngine, report, sample_rows, sequences_of

Answer = Callable[[dict[str, Any]], Any]
Decode = Callable[[list[int]], str]
NAME = "faulty"


@contextmanager
def serving(
    engine: FaultyEngine, api: str, decode: Decode = str, scoring: FaultyEngine | None = None
) -> Iterator[str]:
    """Yield `http://127.0.0.1:port`.

    Args:
        api: sglang, vllm or openai, which alone needs `decode`.
        scoring: engine that scores prompts, by default the one that samples.
    """
    model = OneModel(engine, scoring or engine)
    routes: dict[str, Callable[[OneModel], dict[str, Any]]] = {
        "sglang": sglang_routes,
        "vllm": vllm_routes,
        "openai": partial(openai_routes, decode=decode),
    }
    with hosting(application(routes[api](model))) as address:
        yield address


@contextmanager
def serving_rows(sequences: Sequences) -> Iterator[str]:
    """Yield the address of an SGLang that answers each prompt with its row, in their order."""
    with hosting(application(row_routes(sequences))) as address:
        yield address


@contextmanager
def hosting(served: web.Application) -> Iterator[str]:
    """Yield the address of a server of the application, on a separate event loop."""
    with closing(HttpThread(served, "faulty-engine")) as http:
        yield f"http://127.0.0.1:{http.port}"


def application(routes: dict[str, Any | Answer]) -> web.Application:
    """Serve constants by GET, functions of the request's JSON by POST."""

    def serve(route: Any | Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(route(await request.json()) if callable(route) else route)

        return handle

    built = web.Application()
    for path, route in routes.items():
        built.router.add_route("POST" if callable(route) else "GET", path, serve(route))
    return built


class OneModel:
    """Sample and score single rows; each request has its own seed, so that noise is fresh."""

    def __init__(self, engine: FaultyEngine, scoring: FaultyEngine) -> None:
        self.engine = engine
        self.scoring = scoring
        self._seeds = itertools.count()

    def sample(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Return ids and reported logprobs of one completion, which no EOS ends."""
        sampled = sample_rows(self.engine, torch.tensor([prompt]), num_tokens, next(self._seeds))
        return sampled.input_ids[len(prompt) :].tolist(), sampled.engine_logprobs[len(prompt) :].tolist()

    def score(self, ids: list[int], num_prompt: int) -> list[float]:
        """Return the logprobs that the engine reports for the tokens after a prompt."""
        rows = sequences_of(torch.tensor([ids]), num_prompt)
        scored: list[float] = np.asarray(report(self.scoring, rows, next(self._seeds))).tolist()
        return scored


def sglang_routes(model: OneModel) -> dict[str, Any]:
    """`/generate`: sample tokens, or score those of the prompt."""

    def generate(request: dict[str, Any]) -> Any:
        ids, num_new = request["input_ids"], request["sampling_params"]["max_new_tokens"]
        meta: dict[str, Any] = {"weight_version": "default", "cached_tokens": 0}
        if num_new:
            tokens, logprobs = model.sample(ids, num_new)
            rows = [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)]
            logprob_rows = {"output_token_logprobs": rows, "output_top_logprobs": [[row] for row in rows]}
            return {"meta_info": meta | logprob_rows}
        begin = request["logprob_start_len"] + 1
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
    "kv_cache_dtype": "auto",
    "schedule_policy": "fcfs",
    "internal_states": [],
}


def row_routes(sequences: Sequences) -> dict[str, Any]:
    """`/generate` from rows of one turn, with their cached tokens."""
    remaining: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
    num_prompt = [int((~sequences.sampled[sequences.row(row)]).sum()) for row in range(sequences.num_rows)]
    for row in range(sequences.num_rows):
        remaining[tuple(sequences.input_ids[sequences.row(row)][: num_prompt[row]].tolist())].append(row)

    def generate(request: dict[str, Any]) -> Any:
        if request["sampling_params"]["max_new_tokens"] == 0:
            raise web.HTTPBadRequest(text="recorded rows are not scored again")
        row = remaining[tuple(request["input_ids"])].popleft()
        where = slice(sequences.row(row).start + num_prompt[row], sequences.row(row).stop)
        pairs = zip(
            sequences.engine_logprobs[where].tolist(), sequences.input_ids[where].tolist(), strict=True
        )
        # JSON has no NaN: a server that has none sends null.
        rows = [[None if math.isnan(value) else value, token, None] for value, token in pairs]
        cached = 0 if sequences.cached_tokens is None else int(sequences.cached_tokens[row])
        meta = {"weight_version": "default", "cached_tokens": cached, "output_token_logprobs": rows}
        return {"meta_info": meta | {"output_top_logprobs": [[] for _ in rows]}}

    return {"/server_info": SGLANG, "/model_info": {"model_path": NAME}, "/generate": generate}


def vllm_routes(model: OneModel) -> dict[str, Any]:
    """`/v1/completions` with ids, and `prompt_logprobs`."""

    def complete(request: dict[str, Any]) -> Any:
        ids = request["prompt"]
        if "prompt_logprobs" in request:
            scored = zip(ids[1:], model.score(ids, 1), strict=True)
            rows = [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in scored)]
            return {"choices": [{"prompt_logprobs": rows}]}
        tokens, logprobs = model.sample(ids, request["max_tokens"])
        tops = [{f"token_id:{token}": value} for token, value in zip(tokens, logprobs, strict=True)]
        entry = {"token_logprobs": logprobs, "top_logprobs": tops}
        return {"choices": [{"token_ids": tokens, "logprobs": entry}]}

    card = {"id": NAME, "root": NAME, "parent": None}
    return {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [card]}, "/v1/completions": complete}


def openai_routes(model: OneModel, decode: Decode) -> dict[str, Any]:
    """`/v1/completions` that returns tokens as text, and echoes."""

    def complete(request: dict[str, Any]) -> Any:
        ids = request["prompt"]
        if request["max_tokens"] == 0:
            tokens, logprobs = ids, [None, *model.score(ids, 1)]
        else:
            tokens, logprobs = model.sample(ids, request["max_tokens"])  # type: ignore[assignment]
        entry = {"tokens": [decode([token]) for token in tokens], "token_logprobs": logprobs}
        return {"choices": [{"logprobs": entry}]}

    return {"/v1/models": {"data": [{"id": NAME}]}, "/v1/completions": complete}
