"""The tasks of benchmarks/agent_tasks: a policy solves them through the server alone."""

import asyncio
import http.server
import json
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.agent_tasks.__main__ import folder_of, run
from benchmarks.agent_tasks.tasks import TASKS, Reply

BY_NAME = {task.name: task for task in TASKS}
FOLDER = folder_of(BY_NAME["flipped-bit"])
QUICK = ("collective_mismatch-1", "dataloader_stall-2", "all-wrong", "clip-range", "same-run", "flipped-bit")


def score(names, root: Path, **options):
    given = Namespace(endpoint="", model="", without=False, **options)
    return asyncio.run(run([BY_NAME[name] for name in names], root, given))


def test_there_are_tasks_of_each_kind_and_their_checkers_refuse_other_answers():
    assert len(BY_NAME) == len(TASKS) >= 20
    assert {task.kind for task in TASKS} == {"hang", "learning", "difference", "data", "logprobs", "replay"}
    for task in TASKS:
        assert task.problems_of(Reply("no verdict"))
        assert all(id in task.question("runs/x") for id in task.accept)
    task = BY_NAME["clip-range"]
    assert task.problems_of(Reply("config", step=2, names="loss: eps_clip")) == ["step 2, want 1"]
    assert task.problems_of(Reply("config", step=1, names="loss: lr")) == ["'eps_clip' is not named"]


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(BY_NAME), marks=pytest.mark.long, id="all")])
def test_the_policy_solves_every_task_by_what_results_say(names, tmp_path):
    scores = score(names, tmp_path)
    assert {one.name: one.problems for one in scores} == {name: [] for name in names}
    assert max(one.calls for one in scores) <= 6


class Model(http.server.BaseHTTPRequestHandler):
    """An endpoint whose model calls the first tool with the task's folder, then answers."""

    requests: list = []

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(asked)
        tool = asked["tools"][0]["function"]["name"]
        call = {"name": tool, "arguments": json.dumps({"path": FOLDER})}
        if asked["messages"][-1]["role"] == "tool":
            answer = {"finding": "damaged", "ranks": [], "step": None, "names": "steps/000001"}
            call = {"name": "answer", "arguments": json.dumps(answer)}
        calls = [{"id": "1", "type": "function", "function": call}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        body = json.dumps({"choices": [{"message": message}], "usage": {"total_tokens": 7}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing."""


@pytest.mark.parametrize("without", [False, True])
def test_a_model_answers_with_the_server_and_without_it(without, tmp_path):
    Model.requests = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model) as endpoint:
        threading.Thread(target=endpoint.serve_forever, daemon=True).start()
        given = Namespace(endpoint=f"http://127.0.0.1:{endpoint.server_port}/v1", model="m", without=without)
        (found,) = asyncio.run(run([BY_NAME["flipped-bit"]], tmp_path, given))
        endpoint.shutdown()
    assert (found.problems, found.calls, found.tokens) == ([], 1, 14)
    told = Model.requests[-1]["messages"][-1]["content"]
    assert told.startswith("record ") if without else json.loads(told)["verdict"]
    names = {tool["function"]["name"] for tool in Model.requests[0]["tools"]}
    assert names >= ({"read_file", "answer"} if without else {"list_runs", "answer"})
