"""A fake server with SGLang's wire format, in a thread, and a real SGLang server on the CPU."""

import os
import pickle
import pkgutil
import signal
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from areal_core.launch.server_process import free_port
from areal_core.launch.sglang_process import SHIM, SGLangServer
from areal_core.rollout.http_thread import HttpThread
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.rollout.workflow import episode_tensors
from areal_core.servers.pool import ServerPool
from areal_core.servers.server import Server, is_healthy
from areal_core.servers.sglang import SGLANG
from areal_core.servers.weight_update import DiskUpdate
from areal_core.testing import make_tiny_model
from areal_core.testing.embedded_server import serve
from tests.forks import ForkedProgram


class FakeServer:
    """Continue a prompt by counting up from its last token, with logprob -token / 100.

    `script` is a list of replies that precede that: a status with a body, or a number of tokens
    after which the request is aborted. `refuse` maps a control route to the status and JSON of its
    reply; `model_info` and `server_info` are added to the replies of these routes. `spoil` changes
    the reply to a request of tokens: it returns another JSON, or a status, a text and headers.
    Experts are those of 3 layers, 2 of 4 for a token; further requests get those of the next 4.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.script: list[int | tuple[int, str]] = []
        self.refuse: dict[str, tuple[int, dict]] = {}
        self.spoil: Callable[[dict], dict | tuple[int, str, dict[str, str]]] = lambda reply: reply
        self.weight_version = "default"
        self.model_info: dict = {"architectures": ["LlamaForCausalLM"]}
        self.server_info: dict = {"version": "0.5.23", "model_path": "/models/tiny"}
        self._http = HttpThread(self._application(), "fake-server")
        self.server = Server(f"127.0.0.1:{self._http.port}")

    def _application(self) -> web.Application:
        application = web.Application()
        application.router.add_post("/generate", self._generate)
        application.router.add_post("/{route}", self._control)
        application.router.add_get("/{route}", self._inform)
        return application

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("/generate", body))
        if "logprob_start_len" in body:
            scored = body["input_ids"][body["logprob_start_len"] :]
            rows = [[None if i == 0 else -token / 100, token, None] for i, token in enumerate(scored)]
            meta = {"input_token_logprobs": rows, "weight_version": self.weight_version}
            return web.json_response(self.spoil({"meta_info": meta}))
        wanted = body["sampling_params"]["max_new_tokens"]
        step = self.script.pop(0) if self.script else wanted
        if isinstance(step, tuple):
            return web.Response(status=step[0], text=step[1])
        first = body["input_ids"][-1] + 1
        tokens = list(range(first, first + step))
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "abort" if step < wanted else "length"},
            "output_token_logprobs": [[-token / 100, token, None] for token in tokens],
            "completion_tokens": len(tokens),
            "weight_version": self.weight_version,
        }
        if body.get("return_routed_experts") and tokens:
            end = len(body["input_ids"]) + len(tokens) - 1
            positions = np.arange(body["routed_experts_start_len"], end, dtype=np.int32)
            experts = (positions[:, None, None] + np.arange(6, dtype=np.int32).reshape(3, 2)) % 4
            meta["routed_experts"] = b64encode(experts + 4 * (len(self.calls) - 1)).decode()
        reply = self.spoil({"output_ids": tokens, "meta_info": meta})
        if isinstance(reply, tuple):
            status, text, headers = reply
            return web.Response(status=status, text=text, headers=headers)
        return web.json_response(reply)

    async def _control(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, await request.json() if request.can_read_body else {}))
        status, body = self.refuse.get(request.path, (200, {"success": True, "message": ""}))
        return web.json_response(body, status=status)

    async def _inform(self, request: web.Request) -> web.Response:
        """Reply to a query of the client, which is not among the recorded calls."""
        if request.path in self.refuse:
            return await self._control(request)
        replies = {
            "/health": {},
            "/model_info": {"weight_version": self.weight_version, **self.model_info},
            "/server_info": {"device": "cpu", "dtype": "float32", "enable_lora": False, **self.server_info},
        }
        return web.json_response(replies[request.path])

    def routes(self) -> list[str]:
        return [route for route, _ in self.calls]

    def stop(self) -> None:
        self._http.close()


class Rewarded:
    """A workflow of one completion; `outcome(prompt_id, sample_id)` is a reward, None or an exception."""

    def __init__(self, outcome=lambda prompt_id, sample_id: 0.5) -> None:
        self.outcome = outcome

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[data["number"]], sampling=Sampling()))
        outcome = self.outcome(engine.prompt_id, engine.sample_id)
        if isinstance(outcome, Exception):
            raise outcome
        return None if outcome is None else episode_tensors(response, outcome)


@pytest.fixture
def serve_application() -> Iterator[Callable[[web.Application], Server]]:
    """Serve applications from threads; all are closed at the end."""
    with ExitStack() as started:

        def start(application: web.Application) -> Server:
            http = started.enter_context(closing(HttpThread(application, "application")))
            return Server(f"127.0.0.1:{http.port}")

        yield start


@pytest.fixture
def start_fake() -> Iterator[Callable[[], FakeServer]]:
    """Start fake servers; all are stopped at the end."""
    started: list[FakeServer] = []

    def start() -> FakeServer:
        started.append(FakeServer())
        return started[-1]

    yield start
    for fake in started:
        fake.stop()


@pytest.fixture
def pool_of() -> Iterator[Callable[..., ServerPool]]:
    """`pool_of(fake, server, **options)`: pools of SGLang's protocol; all are closed at the end."""
    with ExitStack() as started:

        def make(*servers: Server | FakeServer, **options) -> ServerPool:
            plain = [getattr(server, "server", server) for server in servers]
            return started.enter_context(closing(ServerPool(plain, SGLANG, **options)))

        yield make


