"""The search agent of the examples: its index, its tool, its replay, and that it learns."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from areal_core.agent.agents import load_agent
from areal_core.rollout.episodes import assemble
from benchmarks import search_agent as benchmark
from recorder import RecordingOptions, RecordWriter, open_record
from recorder.header import write_header
from recorder.testing import SCRIPTED_HEADER, send_step
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


def test_a_changed_corpus_is_the_first_difference_of_a_replay(episode, scripted_engine, tokenizer, tmp_path):
    rows = episode(load_agent(AGENT), scripted_engine(search("Orvik river"), "Anwel"), DATA)
    record = tmp_path / "record"
    record.mkdir()
    writer = RecordWriter(record, options=RecordingOptions(text=True))
    tokenizer.save_pretrained(tmp_path / "model")
    config = {
        "experiment_name": "e",
        "trial_name": "t",
        "train_dataset": {"path": "arithmetic", "type": "rl"},
        "actor": {"path": str(tmp_path / "model")},
    }
    write_header(record, replace(SCRIPTED_HEADER, config=config))
    send_step(writer, 0, assemble([(4, [rows])]))
    writer("end", steps=1, error=None)
    changed = tmp_path / "corpus.jsonl"
    original = (ROOT / "examples/search/corpus.jsonl").read_text()
    changed.write_text(original.replace("river of Orvik is the Anwel", "river of Orvik is the Lumo"))
    again = invoke("agent", "replay", f"{record}#0/4/0", AGENT)
    assert (again.exit_code, again.output.split(":")[0]) == (0, "as recorded")
    done = invoke("agent", "replay", f"{record}#0/4/0", AGENT, "--arg", f"corpus={changed}", "-q")
    assert done.exit_code == 1
    assert done.output == (
        "different: in step 0, prompt 4, sample 0, call 1: "
        'the tool search({"query": "Orvik river"}) returns something else\n'
    )


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
