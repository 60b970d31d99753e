"""`areal-debug agent replay`: run an agent again on recorded answers, name what differs first."""

import asyncio
import json

import pytest

from areal_core.agent.agents import load_agent
from areal_core.rollout.episodes import assemble
from tests.agent.conftest import record_step
from tests.command_line import invoke, reported

# The variant is an argument of the agent; "" is the recorded one.
AGENT = """
import asyncio
from openai import AsyncOpenAI

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

class Agent:
    def __init__(self, variant=""):
        self.variant = variant

    async def run(self, data, **extra):
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"], max_retries=0)
        variant = self.variant
        tool = TOOL if variant != "tools" else {**TOOL, "function": {**TOOL["function"], "description": "new"}}
        system = "be short" if variant != "message" else "be shorter"
        messages = [{"role": "system", "content": system}, *data["messages"]]
        options = {"top_p": 0.5} if variant == "options" else {}

        async def call():
            reply = await client.chat.completions.create(model="m", messages=messages, tools=[tool], **options)
            messages.append(reply.choices[0].message)
            return reply.choices[0].message

        first = await call()
        if variant == "fewer":
            return 1.0
        for number, each in enumerate(first.tool_calls):
            result = f"result {number}"
            if variant == "tool" and number == 1:
                result = "result one"
            if variant == "raises":
                raise RuntimeError("no connection")
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
        last = await call()
        while variant == "stubborn":
            try:
                await call()
            except Exception:
                await asyncio.sleep(0)
        if variant == "more":
            await call()
        if variant == "failure":
            from areal_core.agent import EpisodeFailed
            raise EpisodeFailed("gave up")
        return 0.0 if variant == "reward" else 1.0


class Together:
    async def run(self, data, **extra):
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"], max_retries=0)

        async def ask(text):
            await asyncio.sleep(data["delays"][text])
            reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            return reply.choices[0].message.content

        texts = await asyncio.gather(ask("a"), ask("b"))
        return 1.0 if texts == ["answer to a", "answer to b"] else 0.0
"""
CALLS = "".join(f'<tool_call>{{"name": "look", "arguments": {{"n": {n}}}}}</tool_call>' for n in (0, 1))
DATA = {"messages": [{"role": "user", "content": "?"}]}


@pytest.fixture
def agents(tmp_path):
    file = tmp_path / "agents.py"
    file.write_text(AGENT)
    return str(file)


@pytest.fixture
def record(tmp_path, tokenizer, make_workflow):
    """`record(agent, engine, data, **options)` records one episode of prompt 5 in step 3."""
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)

    def write(agent, engine, data, **options):
        rows = asyncio.run(make_workflow(load_agent(agent), **options).arun_episode(engine, data))
        config = {
            "experiment_name": "e",
            "trial_name": "t",
            "train_dataset": {"path": "arithmetic", "type": "rl"},
            "actor": {"path": str(model)},
            "gconfig": {"max_new_tokens": 64, "max_tokens": 1024},
            "rollout": {"agent": options},
        }
        return record_step(tmp_path / "record", assemble([(5, [rows])]), 3, config)

    return write


def run_again(episode, *arguments):
    return reported("agent", "replay", episode, *arguments)


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_an_unchanged_agent_does_what_was_recorded(style, record, agents, scripted_engine):
    folder = record(f"{agents}:Agent", scripted_engine(CALLS, "done"), DATA, export_style=style)
    code, report = run_again(f"{folder}#3/5/0", f"{agents}:Agent")
    assert (code, report["differences"]) == (0, [])
    assert (report["num_episodes"], report["num_calls"], report["num_tool_results"]) == (1, 2, 2)


@pytest.mark.parametrize(
    ("variant", "call", "kind", "what", "recorded", "now"),
    [
        ("tool", 1, "tool_result", 'the tool look({"n": 1}) returns something else', "result 1", "result one"),
        ("message", 0, "message", "message 0 (system) is another one", "be short", "be shorter"),
        ("options", 0, "options", "other options are set", {}, {"sampling": {"top_p": 0.5}}),
        ("fewer", 1, "fewer_calls", "the agent ends after 1 calls, and made 2 in the record", None, None),
        ("more", 2, "more_calls", "the agent makes call 2, and made 2 in the record", None, None),
        ("stubborn", 2, "more_calls", "the agent makes call 2, and made 2 in the record", None, None),
        ("raises", 1, "raised", "the agent raises RuntimeError: no connection", None, None),
        ("failure", None, "failure", "the failure of the model is declared, none in the record", None, "declared"),
        ("reward", 1, "reward", "the reward is another one", 1.0, 0.0),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(
    variant, call, kind, what, recorded, now, record, agents, scripted_engine
):
    folder = record(f"{agents}:Agent", scripted_engine(CALLS, "done"), DATA, export_style="concat")
    code, report = run_again(folder, f"{agents}:Agent", "--arg", f"variant={variant}")
    [found] = report["differences"]
    assert code == 1
    assert (found["step"], found["prompt_id"], found["sample"]) == (3, 5, 0)
    assert (found["call"], found["kind"], found["what"]) == (call, kind, what)
    assert (found["recorded"], found["now"]) == (recorded, now)


def test_requests_that_run_together_may_come_in_another_order(record, agents, scripted_engine, tokenizer):
    class ByPrompt(type(scripted_engine())):
        async def agenerate(self, req):
            text = tokenizer.decode(req.input_ids)
            self.lines = [f"answer to {'a' if '<|user|>a' in text else 'b'}"]
            return await super().agenerate(req)

    first = {"delays": {"a": 0.05, "b": 0.0}}
    folder = record(f"{agents}:Together", ByPrompt(tokenizer, []), first)
    file = next(folder.glob("steps/*/calls-*.jsonl"))
    assert [call["messages"][0]["content"] for call in json.loads(file.read_text())["calls"]] == ["b", "a"]
    assert run_again(folder, f"{agents}:Together")[0] == 0
    source = agents.replace(".py", "2.py")
    with open(source, "w") as other:
        other.write(AGENT.replace('data["delays"][text]', '0.05 - data["delays"][text]'))
    assert run_again(folder, f"{source}:Together")[0] == 0


def test_code_runs_only_if_it_is_named(record, agents, scripted_engine):
    folder = record(f"{agents}:Agent", scripted_engine(CALLS, "done"), DATA)
    done = invoke("agent", "replay", f"{folder}#3")
    assert done.exit_code == 2
    assert "its code runs only if you name it: areal-debug agent replay" in " ".join(done.output.split())
