"""Agents of real frameworks around one weather tool; `fault` makes the tool or the agent fail.

Each framework is imported by its agent only. Their reward is 1 for an answer with "rain".
"""

import asyncio

import pydantic

QUESTION = "Does it rain in Oslo?"


def scored(answer: object) -> float:
    return float("rain" in str(answer))


class Weather:
    """The tool, and the options that every agent has."""

    def __init__(self, max_turns: int = 3, fault: str = "", validate: bool = False) -> None:
        self.max_turns, self.fault, self.validate = max_turns, fault, validate

    def weather(self, city: str) -> str:
        """Return the weather of a city.

        Args:
            city: its name.
        """
        if self.fault == "tool":
            raise ConnectionError("the database of the weather does not answer")
        return f"rain in {city}"


class Answer(pydantic.BaseModel):
    city: str
    rain: bool


class OpenAIAgents(Weather):
    api = "chat"

    async def run(self, data, **extra):
        import agents
        import openai

        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], max_retries=0)
        kind = agents.OpenAIChatCompletionsModel if self.api == "chat" else agents.OpenAIResponsesModel
        agent = agents.Agent(
            "helper",
            instructions="Help.",
            model=kind(model="m", openai_client=client),
            tools=[agents.function_tool(self.weather, failure_error_function=None)],
        )
        result = await agents.Runner.run(agent, data.get("ask", QUESTION), max_turns=self.max_turns)
        return scored(result.final_output)


class OpenAIResponsesAgents(OpenAIAgents):
    api = "responses"


class LangGraph(Weather):
    async def run(self, data, **extra):
        from langchain.agents import create_agent
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(model="m", base_url=extra["base_url"], api_key=extra["api_key"], max_retries=0)
        graph = create_agent(model, [self.weather], system_prompt="Help.")
        messages = {"messages": [("user", data.get("ask", QUESTION))]}
        result = await graph.ainvoke(messages, {"recursion_limit": 2 * self.max_turns})
        answer = result["messages"][-1].content
        return scored(Answer.model_validate_json(answer).rain and "rain") if self.validate else scored(answer)


class PydanticAI(Weather):
    async def run(self, data, **extra):
        from pydantic_ai import Agent, ModelRetry
        from pydantic_ai.usage import UsageLimits

        agent = Agent(self.model(extra), system_prompt="Help.", tools=[self.weather], retries=1)
        if self.validate:

            @agent.output_validator
            def check(answer: str) -> str:
                if "rain" not in answer:
                    raise ModelRetry("say whether it rains")
                return answer

        limits = UsageLimits(request_limit=self.max_turns)
        result = await agent.run(data.get("ask", QUESTION), usage_limits=limits)
        return scored(result.output)

    def model(self, extra):
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return OpenAIChatModel(
            "m", provider=OpenAIProvider(base_url=extra["base_url"], api_key=extra["api_key"])
        )


class PydanticAIAnthropic(PydanticAI):
    def model(self, extra):
        import anthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = anthropic.AsyncAnthropic(base_url=extra["base_url"], api_key=extra["api_key"], max_retries=0)
        return AnthropicModel("m", provider=AnthropicProvider(anthropic_client=client))


class SmolAgents(Weather):
    """A CodeAgent: it treats errors of code that the model wrote as observations."""

    async def run(self, data, **extra):
        return await asyncio.to_thread(self.run_sync, data, extra)

    def run_sync(self, data, extra):
        from smolagents import CodeAgent, LogLevel, OpenAIServerModel, tool
        from smolagents.models import REMOVE_PARAMETER
        from smolagents.utils import AgentMaxStepsError

        model = OpenAIServerModel(
            *("m", extra["base_url"]),
            api_key=extra["api_key"],
            client_kwargs={"max_retries": 0},
            stop=REMOVE_PARAMETER,  # the embedded engine stops at token ids only
        )

        @tool
        def weather(city: str) -> str:
            """Return the weather of a city.

            Args:
                city: its name.
            """
            return self.weather(city)

        agent = CodeAgent([weather], model, max_steps=self.max_turns, verbosity_level=LogLevel.OFF)
        agent.prompt_templates["system_prompt"] = "Write code between <code> and </code>."
        result = agent.run(data.get("ask", QUESTION), return_full_result=True)
        if self.fault:
            raise KeyError("missing")  # of the agent's own code
        if self.validate and result.state == "max_steps_error":
            raise AgentMaxStepsError("no answer", agent.logger)
        return scored(result.output)


class AutoGen(Weather):
    async def run(self, data, **extra):
        from autogen_agentchat.agents import AssistantAgent
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        info = {
            "vision": False, "function_calling": True, "json_output": False, "family": "unknown",
            "structured_output": False,
        }  # fmt: skip
        client = OpenAIChatCompletionClient(
            model="m", base_url=extra["base_url"], api_key=extra["api_key"], max_retries=0, model_info=info
        )
        agent = AssistantAgent(
            "helper", client, tools=[self.weather], system_message="Help.", max_tool_iterations=self.max_turns
        )
        result = await self.ask(agent, data.get("ask", QUESTION))
        if self.fault:
            raise ImportError("No module named 'weather_database'")
        answer = result.messages[-1].to_text()
        return scored(Answer.model_validate_json(answer).rain and "rain") if self.validate else scored(answer)

    async def ask(self, agent, question):
        return await agent.run(task=question)


class AutoGenTeam(AutoGen):
    """A team reports the exceptions of its members as text."""

    async def ask(self, agent, question):
        from autogen_agentchat.conditions import MaxMessageTermination
        from autogen_agentchat.teams import RoundRobinGroupChat

        return await RoundRobinGroupChat([agent], termination_condition=MaxMessageTermination(2)).run(
            task=question
        )
