"""A server with SGLang's routes that needs no model: tokens are a function of prompt and version.

It is killed, stopped and started like a process, but is a thread: so a test has many of them.
"""

import asyncio
import hashlib
import threading
from typing import Any

from aiohttp import web

from areal_core.rollout.http_thread import HttpThread
from areal_core.servers.server import Server

VOCABULARY = 512
SECONDS_A_TOKEN = 0.002
FIRST_VERSION = "default"
SUCCEEDED = {"success": True, "message": ""}


class ScriptedServer:
    """A server of one model.

    Args:
        model_path: folder that it reports.
    """

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._port = 0
        self._runs = threading.Event()
        self.restart()
        self.server = Server(f"127.0.0.1:{self._port}")

    def restart(self) -> None:
        """Start with the first weights."""
        self.version = FIRST_VERSION
        self._is_paused = False
        self._aborts: set[asyncio.Event] = set()
        self._runs.set()
        application = web.Application()
        application.router.add_post("/generate", self._generate)
        application.router.add_route("*", "/{route}", self._control)
        self._http = HttpThread(application, "scripted-server", port=self._port)
        self._port = self._http.port

    def kill(self) -> None:
        """End it; its connections are lost."""
        self._runs.set()
        self._http.close()

    def stop(self) -> None:
        """Let it hang."""
        self._runs.clear()

    def proceed(self) -> None:
        """Continue it."""
        self._runs.set()

    async def _may_run(self) -> None:
        while not self._runs.is_set():
            await asyncio.sleep(0.01)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        while self._is_paused:
            await asyncio.sleep(0.005)
        await self._may_run()
        wanted, version, abort = body["sampling_params"]["max_new_tokens"], self.version, asyncio.Event()
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
        return web.json_response(reply(body, count, version, finish))

    async def _control(self, request: web.Request) -> web.Response:
        await self._may_run()
        path = request.path
        if path == "/pause_generation":
            self._is_paused = True
            for abort in self._aborts:
                abort.set()
        elif path == "/continue_generation":
            self._is_paused = False
        elif path == "/update_weights_from_disk":
            self.version = (await request.json())["weight_version"]
        elif path.endswith("model_info"):
            return web.json_response(
                {
                    "model_path": self._model_path,
                    "weight_version": self.version,
                    "architectures": ["LlamaForCausalLM"],
                    "vocab_size": VOCABULARY,
                }
            )
        elif path.endswith("server_info"):
            return web.json_response(
                {
                    "version": "0.5.23",
                    "model_path": self._model_path,
                    "device": "cpu",
                    "dtype": "float32",
                    "enable_lora": False,
                }
            )
        return web.json_response(SUCCEEDED)


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
