"""The transcripts of episodes in a record: written, read back, verified, archived."""

from pathlib import Path

import numpy as np
import pytest

from areal_core.agent.agents import load_agent
from areal_core.rollout.episodes import assemble
from recorder import RecordingOptions, RecordWriter, open_record, verify
from recorder.header import write_header
from recorder.integrity.contents import calls_problems
from recorder.testing import SCRIPTED_HEADER, send_step

EXAMPLES = Path(__file__).parents[2] / "examples"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "7 * 6"}}</tool_call>'
DATA = {"messages": [{"role": "user", "content": "7 boxes of 6?"}], "answer": "#### 42"}


@pytest.fixture
def batch(episode, scripted_engine):
    """A prompt whose first episode calls a tool, in two rows, and whose second does not."""
    agent = load_agent(f"{EXAMPLES}/tool_agent.py:CalculatorAgent")
    first = episode(agent, scripted_engine(CALL, "It is 42."), DATA)
    second = episode(agent, scripted_engine("41"), DATA)
    return assemble([(5, [first, second])])


def write(folder, batch, **options):
    folder.mkdir(parents=True)
    writer = RecordWriter(folder, options=RecordingOptions(**options))
    write_header(folder, SCRIPTED_HEADER)
    send_step(writer, 0, batch)
    writer("end", steps=1, error=None)
    return folder


def test_a_record_has_tool_calls_and_tool_results(batch, tmp_path):
    record = write(tmp_path / "record", batch, text=True)
    first, second = open_record(record).step(0).calls(0)
    assert (first.prompt_id, first.episode, second.prompt_id, second.episode) == (5, 0, 5, 1)
    assert first.agent.name.endswith(":CalculatorAgent")
    assert first.data == DATA
    assert first.failure is None
    call, answered = first.calls
    assert (call.turn, call.after, call.messages) == (0, None, (DATA["messages"][0],))
    assert [tool["function"]["name"] for tool in call.tools] == ["calculate"]
    assert call.answer["tool_calls"] == [{"name": "calculate", "arguments": '{"expression": "7 * 6"}'}]
    assert (answered.turn, answered.after, answered.tools) == (1, 0, None)
    assert answered.messages == ({"role": "tool", "content": "42"},)
    assert (answered.answer["content"], answered.finish, answered.reward) == ("It is 42.", "stop", 1.0)
    assert [call.reward for call in second.calls] == [0.0]
    assert verify(record).intact


def test_an_episode_without_rows_contradicts_the_batch(batch, tmp_path):
    step = open_record(write(tmp_path / "record", batch, text=True)).step(0)
    arrays = step.batch(0)
    assert not list(calls_problems(step, 0, arrays))
    found = list(calls_problems(step, 0, arrays | {"episode": np.zeros(len(arrays["episode"]))}))
    assert [what for _, what in found] == ["has episode 1 of prompt 5, which has no row"]
