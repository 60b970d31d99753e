"""A server with SGLang's routes and no model, with faults at given requests and a list of replies.

    client --> FaultyServer (aiohttp, a thread of its own): tokens by prompt and weight version
                 request n of its route: a fault?   kill, stop: by another thread
                 every reply that was delivered: `replies`, intact or with its fault

It is killed, stopped and started like a process, but is a thread: so a test has many of them.
"""

import asyncio
import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from aiohttp import web

from areal_core.rollout.http_thread import HttpThread
from areal_core.servers.server import Server
from tests.rollout.chaos.faults import (
    KILL,
    OTHER_REPLY,
    PROCESS,
    REFUSED,
    SLOW,
    TWICE,
    WRONG_BODY,
    WRONG_JSON,
    WRONG_STATUS,
    Fault,
    spoil_json,
)
from tests.rollout.chaos.history import Reply

VOCABULARY = 512
SECONDS_A_TOKEN = 0.002
FIRST_VERSION = "default"
RETRY_AFTER_S = 1
GENERATE = "/generate"


class FaultyServer:
    """A server of one model.

    Args:
        model_path: folder that it reports.
        name: in messages.
        faults: those of this server.

    Attributes:
        server: the address for clients; while the server is dead, nothing listens there.
        replies: every reply to `/generate` that was delivered completely, and every spoiled one.
        injected: how often each fault happened.
    """

    def __init__(self, model_path: str, name: str, faults: Sequence[Fault]) -> None:
        self.name = name
        self.replies: list[Reply] = []
        self.injected: Counter[str] = Counter()
        self._model_path = model_path
        self._faults = {(fault.route, fault.at): fault for fault in faults}
        self._counts: Counter[str] = Counter()
        self._last: bytes | None = None  # an intact reply, to another prompt
        self._controls = ThreadPoolExecutor(1, thread_name_prefix="faults")
        self._acts: list[Future[None]] = []
        self._is_ending = threading.Event()
        self._runs = threading.Event()
        self._start(port=0)
        self.server = Server(f"127.0.0.1:{self._http.port}")

    def close(self) -> None:
        """End faults and server. Raises what a restart raised."""
        self._faults = {}
        self._is_ending.set()
        for act in self._acts:
            act.result()
        self._controls.shutdown()
        self._http.close()

    def _start(self, port: int) -> None:
        """Start with the first weights."""
        self._version = FIRST_VERSION
        self._is_paused = False
        self._aborts: set[asyncio.Event] = set()
        self._runs.set()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._http = HttpThread(application, self.name, port=port)

    def _kill_for(self, seconds: float) -> None:
        """Lose all connections, and start again at the same address; on the thread of `_controls`."""
        port = self._http.port
        self._http.close()
        self._is_ending.wait(seconds)
        self._start(port)

    def _stop_for(self, seconds: float) -> None:
        """Let it hang: connections stay open, nothing is answered; on the thread of `_controls`."""
        self._runs.clear()
        self._is_ending.wait(seconds)
        self._runs.set()

    async def _may_run(self) -> None:
        while not self._runs.is_set():
            await asyncio.sleep(0.01)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        route = "generate" if request.path == GENERATE else "control"
        fault = self._faults.get((route, self._counts[route]))
        self._counts[route] += 1
        if fault is not None and fault.kind in PROCESS:
            self.injected[fault.kind] += 1
            act = self._kill_for if fault.kind == KILL else self._stop_for
            self._acts.append(self._controls.submit(act, fault.seconds))
            if fault.kind == KILL:
                return lost(request)
            fault = None
        await self._may_run()
        if route == "generate":
            body = await self._generate(await request.json())
            return await self._deliver(request, body, fault)
        content = await self._control(request)
        if fault is not None:
            self.injected[fault.kind] += 1
            if fault.kind == "reset":
                return lost(request)
            if fault.kind in WRONG_STATUS:
                return web.Response(status=WRONG_STATUS[fault.kind], body=REFUSED)
            await asyncio.sleep(fault.seconds)
        return web.json_response(content)

    async def _generate(self, body: dict[str, Any]) -> bytes:
        """Return the JSON of the tokens that are sampled until the end or a pause."""
        while self._is_paused:
            await asyncio.sleep(0.005)
        await self._may_run()
        wanted, version, abort = body["sampling_params"]["max_new_tokens"], self._version, asyncio.Event()
        self._aborts.add(abort)
        began = asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(abort.wait(), wanted * SECONDS_A_TOKEN)
            took_s = asyncio.get_running_loop().time() - began
            count, finish = min(wanted - 1, int(took_s / SECONDS_A_TOKEN)), {"type": "abort"}
        except TimeoutError:
            count, finish = wanted, {"type": "length", "length": wanted}
        finally:
            self._aborts.discard(abort)
        await self._may_run()
        return json.dumps(reply(body, count, version, finish)).encode()

    async def _control(self, request: web.Request) -> dict[str, Any]:
        path = request.path
        if path == "/pause_generation":
            self._is_paused = True
            for abort in self._aborts:
                abort.set()
        elif path == "/continue_generation":
            self._is_paused = False
        elif path == "/update_weights_from_disk":
            self._version = (await request.json())["weight_version"]
        elif path.endswith("model_info"):
            model = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY}
            return model | {"model_path": self._model_path, "weight_version": self._version}
        elif path.endswith("server_info"):
            options = {"device": "cpu", "dtype": "float32", "enable_lora": False}
            return options | {"version": "0.5.23", "model_path": self._model_path}
        return {"success": True, "message": ""}

    async def _deliver(self, request: web.Request, body: bytes, fault: Fault | None) -> web.StreamResponse:
        prompt, last, self._last = tuple((await request.json())["input_ids"]), self._last, body
        name = "" if fault is None else fault.kind
        spoiled = last if name == OTHER_REPLY else None
        if name in WRONG_JSON:
            spoiled = spoil_json(name, body)
        if spoiled is None and (name in WRONG_JSON or name == OTHER_REPLY):
            name = ""  # nothing to spoil
        if name:
            self.injected[name] += 1
        if spoiled is not None:
            self.replies.append(parse_reply(self.name, prompt, spoiled, name))
            return web.Response(body=spoiled, content_type="application/json")
        if name in WRONG_BODY:
            return web.Response(body=WRONG_BODY[name](body), content_type="application/json")
        if name in WRONG_STATUS:
            headers = {"Retry-After": str(RETRY_AFTER_S)} if name == "status_429" else {}
            return web.Response(status=WRONG_STATUS[name], body=REFUSED, headers=headers)
        if name == "reset":
            return lost(request)
        if name == "half_body":
            return await half(request, body)
        if fault is not None and name in SLOW:
            await asyncio.sleep(fault.seconds)
        self.replies.append(parse_reply(self.name, prompt, body, ""))
        if name == TWICE:
            return await twice(request, body)
        return web.Response(body=body, content_type="application/json")


