"""Agents send pictures through all three APIs, by the official clients; rows have their bytes."""

import asyncio
import base64
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import openai
import pytest

from areal_core.agent.agent_workflow import AgentWorkflow
from areal_core.config import AgentConfig, GenerationHyperparameters
from areal_core.data.image_rows import shape_rows
from areal_core.data.images import data_url
from areal_core.data.processor import VisionProcessor
from areal_core.rollout.episodes import refuse_malformed, refuse_unusable
from areal_core.rollout.types import ModelRequest, ModelResponse
from areal_core.testing import complete_response
from areal_core.testing.tiny_vision import make_tiny_processor

ONE, TWO = (row["images"][0] for row in shape_rows(num_rows=2, size=32))
BASE64 = base64.b64encode(ONE).decode()
PROCESSOR = VisionProcessor(make_tiny_processor("qwen2_5_vl"))
TOKENIZER = PROCESSOR.tokenizer
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": data_url(ONE)}}


class Engine:
    """Answers with "3" and the end of the turn."""

    version = 0

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        tokens = [*TOKENIZER.encode("3", add_special_tokens=False), TOKENIZER.eos_token_id]
        return complete_response(req, tokens)


def run(body, processor=PROCESSOR, **options):
    """Return what `body(base_url, api_key)` returns, the rows, and the engine's requests."""
    engine, seen = Engine(), []

    class Agent:
        async def run(self, data, base_url, api_key, **extra):
            seen.append(await body(base_url, api_key))
            return 1.0

    sampling = GenerationHyperparameters(max_new_tokens=8, max_tokens=512)
    workflow = AgentWorkflow(Agent(), sampling, TOKENIZER, AgentConfig(**options), None, processor)
    try:
        rows = asyncio.run(workflow.arun_episode(engine, {}))
    finally:
        workflow.close()
    refuse_unusable(rows)
    refuse_malformed(rows)
    return seen[0], rows, engine.requests


def expected(*parts) -> list[int]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts
    ]
    images = [part for part in parts if isinstance(part, bytes)]
    return PROCESSOR.prompt([{"role": "user", "content": content}], images).input_ids


async def chat(base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        content = [{"type": "text", "text": "a"}, CHAT_IMAGE, {"type": "text", "text": "b"}]
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}]
        )
        return reply.choices[0].message.content


async def responses(base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        content = [
            {"type": "input_text", "text": "a"},
            {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"},
            {"type": "input_text", "text": "b"},
        ]
        reply = await client.responses.create(model="m", input=[{"role": "user", "content": content}])
        return reply.output_text


async def messages(base_url, api_key):
    import anthropic  # as much as torch: not where tests are only collected

    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0) as client:
        source = {"type": "base64", "media_type": "image/png", "data": BASE64}
        content = [
            {"type": "text", "text": "a"},
            {"type": "image", "source": source},
            {"type": "text", "text": "b"},
        ]
        reply = await client.messages.create(
            model="m", max_tokens=8, messages=[{"role": "user", "content": content}]
        )
        return reply.content[0].text


@pytest.mark.parametrize("body", [chat, responses, messages])
def test_a_picture_between_texts_reaches_engine_and_batch(body):
    text, rows, [sent] = run(body)
    prompt = expected("a", ONE, "b")
    assert text == "3"
    assert (sent.input_ids, sent.images) == (prompt, (ONE,))
    assert PROCESSOR.image_token_id in sent.sampling.stop_token_ids
    types = [int(token == PROCESSOR.image_token_id) for token in prompt]
    assert rows["mm_token_type_ids"].tolist() == [[*types, 0, 0]]
    assert rows["image_count"].tolist() == [1]
    assert rows["image_data"].numpy().tobytes() == ONE


@pytest.mark.parametrize("style", ["hf", "concat"])
def test_a_conversation_is_one_row_with_all_its_pictures(style):
    async def body(base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            said = [{"role": "user", "content": [CHAT_IMAGE, {"type": "text", "text": "?"}]}]
            for picture in (TWO, None):
                reply = await client.chat.completions.create(model="m", messages=said)
                said.append({"role": "assistant", "content": reply.choices[0].message.content})
                second = {"type": "image_url", "image_url": {"url": data_url(picture or ONE)}}
                said.append({"role": "user", "content": [second] if picture else "now?"})
            await client.chat.completions.create(model="m", messages=said)

    _, rows, requests = run(body, chat_template_type=style, export_style="concat")
    assert [request.images for request in requests] == [(ONE,), (ONE, TWO), (ONE, TWO)]
    assert rows["image_count"].tolist() == [2]
    assert rows["image_data"].numpy().tobytes() == ONE + TWO
    num_tokens = len(expected(ONE)) - len(expected())
    assert rows["input_ids"].shape[1] == len(requests[2].input_ids) + 2
    assert int(rows["mm_token_type_ids"].sum()) == 2 * (num_tokens - 2)  # without start and end


def test_another_picture_of_the_same_size_does_not_continue_a_conversation():
    async def body(base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for picture in (ONE, TWO):
                image = {"type": "image_url", "image_url": {"url": data_url(picture)}}
                said = [{"role": "user", "content": [image]}]
                if picture is TWO:
                    said += [{"role": "assistant", "content": "3"}, {"role": "user", "content": "?"}]
                await client.chat.completions.create(model="m", messages=said)

    _, rows, requests = run(body, export_style="concat")
    assert requests[1].input_ids[: len(requests[0].input_ids)] == requests[0].input_ids
    assert rows["image_count"].tolist() == [1, 1]
    assert rows["image_data"].numpy().tobytes() == ONE + TWO


def refusal_of(message: dict, processor=PROCESSOR, **options) -> str:
    async def body(base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=[message])
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
            return refused.value.body["message"]

    return run(body, processor, **options)[0]


def image_message(url: str, role: str = "user") -> dict:
    return {"role": role, "content": [{"type": "image_url", "image_url": {"url": url}}]}


@pytest.mark.parametrize(
    ("message", "seen_text"),
    [
        (image_message("http://127.0.0.1:1/a.png"), "set rollout.agent.remote_images to true"),
        (image_message("file:///etc/passwd"), "neither a data: URL nor http"),
        (image_message("data:image/png;base64,AAAA"), "cannot be read; expected a complete file of PNG"),
        (image_message(data_url(ONE), "assistant"), "an assistant message contains an image"),
        ({"role": "user", "content": "<|image_pad|>"}, "1 placeholders of images and 0 images"),
    ],
)
def test_pictures_that_cannot_be_used_are_refused_with_a_sentence(message, seen_text):
    assert seen_text in refusal_of(message)


def test_remote_pictures_are_fetched_if_the_option_allows_it():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(TWO)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        async def body(base_url, api_key):
            async with httpx.AsyncClient() as http:
                said = [image_message(f"http://127.0.0.1:{server.server_port}/a.png")]
                headers = {"authorization": f"Bearer {api_key}"}
                body = {"model": "m", "messages": said}
                answered = await http.post(f"{base_url}/chat/completions", json=body, headers=headers)
                return answered.status_code

        status, rows, _ = run(body, remote_images=True)
        server.shutdown()
    assert status == 200
    assert rows["image_data"].numpy().tobytes() == TWO
