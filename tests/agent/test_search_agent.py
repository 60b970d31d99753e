"""The search agent of the examples: its index, its tool, and that it learns."""

import json
from pathlib import Path

import pytest

from areal_core.agent.agents import load_agent
from benchmarks import search_agent as benchmark
from recorder import open_record
from tests.command_line import invoke

pytest.importorskip("bm25s", reason="the extra `search` is not installed")
ROOT = Path(__file__).parents[2]
AGENT = f"{ROOT}/examples/search_agent.py:SearchAgent"
DATA = {"messages": [{"role": "user", "content": "What is the river of Orvik?"}], "answer": "Anwel"}


def search(query: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {json.dumps({"query": query})}}}</tool_call>'


def test_the_agent_searches_and_is_rewarded_for_the_answer(episode, scripted_engine, tokenizer):
    engine = scripted_engine(search("Orvik river"), "anwel.")
    rows = episode(load_agent(AGENT), engine, DATA, export_style="concat", chat_template_type="concat")
    assert rows["rewards"].tolist() == [1.0]
    assert "The river of Orvik is the Anwel." in tokenizer.decode(rows["input_ids"][0])
    assert episode(load_agent(AGENT), scripted_engine("Lumo"), DATA)["rewards"].tolist() == [0.0]


@pytest.mark.long
def test_the_agent_learns_to_search_and_its_record_replays(tmp_path):
    model = benchmark.teach(tmp_path, seed=1)
    curve = benchmark.learn(tmp_path, model, seed=1, record=True)
    assert curve[-1][1] >= curve[0][1] + 0.2
    record = open_record(tmp_path / "record")
    calls = [call for one in record.step(record.steps[-1]).calls(0) for call in one.calls]
    assert any(message["role"] == "tool" for call in calls for message in call.messages)
    done = invoke("agent", "replay", f"{tmp_path}/record#{record.steps[-1]}", AGENT)
    assert done.exit_code == 0, done.output
