"""The calls of agents where a record is read: show, query, exports, view, diff and why."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
from click.testing import CliRunner

from areal_debug.cli import main
from areal_debug.view.pack import pack_json
from areal_debug.view.page import Contents, FollowedRecord
from recorder import DamagedRecord, open_record
from recorder.conversations import calls_before, conversations
from recorder.tables.formats import export_record
from recorder.transcripts import Constructed, RecordedCall, Transcript, check_calls, is_failure, tool_uses

sys.path.insert(0, str(Path(__file__).parent))
from agent_record import FAILURE, PICTURES, RESULTS, write_agent_record


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Records that differ in one tool result, and in one picture."""
    root = tmp_path_factory.mktemp("agents")
    return {
        "ok": write_agent_record(root / "ok"),
        "failed": write_agent_record(root / "failed", results=("32 pixels", FAILURE)),
        "picture": write_agent_record(root / "picture", picture=PICTURES[1]),
    }


def invoke(*words, code=0):
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


def rows_of(record, sql):
    return [tuple(row.values()) for row in json.loads(invoke("query", record, sql, "--json"))]


def call(turn, after, messages=(), answer=None):
    answer = answer or {"role": "assistant", "content": "a"}
    return RecordedCall(turn, after, tuple(messages), None, {}, answer, "stop", None)


@pytest.mark.parametrize(
    "text",
    [
        "Error: no such file",
        "error executing tool search",
        "ValueError: 3",
        "openai.APITimeoutError(408)",
        "Traceback (most recent call last):\n  File",
        "An unexpected error occurred while running the tool",
        "Failed to connect",
        "Tool 'search' not found",
        "Exit code: 2\nls: no",
        '{"error": "no index"}',
        '{"success": false}',
        '{"returncode": 1, "stdout": ""}',
        "[ERROR] no index",
        "<error>: x",
    ],
)
def test_a_result_that_begins_as_a_failure_counts_as_one(text):
    assert is_failure(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "Error rates fell in 2020",
        "Errors and omissions",
        "The page says: Error: 404",
        "exit code: 0",
        '{"error": null, "rows": 3}',
        '{"exit_code": 0}',
        '{"exit_code"',
        "Failure is an option",
        "a tool that failed",
    ],
)
def test_other_results_do_not(text):
    assert not is_failure(text)


def test_a_tool_call_has_the_first_result_that_a_later_call_has():
    asks = {"role": "assistant", "content": "", "tool_calls": [{"name": n, "arguments": "{}"} for n in "ab"]}
    result = {"role": "tool", "content": "1"}
    calls = [call(0, None, answer=asks), call(1, 0, [result]), call(2, 0, [{**result, "content": "2"}])]
    found = [(use.name, use.result, use.failed) for use in tool_uses(calls)]
    assert found == [("a", "1", False), ("b", None, None)]


def test_the_calls_of_a_row_are_those_of_its_branch():
    transcript = Transcript(5, 0, Constructed("a", None), None, (call(0, None), call(1, 0), call(2, 0)), None)
    assert [one.turn for one in calls_before(transcript, 2)] == [0, 2]
    assert calls_before(transcript, 7) == ()


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        ([call(0, None), call(0, None)], "twice"),
        ([call(0, 0)], "before the call that it follows"),
        ([call(0, None, [{"content": "x"}])], "no message of a role"),
        ([call(0, None, [{"role": "user", "content": 3}])], "no message of a role"),
        (
            [call(0, None, answer={"role": "assistant", "tool_calls": [{"name": "x"}]})],
            "no message of a role",
        ),
    ],
)
def test_calls_that_no_reader_can_follow_are_damage(calls, what):
    transcript = Transcript(5, 0, Constructed("a", None), None, tuple(calls), None)
    with pytest.raises(DamagedRecord, match=what):
        check_calls("calls.jsonl", transcript)


def test_rows_have_the_calls_of_their_conversation(records):
    rows = conversations(open_record(records["failed"]).step(0), 0)
    assert [[one.turn for one in row.calls] for row in rows] == [[0], [0, 1], [0], [0, 1]]
    assert [use.failed for use in rows[1].tool_uses] == [False, True]
    kinds = [part.kind for one in rows[1].calls for part in rows[1].parts(one)]
    assert kinds == ["message", "tool_call", "tool_call", "result", "result", "answer"]
    assert rows[1].messages[0]["content"][0] == {"type": "text", "text": "Which shape?"}


