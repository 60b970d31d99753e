"""Statistics and trace scopes of a user's own workflow or agent, and memory of chosen steps."""

import json
from contextlib import closing

import pytest
import torch

from areal_core.agent.agent_workflow import AgentWorkflow
from areal_core.config import AgentConfig, GenerationHyperparameters
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.telemetry.stats import Stats
from areal_core.telemetry.trace import Trace, rank_file
from areal_core.testing import ScriptedEngine, make_tiny_tokenizer
from areal_core.trainer.live import log_scalars
from areal_core.trainer.trace_hooks import MemoryProfiler, TracedWorkflow

# An agent in a file: mode "subproc" imports it in another process.
AGENT = """
import asyncio
from areal_core.telemetry.in_episode import scalar, trace_scope, traced
from openai import AsyncOpenAI

@traced
async def read(number):
    await asyncio.sleep(0.02)
    return parse(number) + 1

@traced
def parse(number):
    return number

class Agent:
    async def run(self, data, **extra):
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])

        async def tool(number):
            with trace_scope("search", query=number):
                scalar(num_pages=number)

        assert await read(data["n"]) == data["n"] + 1
        await asyncio.gather(tool(data["n"]), tool(data["n"] + 2))
        if data["n"] == 5:
            scalar(rare=1)
        return 1.0
"""


@pytest.fixture
def agent(tmp_path):
    file = tmp_path / "agent_with_statistics.py"
    file.write_text(AGENT)
    return f"{file}:Agent"


@pytest.fixture
def executor():
    control = StalenessControl(batch_size=2, max_concurrent=4)
    made = Executor(ScriptedEngine(), control)
    yield made
    made.close()


def workflow_of(agent, mode="inline"):
    gconfig = GenerationHyperparameters(max_new_tokens=8, max_tokens=128)
    return closing(AgentWorkflow(agent, gconfig, make_tiny_tokenizer(), AgentConfig(mode=mode)))


@pytest.mark.parametrize("mode", ["inline", pytest.param("subproc", marks=pytest.mark.long)])
def test_numbers_of_an_agent_are_reported_with_its_batch(mode, agent, executor):
    with workflow_of(agent, mode) as workflow:
        executor.rollout_batch([(0, {"n": 1}), (1, {"n": 5})], workflow)
    assert {name: sorted(values) for name, values in executor.scalars.items()} == {
        "num_pages": [1, 3, 5, 7],
        "rare": [1],
    }
    stats = Stats()
    log_scalars(stats, executor.scalars, "workflow")
    assert stats.export() == {
        "workflow/num_pages": 4.0,
        "workflow/num_pages__count": 4.0,
        "workflow/rare": 1.0,
        "workflow/rare__count": 1.0,
    }


def test_scopes_are_drawn_in_the_episode(agent, executor, tmp_path):
    with workflow_of(agent) as workflow, closing(Trace(tmp_path / "trace", 0, 1, {})) as trace:
        executor.rollout_batch([(7, {"n": 1})], TracedWorkflow(workflow, trace))
    events = [json.loads(line) for line in rank_file(tmp_path / "trace", 0).read_text().splitlines()]
    drawn = [event for event in events if event["name"] == "search"]
    assert [event["args"] for event in drawn] == [
        {"query": 1, "episode": "episode 7.0"},
        {"query": 3, "episode": "episode 7.0"},
    ]
    [read], [parse] = ([event for event in events if event["name"] == name] for name in ("read", "parse"))
    assert read["args"] == parse["args"] == {"episode": "episode 7.0"}
    assert read["dur"] >= 20_000 > parse["dur"]  # microseconds: to the end of the coroutine
    [episode] = [event for event in events if event["name"] == "episode 7.0"]
    for event in [*drawn, read, parse]:
        assert episode["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= episode["ts"] + episode["dur"]


def test_the_memory_of_chosen_steps_is_written(tmp_path):
    profiler = MemoryProfiler(tmp_path, 3, torch.device("cpu"), frozenset({1}), 1000)
    kept = []
    for step in range(3):
        with profiler.during(step):
            kept.append(torch.ones(1 << 20))
    [file] = tmp_path.rglob("*.json")
    assert file.relative_to(tmp_path).parts == ("step_1", "rank-00003.json")
    events = json.loads(file.read_text())["traceEvents"]
    assert max(event["args"].get("Bytes", 0) for event in events if event["name"] == "[memory]") == 4 << 20
