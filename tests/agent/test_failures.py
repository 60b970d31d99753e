"""What the model does wrong is an outcome; what the code does wrong stops the run."""

import asyncio
import json
import logging

import openai
import pydantic
import pytest

from areal_core.agent import EpisodeFailed
from areal_core.agent.conversation import Call, Interaction, Message, ToolCall
from areal_core.agent.failures import FAILURES, failure_of
from areal_core.rollout.errors import PromptTooLong, ServerDied
from areal_core.rollout.types import ModelResponse
from tests.agent.agents_under_test import client_of
from tests.agent.conftest import trained_text

REFUSAL = "a prompt of 60 tokens leaves no room to sample"


def framework_error(name: str, base: type = Exception) -> type[Exception]:
    """A class as a framework has it: 'package.Class', in a module of the package."""
    package, _, kind = name.partition(".")
    return type(kind, (base,), {"__module__": f"{package}.some.errors"})


def answered(content: str = "", arguments: str = "{}", stop_reason: str = "stop") -> Interaction:
    response = ModelResponse(
        input_tokens=[1],
        output_tokens=[2],
        output_logprobs=[-1.0],
        output_versions=[0],
        stop_reason=stop_reason,
    )
    message = Message("assistant", content, (ToolCall("1", "weather", arguments),))
    call = Call(messages=(Message("user", "?"),))
    return Interaction(
        id="a", turn=0, call=call, response=response, message=message, created=0, latency_s=0.0
    )


def raised_by(function, *arguments) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (any)
        function(*arguments)
    return caught.value


def chained(outer: Exception, origin: Exception) -> Exception:
    outer.__cause__ = origin
    return outer


class City(pydantic.BaseModel):
    city: str
    rain: bool


TURNS = framework_error("agents.MaxTurnsExceeded")("too many")
BEHAVIOUR = framework_error("agents.ModelBehaviorError")("no such tool")
DATABASE = ConnectionError("the database is dead")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BEHAVIOUR, "invalid_output"),
        (TURNS, "too_many_turns"),
        (
            framework_error("own.Derived", framework_error("langgraph.GraphRecursionError"))(),
            "too_many_turns",
        ),
        (EpisodeFailed("it gave up"), "declared"),
        (chained(RuntimeError("the episode failed"), BEHAVIOUR), "invalid_output"),
        (chained(RuntimeError("a"), chained(RuntimeError("b"), TURNS)), "too_many_turns"),
        (ExceptionGroup("of tasks", [BEHAVIOUR, ExceptionGroup("inner", [TURNS])]), "invalid_output"),
        (RuntimeError(f"BadRequestError: {REFUSAL}: max_tokens is 60"), "prompt_too_long"),
        (raised_by(json.loads, "{city"), "invalid_output"),
        (raised_by(City.model_validate_json, '{"city": 5, "rain": true}'), "invalid_output"),
        (framework_error("own.Refused")(), "declared"),
        (framework_error("any.ByClass")(), "declared"),
        # Faults of the code.
        (ImportError("No module named 'x'"), None),
        (DATABASE, None),
        (KeyError("row"), None),
        (TimeoutError(), None),
        (framework_error("agents.UserError")("a tool failed"), None),
        (framework_error("smolagents.AgentGenerationError")("connection"), None),
        (framework_error("mine.ModelBehaviorError")("of another package"), None),
        (chained(framework_error("agents.UserError")("a tool failed"), DATABASE), None),
        (ExceptionGroup("of tasks", [BEHAVIOUR, DATABASE]), None),
        (raised_by(json.loads, "<html>"), None),
        (raised_by(City.model_validate, {"city": 6, "rain": 7}), None),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(type(value), "__name__", str(value)),
)
def test_an_exception_is_the_models_only_on_evidence(error, kind):
    answers = [answered("{city"), answered('{"city": 5, "rain": true}')]
    added = ("own.Refused", "ByClass")
    assert failure_of(error, answers, [REFUSAL], added) == kind


async def ask(extra, content: str):
    messages = [{"role": "user", "content": content}]
    return await client_of(extra).chat.completions.create(model="m", messages=messages)


class Raiser:
    """Make two calls, reward the first over HTTP, then raise what `data["raise"]` names."""

    async def run(self, data, **extra):
        for content in "ab"[: data.get("calls", 2)]:
            await ask(extra, content * data.get("length", 1))
        raise {"model": EpisodeFailed("it invented a tool"), "code": KeyError("row")}[data["raise"]]


def test_a_failed_episode_keeps_its_rows_with_the_failed_reward(
    make_workflow, scripted_engine, tokenizer, caplog
):
    workflow = make_workflow(
        f"{__file__}:Raiser", failed_reward=-0.5, turn_discount=0.5, export_style="concat"
    )

    def episode(what: str, *lines: str, **data):
        return asyncio.run(workflow.arun_episode(scripted_engine(*lines), {"raise": what, **data}))

    with caplog.at_level(logging.WARNING):
        rows = episode("model", "x", "y")
        assert episode("model", "x", "y")["failure"].tolist() == [1, 1]
    assert rows["rewards"].tolist() == [-0.25, -0.5]
    assert [FAILURES[kind] for kind in rows["failure"].tolist()] == ["declared", "declared"]
    assert trained_text(tokenizer, rows) == ["x<|end|>", "y<|end|>"]
    assert caplog.text.count("the model failed an episode (declared), whose reward is") == 1
    assert "EpisodeFailed: it invented a tool" in caplog.text
    with pytest.raises(KeyError, match="row"):
        episode("code", "x", "y")
    with pytest.raises(EpisodeFailed, match="it invented a tool"):
        episode("model", calls=0)  # nothing was sampled, so there is no row


def test_a_prompt_that_grew_too_long_is_an_outcome_and_one_that_always_was_stops_the_run(
    episode, scripted_engine
):
    class Growing:
        async def run(self, data, **extra):
            for length in data["lengths"]:
                await ask(extra, "x" * length)

    options = {"gconfig": {"max_tokens": 30}, "failed_reward": -1.0}
    rows = episode(Growing(), scripted_engine("a"), {"lengths": [5, 50]}, **options)
    assert rows["rewards"].tolist() == [-1.0]
    assert [FAILURES[kind] for kind in rows["failure"].tolist()] == ["prompt_too_long"]
    with pytest.raises(PromptTooLong, match="leaves no room to sample"):
        episode(Growing(), scripted_engine("a"), {"lengths": [50]}, **options)


def test_an_error_of_the_engine_is_never_the_models(episode, scripted_engine):
    class Dying:
        version = 0
        answers = scripted_engine("a")

        async def agenerate(self, req):
            if not self.answers.lines:
                raise ServerDied("no inference server is left")
            return await self.answers.agenerate(req)

    class Translating:
        """Report every failure of a call as one of the model."""

        async def run(self, data, **extra):
            try:
                for content in "ab":
                    await ask(extra, content)
            except openai.APIError as error:
                raise EpisodeFailed("no answer") from error

    with pytest.raises(ServerDied, match="no inference server is left"):
        episode(Translating(), Dying())
