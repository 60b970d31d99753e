"""Structured outputs and forced calls of agent frameworks, as far as they are installed.

The engine is scripted; `test_required_output.py` samples under the same grammars.
"""

import asyncio
import json
from typing import Literal

import pytest
from pydantic import BaseModel

# Libraries warn about their own dependencies, and close their connections after the loop.
pytestmark = pytest.mark.filterwarnings("ignore")
ASK = "Describe Oslo."
JSON = '{"name": "Oslo", "size": 3}'


class City(BaseModel):
    """A city."""

    name: Literal["Oslo", "Rome"]
    size: int


OSLO = City(name="Oslo", size=3)


def called(name: str, arguments: str = JSON) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def grammars(engine) -> list[str]:
    return [name for request in engine.requests for name in request.sampling.server_only]


@pytest.mark.parametrize(
    ("method", "line", "grammar"),
    [
        ("json_schema", JSON, "json_schema"),
        ("json_mode", JSON, "json_schema"),
        ("function_calling", called("City"), "structural_tag"),
    ],
)
def test_langchain_with_structured_output(run_client, scripted_engine, method, line, grammar):
    langchain_openai = pytest.importorskip("langchain_openai")

    async def body(server):
        model = langchain_openai.ChatOpenAI(base_url=server.base_url, api_key=server.api_key, model="m")
        return await model.with_structured_output(City, method=method).ainvoke(ASK)

    engine = scripted_engine(line)
    found, _ = run_client(engine, body, reasoning_parser="none")
    assert (found, grammars(engine)) == (OSLO, [grammar])


def test_litellm_response_format_and_required_call(run_client, scripted_engine):
    litellm = pytest.importorskip("litellm")

    async def body(server):
        messages = [{"role": "user", "content": ASK}]
        schema = City.model_json_schema()
        tools = [{"type": "function", "function": {"name": "city", "parameters": schema}}]
        ours = {"model": "openai/m", "api_base": server.base_url, "api_key": server.api_key}
        theirs = ours | {"model": "anthropic/m"}
        first = await litellm.acompletion(**ours, messages=messages, response_format=City)
        forced = {"messages": messages, "tools": tools, "tool_choice": "required"}
        second = await litellm.acompletion(**ours, **forced)
        third = await litellm.acompletion(**theirs, **forced, max_tokens=50)
        calls = [reply.choices[0].message.tool_calls[0].function.arguments for reply in (second, third)]
        return [first.choices[0].message.content, *calls]

    engine = scripted_engine(JSON, called("city"), called("city"))
    found, _ = run_client(engine, body, reasoning_parser="none")
    assert [json.loads(text) for text in found] == [json.loads(JSON)] * 3
    assert grammars(engine) == ["json_schema", "structural_tag", "structural_tag"]


@pytest.mark.parametrize("kind", ["chat", "chat native", "responses", "anthropic"])
def test_pydantic_ai_output_type(run_client, scripted_engine, kind):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async def body(server):
        if kind == "anthropic":
            provider = AnthropicProvider(api_key=server.api_key, base_url=server.base_url)
            model = AnthropicModel("claude-sonnet-4-5", provider=provider)
        else:
            provider = OpenAIProvider(api_key=server.api_key, base_url=server.base_url)
            model = (OpenAIResponsesModel if kind == "responses" else OpenAIChatModel)("m", provider=provider)
        output = pydantic_ai.NativeOutput(City) if kind == "chat native" else City
        return (await pydantic_ai.Agent(model, output_type=output).run(ASK)).output

    native = kind == "chat native"
    engine = scripted_engine(JSON if native else called("final_result"))
    found, _ = run_client(engine, body, reasoning_parser="none")
    assert (found, grammars(engine)) == (OSLO, ["json_schema" if native else "structural_tag"])


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("has_tools", [False, True])
def test_openai_agents_output_type(run_client, scripted_engine, api, has_tools):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        return f"rain in {city}"

    async def body(server):
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        tools = [weather] if has_tools else []
        agent = agents.Agent(name="a", model=kind("m", server.openai()), output_type=City, tools=tools)
        return (await agents.Runner.run(agent, ASK)).final_output

    engine = scripted_engine(*[called("weather", '{"city": "Oslo"}')] * has_tools, JSON)
    found, _ = run_client(engine, body, reasoning_parser="none")
    assert found == OSLO
    assert grammars(engine) == (["structural_tag"] * 2 if has_tools else ["json_schema"])


def test_langgraph_agent_with_a_response_format(run_client, scripted_engine):
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain.agents import create_agent

    async def body(server):
        model = langchain_openai.ChatOpenAI(base_url=server.base_url, api_key=server.api_key, model="m")
        agent = create_agent(model, [], response_format=City)
        return (await agent.ainvoke({"messages": [("user", ASK)]}))["structured_response"]

    found, _ = run_client(scripted_engine(called("City")), body, reasoning_parser="none")
    assert found == OSLO


def test_smolagents_tool_calling_agent(run_client, scripted_engine):
    smolagents = pytest.importorskip("smolagents")

    async def body(server):
        model = smolagents.OpenAIServerModel(model_id="m", api_base=server.base_url, api_key=server.api_key)
        agent = smolagents.ToolCallingAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
        return await asyncio.to_thread(agent.run, "2 + 2?")

    engine = scripted_engine(called("final_answer", '{"answer": "4"}'))
    found, _ = run_client(engine, body, reasoning_parser="none", gconfig={"max_tokens": 9000})
    assert (found, grammars(engine)) == ("4", ["structural_tag"])
