"""What comes over a connection: bodies to the agent proxy, replies of servers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_core.agent.completion import Dialogue
from areal_core.agent.proxy import AgentProxy
from areal_core.rollout.errors import MalformedReply
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.servers import sglang as sglang_wire
from areal_core.servers import vllm as vllm_wire
from areal_core.servers.reply import Asked, Chunk, Scored, checked
from areal_core.testing import complete_response, make_tiny_tokenizer

from ..agent.conftest import TEMPLATE
from .inputs import Case, Files
from .targets import Target

GIVEN = json.loads(Path(__file__).with_name("servers.json").read_text())
ANSWERS: list[str] = GIVEN["answers"]


class Scripted:
    """An engine that answers with one of the scripted lines."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.count = tokenizer, 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.count += 1
        req.num_new_tokens()
        tokens = self.tokenizer.encode(ANSWERS[self.count % len(ANSWERS)], add_special_tokens=False)
        tokens.append(self.tokenizer.eos_token_id)
        return complete_response(req, tokens, version=3)


def proxy_bases(folder: Path) -> dict[str, Files]:
    headers = b"Bearer SESSION"
    return {
        path: {"path": path.encode(), "body.json": json.dumps(body).encode(), "authorization": headers}
        for path, body in GIVEN["bodies"].items()
    }


def run_proxy(case: Case, box: Path) -> None:
    """Every reply is JSON or events, in UTF-8; a request never fails the server."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    proxy = AgentProxy(Dialogue(tokenizer=tokenizer, sampling=Sampling(max_new_tokens=64)), "k" * 32)

    async def answered() -> None:
        session = proxy.sessions.open(Scripted(tokenizer).agenerate, asyncio.get_running_loop())
        text = {name: case.files.get(name, b"").decode("latin-1") for name in ("path", "authorization")}
        headers = {"authorization": text["authorization"].replace("SESSION", session.key)}
        for _ in range(2):  # the second call follows an answered one
            reply = await proxy.answer("POST", text["path"], headers, case.files.get("body.json", b""))
            assert reply.status < 500, f"{text['path']}: {reply.status} {reply.body[:300]!r}"
            content = reply.body.decode()
            if reply.content_type == "application/json":
                json.loads(content)
        export = json.dumps({"session_id": session.id}).encode()
        reply = await proxy.answer("POST", "/export_trajectories", {"x-api-key": "k" * 32}, export)
        assert reply.status == 200, reply.body[:300]

    asyncio.run(answered())


# Replies of inference servers

ASKED, SCORED = Asked("r", 2, 100, 3), Asked("", 2, None, None)
SGLANG, VLLM = sglang_wire.SGLANG, vllm_wire.VLLM


def chunk_of(scored: Scored) -> Chunk:
    return Chunk([5, 6], scored.logprobs, [scored.version] * 2, "stop", "")


READERS: dict[str, Callable[[bytes], Any]] = {
    "sglang": lambda body: checked(SGLANG.parse_generate(body), ASKED),
    "vllm": lambda body: checked(VLLM.parse_generate(body), ASKED),
    "sglang score": lambda body: checked(chunk_of(SGLANG.parse_score(body, [5, 6])), SCORED),
    "vllm score": lambda body: checked(chunk_of(VLLM.parse_score(body, [5, 6])), SCORED),
    "checksums": lambda body: SGLANG.parse_checksums(body.decode("utf-8", "replace")),
    "vllm checksums": lambda body: VLLM.parse_checksums(body.decode("utf-8", "replace")),
    "identity": lambda body: sglang_wire.parse_identity(*[body.decode("utf-8", "replace")] * 2),
    "vllm identity": lambda body: vllm_wire.parse_identity(*[body.decode("utf-8", "replace")] * 2, "3"),
    "adapters": lambda body: SGLANG.parse_loaded(body.decode("utf-8", "replace")),
    "version": lambda body: SGLANG.parse_weight_version(body),
    "vllm version": lambda body: VLLM.parse_weight_version(body),
}


def reply_bases(folder: Path) -> dict[str, Files]:
    replies = GIVEN["replies"]
    documents = replies | {f"{engine} score": replies[engine] for engine in ("sglang", "vllm")}
    return {
        name: {
            "reader": name.encode(),
            "body.json": json.dumps(documents.get(name, replies["identity"])).encode(),
        }
        for name in READERS
    }


def run_reply(case: Case, box: Path) -> None:
    reader = READERS.get(case.files["reader"].decode("latin-1"), READERS["sglang"])
    chunk = reader(case.files.get("body.json", b""))
    json.dumps(getattr(chunk, "logprobs", None), allow_nan=False)


TARGETS = {
    "proxy": Target(proxy_bases, run_proxy, ()),
    "replies": Target(reply_bases, run_reply, (MalformedReply,)),
}