def reply(body: dict[str, Any], count: int, version: str, finish: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of the first `count` tokens after a request's prompt."""
    prompt, tokens, logprobs = list(body["input_ids"]), [], []
    for _ in range(count):
        digest = hashlib.blake2b(repr((prompt[-8:], len(prompt), version)).encode(), digest_size=4).digest()
        number = int.from_bytes(digest, "big")
        tokens.append(number % VOCABULARY)
        logprobs.append(-(1 + number // VOCABULARY % 4096) / 512)
        prompt.append(tokens[-1])
    meta: dict[str, Any] = {
        "id": body.get("rid", ""),
        "finish_reason": finish,
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": count,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": count}],
        "output_token_logprobs": [
            [logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)
        ],
    }
    return {"text": "", "output_ids": tokens, "meta_info": meta}


def parse_reply(server: str, prompt: tuple[int, ...], body: bytes, fault: str) -> Reply:
    """Parse a reply of `/generate` as it was sent, without any check."""
    meta = json.loads(body)["meta_info"]
    found = meta["output_token_logprobs"]
    [version] = {span["version"] for span in meta["weight_versions"]}
    return Reply(
        server,
        prompt,
        tuple(entry[1] for entry in found),
        tuple(float("nan") if entry[0] is None else entry[0] for entry in found),
        (0 if version == FIRST_VERSION else int(version),) * len(found),
        fault,
    )


def lost(request: web.Request) -> web.Response:
    """Break the client's connection; the response that is returned reaches nobody."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


async def half(request: web.Request, body: bytes) -> web.StreamResponse:
    """Announce the whole body, send half of it, and break the connection."""
    response = web.StreamResponse(headers={"Content-Length": str(len(body))})
    with contextlib.suppress(ConnectionError):  # the client did not wait
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.abort()
    return response


async def twice(request: web.Request, body: bytes) -> web.StreamResponse:
    """Send the reply, and then send it again, as if another request had been answered."""
    response = web.Response(body=body, content_type="application/json")
    with contextlib.suppress(ConnectionError):
        await response.prepare(request)
        await response.write_eof()
        if request.transport is not None:
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            request.transport.write(head.encode() + body)
    return response
