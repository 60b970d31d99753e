"""Records of an agent that looks at a picture and asks tools, one of which may fail."""

import asyncio
from dataclasses import replace
from pathlib import Path

import openai

from areal_core.agent.agent_workflow import AgentWorkflow
from areal_core.config import AgentConfig, GenerationHyperparameters
from areal_core.data.image_rows import shape_rows
from areal_core.data.images import data_url
from areal_core.data.processor import VisionProcessor
from areal_core.rollout.episodes import assemble
from areal_core.rollout.types import ModelRequest, ModelResponse
from areal_core.testing import complete_response
from areal_core.testing.tiny_vision import make_tiny_processor
from recorder import RecordingOptions
from recorder.environment import folder_identity
from recorder.testing import SCRIPTED_HEADER, send_step
from tests.recorder.ranks import begin

PICTURES = [row["images"][0] for row in shape_rows(num_rows=3, size=32)]
PROCESSOR = VisionProcessor(make_tiny_processor("qwen2_5_vl"))
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("measure", "search")
]
ASKS = "".join(
    f'<tool_call>{{"name": "{tool["function"]["name"]}", "arguments": {{"n": 1}}}}</tool_call>'
    for tool in TOOLS
)
RESULTS = ("32 pixels", "a square")
FAILURE = "TimeoutError: no answer of the index"


class Engine:
    """Asks both tools, then answers."""

    version = 0

    def __init__(self, answer: str) -> None:
        self.lines = [ASKS, answer]

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        tokenizer = PROCESSOR.tokenizer
        tokens = [*tokenizer.encode(self.lines.pop(0), add_special_tokens=False), tokenizer.eos_token_id]
        return complete_response(req, tokens)


class LookingAgent:
    """Sends a picture, calls the tools that the model asks for, and gives 1 for "square"."""

    def __init__(self, picture: bytes, results: tuple[str, ...]) -> None:
        self.picture, self.results = picture, results

    async def run(self, data, base_url, api_key, **extra):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            content = [
                {"type": "text", "text": data["question"]},
                {"type": "image_url", "image_url": {"url": data_url(self.picture)}},
            ]
            messages = [{"role": "user", "content": content}]
            reply = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            messages.append(reply.choices[0].message)
            for call, result in zip(reply.choices[0].message.tool_calls, self.results, strict=True):
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            last = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        return float("square" in last.choices[0].message.content)


def episode(picture: bytes, results: tuple[str, ...], answer: str, style: str):
    sampling = GenerationHyperparameters(max_new_tokens=200, max_tokens=4096)
    agent = LookingAgent(picture, results)
    options = AgentConfig(export_style=style)
    workflow = AgentWorkflow(agent, sampling, PROCESSOR.tokenizer, options, None, PROCESSOR)
    try:
        return asyncio.run(workflow.arun_episode(Engine(answer), {"question": "Which shape?"}))
    finally:
        workflow.close()


def write_agent_record(
    folder: Path,
    results: tuple[str, ...] = RESULTS,
    picture: bytes = PICTURES[0],
    style: str = "concat",
    model: Path | None = None,
) -> Path:
    """Write step 0 of two prompts with an episode each; that of prompt 5 gets `results`.

    Its tokenizer is saved in `model`, if it is given.
    """
    batch = assemble(
        [
            (5, [episode(picture, results, "a square", style)]),
            (7, [episode(PICTURES[2], RESULTS, "a circle", style)]),
        ]
    )
    header = SCRIPTED_HEADER
    if model is not None:
        PROCESSOR.tokenizer.save_pretrained(model)
        header = replace(header, tokenizer=folder_identity(str(model)))
    (writer,) = begin(folder, options=RecordingOptions(text=True), header=header)
    writer.tokenizer = PROCESSOR.tokenizer
    send_step(writer, 0, batch)
    writer("end", steps=1, error=None)
    return folder
