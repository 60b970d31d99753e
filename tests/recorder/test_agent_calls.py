"""The calls of agents where a record is read: show, query, exports, view, diff and why."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest

from areal_debug.view.data import calls_document
from areal_debug.view.pack import pack_json
from areal_debug.view.page import Contents, FollowedRecord
from recorder import DamagedRecord, open_record
from recorder.conversations import calls_before, conversations
from recorder.tables.formats import export_record
from recorder.transcripts import Constructed, RecordedCall, Transcript, check_calls, is_failure

sys.path.insert(0, str(Path(__file__).parent))
from agent_record import FAILURE, PICTURES, RESULTS, write_agent_record

from tests.command_line import printed


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Records that differ in one tool result, and in one picture."""
    root = tmp_path_factory.mktemp("agents")
    return {
        "ok": write_agent_record(root / "ok"),
        "failed": write_agent_record(root / "failed", results=("32 pixels", FAILURE)),
        "picture": write_agent_record(root / "picture", picture=PICTURES[1]),
    }


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
    document = calls_document(contents.record.step(0))
    assert contents.blob("a-0-calls") == pack_json(document)
    assert [row["calls"] for row in document["rows"]] == [[0], [0, 1], [2], [2, 3]]
    assert [part["text"] for part in document["calls"][1]["parts"] if part["failed"]] == [FAILURE]


def test_why_names_the_tool_whose_result_differs(records):
    answer = json.loads(printed("why", records["ok"], records["failed"], "--json", code=1))
    assert (answer["tensor"], answer["prompt"], answer["row"]) == ("tool result", 5, 1)
    assert answer["values"] == [
        "search({\"n\": 1}) returned 'a square'",
        f"search({{\"n\": 1}}) returned '{FAILURE}'",
    ]
    assert "search" in answer["sentence"]
    assert answer["cause"]["kind"] == "environment"


def test_a_result_that_follows_from_another_answer_is_not_named(records):
    from replayer.compare.inputs import differing_result

    left, right = (conversations(open_record(records[name]).step(0), 0)[1] for name in ("ok", "failed"))
    assert differing_result(left, right) is not None
    other = replace(right.calls[0], answer=right.calls[0].answer | {"content": "hm"})
    assert differing_result(left, replace(right, calls=(other, right.calls[1]))) is None
