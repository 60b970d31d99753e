"""A scripted engine, a tokenizer with tools in its template, and a workflow around an agent."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from areal_core.agent.agent_workflow import AgentWorkflow
from areal_core.config import AgentConfig, GenerationHyperparameters
from areal_core.rollout.types import ModelRequest, ModelResponse
from areal_core.testing import make_tiny_tokenizer
from recorder import RecordingOptions, RecordWriter
from recorder.header import write_header
from recorder.testing import SCRIPTED_HEADER, send_step

if TYPE_CHECKING:
    import anthropic

TEMPLATE = (
    "{% if tools %}<|system|>tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}"
    "<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": WEATHER}
CALLS_WEATHER = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def trained_text(tokenizer, rows) -> list[str]:
    """Return the tokens in the loss mask of each row, as text."""
    return [tokenizer.decode(i[m.bool()]) for i, m in zip(rows["input_ids"], rows["loss_mask"], strict=True)]


def record_step(folder: Path, batch, step: int = 0, config: dict | None = None) -> Path:
    """Write a record with texts of one step into a new folder, and return the folder."""
    folder.mkdir()
    writer = RecordWriter(folder, options=RecordingOptions(text=True))
    write_header(folder, replace(SCRIPTED_HEADER, config=config or SCRIPTED_HEADER.config))
    send_step(writer, step, batch)
    writer("end", steps=step + 1, error=None)
    return folder


class LineEngine:
    """Answer each request with the next scripted line and <|end|>.

    A line that ends with '...' is cut off by its length instead. The logprob of the i-th token of a
    reply is -(i + 1) / 8, exact in float32.
    """

    def __init__(self, tokenizer, lines: list[str], version: int = 3) -> None:
        self.tokenizer = tokenizer
        self.lines = list(lines)
        self.version = version
        self.requests: list[ModelRequest] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        req.num_new_tokens()
        line = self.lines.pop(0)
        cut = line.endswith("...")
        tokens = self.tokenizer.encode(line, add_special_tokens=False)
        tokens += [] if cut else [self.tokenizer.eos_token_id]
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=tokens,
            output_logprobs=[-(i + 1) / 8 for i in range(len(tokens))],
            output_versions=[self.version] * len(tokens),
            stop_reason="length" if cut else "stop",
        )


@pytest.fixture(scope="session")
def tokenizer():
    made = make_tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def scripted_engine(tokenizer) -> Callable[..., LineEngine]:
    return lambda *lines, **options: LineEngine(tokenizer, list(lines), **options)


@pytest.fixture
def make_workflow(tokenizer) -> Iterator[Callable[..., AgentWorkflow]]:
    """`make_workflow(agent, gconfig_options, **agent_options)`; closed at teardown."""
    made = []

    def make(
        agent, gconfig: dict | None = None, agent_kwargs: dict | None = None, **options
    ) -> AgentWorkflow:
        sampling = GenerationHyperparameters(**{"max_new_tokens": 64, "max_tokens": 1024} | (gconfig or {}))
        made.append(AgentWorkflow(agent, sampling, tokenizer, AgentConfig(**options), agent_kwargs))
        return made[-1]

    yield make
    for workflow in made:
        workflow.close()


@pytest.fixture
def episode(make_workflow):
    """Run one episode: `episode(agent, engine, data, **options)` returns its rows."""

    def run(agent, engine, data: dict | None = None, **options):
        return asyncio.run(make_workflow(agent, **options).arun_episode(engine, data or {}))

    return run


class Client:
    """What an agent gets to call the proxy, over a socket."""

    def __init__(self, base_url: str, api_key: str, http: httpx.AsyncClient) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.http = http

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, http_client=self.http, max_retries=0
        )

    def anthropic(self) -> "anthropic.AsyncAnthropic":
        import anthropic  # as much as torch: not where tests are only collected

        # A separate connection: newer releases are built on httpx2 and reject a client of httpx.
        return anthropic.AsyncAnthropic(base_url=self.base_url, api_key=self.api_key, max_retries=0)

    async def post(self, path: str, content: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.api_key}"}
        return await self.http.post(f"{self.base_url}{path}", content=content, headers=headers)


class Talk:
    """An agent that runs the given coroutine function and keeps its result in `seen`."""

    def __init__(self, body) -> None:
        self.body = body
        self.seen = None

    async def run(self, data, **extra):
        async with httpx.AsyncClient() as http:  # a socket, not the shared in-process client
            self.seen = await self.body(Client(extra["base_url"], extra["api_key"], http))
        return 1.0


@pytest.fixture
def run_client(episode):
    """Return the result of `body(client)` and the rows: `run_client(engine, body, **options)`."""

    def run(engine, body, **options):
        agent = Talk(body)
        rows = episode(agent, engine, **options)
        return agent.seen, rows

    return run