@pytest.fixture
def update_by_disk(pool_of, tmp_path) -> Callable[..., DiskUpdate]:
    """`update_by_disk(fake, **options)`: an update of servers by files of a model without weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return lambda *fakes, **options: DiskUpdate(
        pool_of(*fakes), tmp_path / "update", tmp_path / "model", **options
    )


class ServerProcess:
    """The embedded engine's server in a separate process, a fork of one with torch loaded."""

    def __init__(self, model_path: str, server: Server | None = None, serve: Callable = serve) -> None:
        self.server = server or Server(f"127.0.0.1:{free_port()}")
        port = int(self.server.address.rpartition(":")[2])
        call = pickle.dumps(partial(serve, model_path, "127.0.0.1", port)).hex()
        self._program = ForkedProgram(["-m", "tests.rollout.served", call], Path(__file__).parents[2])

    def wait_until_ready(self) -> "ServerProcess":
        while not is_healthy(self.server):
            assert self._program.is_running()
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """Send SIGSTOP: connections are accepted by the kernel, and nothing answers."""
        os.kill(self._program.process_id, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._program.process_id, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL; fine if the process has ended."""
        self._program.kill()


@pytest.fixture
def start_server(tiny_model) -> Iterator[Callable[..., ServerProcess]]:
    """Start server processes of the tiny model, at a free or a given port; killed at teardown."""
    started: list[ServerProcess] = []

    def start(server: Server | None = None) -> ServerProcess:
        started.append(ServerProcess(str(tiny_model), server))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def without_other_families(family: str) -> dict[str, str]:
    """Return the variable of SGLang that leaves all model families but one unimported.

    The scheduler imports some 250 modules of models: a fifth of the CPU time of a start.
    """
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "srt/models"
    names = {module.name for module in pkgutil.iter_modules([str(folder)])}
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(names - {family}))}


@pytest.fixture(scope="session")
def sglang_server(tiny_model, sglang) -> Iterator[SGLangServer]:
    """One real SGLang server in float32 on the CPU, with the tiny model; its workers are forks."""
    environment = without_other_families("llama") | {
        "PYTHONPATH": os.pathsep.join([str(SHIM), str(Path(__file__).parents[2])])
    }
    with sglang(tiny_model, env=environment, module="tests.rollout.forked_sglang") as server:
        yield server
