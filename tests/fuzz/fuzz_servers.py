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

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["x"],
    "stream": False,
    "seed": 1,
    "logit_bias": {"5": 1},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "auto",
        "n": 1,
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 0,
        "response_format": {"type": "text"},
        **SAMPLING,
    },
    "/v1/completions": {
        "model": "m",
        "prompt": "2+2=",
        "max_tokens": 4,
        "echo": True,
        "logprobs": 1,
        **SAMPLING,
    },
    "/v1/responses": {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "?"}]}],
        "instructions": "Be brief.",
        "tools": [{"type": "function", **WEATHER}],
        "max_output_tokens": 9,
        "text": {"format": {"type": "text"}},
        "temperature": 0.5,
        "stream": False,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": "?"}],
        "stop_sequences": ["x"],
        "stream": False,
        "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
        "tool_choice": {"type": "auto"},
    },
    "/v1/messages/count_tokens": {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        "system": "s",
    },
    "/v1/rl/set_reward": {"reward": 0.5, "interaction_id": None},
    "/v1/export_trajectories": {"session_id": "x"},
}
ANSWERS = [
    "4",
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
    "<think>5</think>6",
]


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
        for path, body in BODIES.items()
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

SGLANG_REPLY = {
    "text": "ab",
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "completion_tokens": 2,
        "prompt_tokens": 3,
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "weight_version": "3",
        "weight_versions": [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}],
        "input_token_logprobs": [[None, 4, None], [-0.5, 5, None], [-0.5, 6, None]],
    },
}
VLLM_REPLY = {
    "request_id": f"{vllm_wire.REQUEST}r",
    "choices": [
        {
            "token_ids": [7, 8],
            "finish_reason": "stop",
            "logprobs": {"content": [{"logprob": -0.5, "token_id": 7}, {"logprob": -0.25, "token_id": 8}]},
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        }
    ],
    "prompt_logprobs": [{"5": {"logprob": -0.5}}, {"6": {"logprob": -1.0}}],
}
CHECKSUMS = {"ranks": [{"checksums": {"a.weight": "00"}, "parallelism_info": [{"tp_size": 1}]}]}
VLLM_CONFIG = {
    "model_config": {"model": "m", "dtype": "x", "logprobs_mode": "processed_logprobs"},
    "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
    "weight_transfer_config": {"backend": "areal"},
    "device_config": {"device": "cpu"},
    "lora_config": None,
}
IDENTITY = {
    "version": "0.5.5",
    "model_path": "m",
    "architectures": ["X"],
    "weight_version": "3",
    "device": "cpu",
    "dtype": "float32",
    "enable_lora": False,
    "tp_size": 1,
    "loaded_adapters": ["a"],
    "checksums": {"a": "0"},
    "vllm_config": VLLM_CONFIG,
}
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
    documents = {
        "sglang": SGLANG_REPLY,
        "sglang score": SGLANG_REPLY,
        "vllm": VLLM_REPLY,
        "vllm score": VLLM_REPLY,
    }
    documents |= {"checksums": CHECKSUMS}
    return {
        name: {"reader": name.encode(), "body.json": json.dumps(documents.get(name, IDENTITY)).encode()}
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