def test_show_prints_calls_results_and_failures(records):
    text = invoke("record", "show", records["failed"], "--sample", 1)
    assert 'tool call     search({"n": 1})' in text
    assert f"search failed  {FAILURE}" in text
    assert "measure returned  32 pixels" in text
    assert "call 1, after call 0, finished by stop, reward 1" in text
    facts = json.loads(invoke("record", "show", records["failed"], "--sample", 1, "--json"))
    assert [use["failed"] for use in facts[0]["conversation"]["tool_calls"]] == [False, True]


def test_a_query_finds_the_episodes_whose_tool_failed(records):
    sql = "select prompt_id, row, num_calls, tools_used from samples where num_failed_tool_calls > 0"
    assert rows_of(records["failed"], sql) == [(5, 1, 2, ["measure", "search"])]
    sql = "select tool, count(*), sum(failed::int) from tool_calls group by tool order by tool"
    assert rows_of(records["failed"], sql) == [("measure", 2, 0), ("search", 2, 1)]
    sql = "select prompt_id, turn, after, num_tool_calls, reward from calls where prompt_id = 5 order by turn"
    assert rows_of(records["failed"], sql) == [(5, 0, None, 2, None), (5, 1, 0, 0, 1.0)]


def test_exports_have_messages_and_tools(records, tmp_path):
    export_record(records["ok"], "parquet", tmp_path / "x.parquet")
    row = pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pylist()[1]
    assert [message["role"] for message in row["messages"]] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert row["messages"][0]["content"] == "Which shape?[image]"
    asked = row["messages"][1]["tool_calls"][1]
    assert asked == {"type": "function", "function": {"name": "search", "arguments": '{"n": 1}'}}
    assert [message["content"] for message in row["messages"][2:4]] == list(RESULTS)
    assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == ["measure", "search"]
    assert row["images"][0]["bytes"] == PICTURES[0]
    export_record(records["ok"], "jsonl", tmp_path / "x.jsonl")
    line = json.loads((tmp_path / "x.jsonl").read_text().splitlines()[1])
    assert line["messages"] == row["messages"]
    lost = export_record(records["ok"], "pt", tmp_path / "x.pt").lost
    assert "messages and tool calls of agents" in lost


def test_a_page_has_the_calls_and_counts_of_failures(records):
    contents = Contents(FollowedRecord(str(records["failed"]), None))
    assert "a-0-calls" in contents.names(0)
    rows = contents.record.view(0).rows
    assert (rows["calls"].tolist(), rows["failed"].tolist()) == ([1, 2, 1, 2], [0, 1, 0, 0])
    document = contents.record.calls(0)
    assert contents.blob("a-0-calls") == pack_json(document)
    assert [row["calls"] for row in document["rows"]] == [[0], [0, 1], [2], [2, 3]]
    assert [part["text"] for part in document["calls"][1]["parts"] if part["failed"]] == [FAILURE]


def test_why_names_the_tool_whose_result_differs(records):
    answer = json.loads(invoke("why", records["ok"], records["failed"], "--json", code=1))
    assert (answer["tensor"], answer["prompt"], answer["row"]) == ("tool result", 5, 1)
    assert answer["values"] == [
        "search({\"n\": 1}) returned 'a square'",
        f"search({{\"n\": 1}}) returned '{FAILURE}'",
    ]
    assert "search" in answer["sentence"]
    assert answer["cause"]["kind"] == "environment"


def test_why_names_the_picture_that_differs(records):
    answer = json.loads(invoke("why", records["ok"], records["picture"], "--json", code=1))
    assert (answer["tensor"], answer["prompt"], answer["cause"]["kind"]) == ("images", 5, "data")
    assert "image 0 (PNG, 32 x 32, 157 bytes" in answer["sentence"]
    assert "192 of 1,024 pixels differ" in answer["sentence"]


def test_a_result_that_follows_from_another_answer_is_not_named(records):
    from replayer.compare.inputs import differing_result

    left, right = (conversations(open_record(records[name]).step(0), 0)[1] for name in ("ok", "failed"))
    assert differing_result(left, right) is not None
    other = replace(right.calls[0], answer=right.calls[0].answer | {"content": "hm"})
    assert differing_result(left, replace(right, calls=(other, right.calls[1]))) is None
