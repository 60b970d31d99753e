"""`areal-debug agent run` and `agent stress` on the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_debug.verbs.agent import command

AGENTS = Path(__file__).parent / "agents_under_test.py"
TINY_CONFIG = Path(__file__).parents[1] / "debug" / "tiny.yaml"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Sixteen rows; the answer of row n is n."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": str(n)}) + "\n" for n in range(16)))
    return file


@pytest.fixture
def agent(rows):
    """Call `agent("run", "Plain", ...)`; returns exit code and output."""

    def call(verb: str, name: str, *arguments: object) -> tuple[int, str]:
        given = [verb, f"{AGENTS}:{name}", "--data", str(rows), *map(str, arguments)]
        done = CliRunner().invoke(command, given, catch_exceptions=False)
        return done.exit_code, done.output

    return call


def test_run_shows_every_turn_with_tokens_and_reward(agent):
    code, out = agent("run", "Plain", "--index", 3, "--say", "ab", "--say", "c", "--arg", "num_turns=2")
    assert code == 0
    assert '"answer": "3"' in out
    assert "turn 0  prompt 5 tokens  sampled 3, stop" in out
    assert "turn 1  prompt 15 tokens, starting with the tokens of turn 0  sampled 2, stop" in out
    assert "logprob mean -1.000, lowest -1.00  version 0" in out
    assert "ab<|end|>" in out
    assert "of turn 0: reward 1, 3 of 8 tokens in the loss mask" in out
    assert "of turn 1: reward 1, 2 of 17 tokens in the loss mask" in out
    assert "finished: after 2 turns" in out


def test_run_has_the_same_json(agent):
    code, out = agent("run", "Plain", "--say", "ab", "--json")
    report = json.loads(out)
    (turn,) = report["turns"]
    assert code == 0
    assert [(t["text"], t["logprob"], t["version"]) for t in turn["tokens"]] == [
        ("a", -1, 0),
        ("b", -1, 0),
        ("<|end|>", -1, 0),
    ]
    assert (turn["num_prompt_tokens"], turn["finish"], turn["reward"], turn["continues"]) == (
        5,
        "stop",
        2.0,
        None,
    )
    row = {"turns": [0], "num_shared": 0, "num_tokens": 8, "num_trained": 3, "reward": 2.0}
    assert report["rows"] == [row]
    assert (turn["branch"], turn["parent"]) == ("root", None)
    assert (report["failure"], report["error"]) == (None, None)


BRANCHING = ("--say", "ab", "--say", "<think>x</think>c", "--say", "d", "--say", "e", "--say", "f")


def test_run_shows_the_tree_of_an_episode_that_the_model_failed(agent):
    overrides = ("rollout.agent.export_style=concat", "rollout.agent.failed_reward=-1")
    code, out = agent("run", "Branching", *BRANCHING, *overrides)
    assert code == 0
    tree = out[out.index("episode tree") :].splitlines()
    assert tree[1:9] == [
        "└── turn 0, 1  first call",
        "    ├── turn 2  after turn 0: another continuation",
        "    └── turn 3  after turn 1: the template leaves out reasoning that was sampled",
        "        └── turn 4  after turn 3: earlier messages were left out or summarised",
        "row                 of turn 0, 1: reward -1, 21 of 36 tokens in the loss mask",
        "row                 of turn 0, 2: reward -1, 2 of 23 tokens in the loss mask; turn 0 is in that of an earlier row",
        "row                 of turn 0, 3: reward -1, 2 of 32 tokens in the loss mask; turn 0 is in that of an earlier row",
        "row                 of turn 4: reward -1, 2 of 23 tokens in the loss mask",
    ]
    assert tree[9] == "failed by the model declared: areal_core.EpisodeFailed: no answer after five calls"


def test_run_notes_tools_that_the_template_does_not_show_and_turns_that_were_cut(agent):
    code, out = agent("run", "WithTool", "--say", "a long answer", "gconfig.max_new_tokens=4")
    assert code == 0
    assert "tools were offered, and the chat template does not show them to the model" in out
    assert "1 of 1 turns were truncated at the length limit: raise gconfig.max_new_tokens" in out


def test_run_samples_a_real_model_in_this_process(agent, tiny_model):
    code, out = agent("run", "Plain", "--model", tiny_model, "gconfig.max_new_tokens=4", "--json")
    (turn,) = json.loads(out)["turns"]
    assert code == 0
    assert len(turn["tokens"]) <= 4
    assert all(token["logprob"] < 0 for token in turn["tokens"])


def test_run_shows_the_turns_before_a_failure_and_where_it_came_from(agent):
    code, out = agent("run", "Failing", "--say", "a", "--index", 3)
    assert code == 1
    assert "turn 0  prompt 5 tokens" in out
    assert "failed: after 1 turn: LookupError: no entry 3 in the table" in out
    assert f"{AGENTS}:" in out


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("Nothing", ("--say", "a"), "has no Nothing; its functions and classes are "),
        ("NotAsync", ("--say", "a"), "NotAsync.run is not async: an agent has `async def run(self, data"),
        ("Plain", (), "no engine: give --model FOLDER (in this process), --server HOST:PORT, or --say"),
        ("Plain", ("--say", "a", "--server", "x:1"), "--server and --say are both given"),
        ("Plain", ("--server", "127.0.0.1:9"), "nothing answers at 127.0.0.1:9: [Errno 111] Connection refused; start"),
        ("Plain", ("--model", "/no/model"), "cannot load the tokenizer at '/no/model'"),
        ("Plain", ("--say", "a", "--index", "16"), "has 16 rows; expected 0 to 15"),
        ("Plain", ("--say", "a", "--arg", "num_turns"), "--arg is 'num_turns'; expected NAME=VALUE"),
        ("Plain", ("--say", "a", "--arg", "turns=1"), "Plain cannot be constructed from {'turns': 1}"),
        ("Plain", ("--say", "a", "rollout.agent.mod=x"), "did you mean 'rollout.agent.mode'?"),
        ("Plain", ("--say", "a", "rollout.agent.host=0.0.0.0", "rollout.agent.admin_api_key=short"), "set one of at least 16"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_one_sentence_and_code_2(agent, name, arguments, sentence):
    code, out = agent("run", name, *arguments)
    assert code == 2
    assert sentence in out
    assert "Traceback" not in out


@pytest.mark.long
def test_stress_of_a_plain_agent_reports_load_latency_and_lag(agent):
    code, out = agent(
        "stress", "Plain", "--say", "ab", "--latency", 0.3, "--batch-size", 16, "--group-size", 8, "--json"
    )
    report = json.loads(out)
    assert (code, report["healthy"], report["errors"]) == (0, True, [])
    assert (report["most_at_once"], report["num_finished"], report["mean_reward"]) == (128, 128, 2.0)
    assert report["episodes"]["count"] == 128
    assert 0 < report["calls"]["p50_s"] < report["calls"]["p99_s"] <= report["calls"]["max_s"] < 0.9 + 2
    assert [loop["name"] for loop in report["loops"]] == ["agents", "rollout"]
    assert all(loop["lag_p50_s"] < 0.1 for loop in report["loops"])
    assert report["num_output_tokens"] == 3 * 128


def test_stress_names_an_agent_that_blocks_with_its_stack(agent):
    code, out = agent("stress", "Blocking", "--say", "a", "--batch-size", 2, "--group-size", 4)
    assert code == 1
    assert out.startswith(f"not ready: blocks its event loop at {AGENTS}:")
    assert "in Blocking.look_it_up" in out.splitlines()[0]
    assert "agents loop was blocked" in out
    stack = out[out.index("agents loop was blocked") :]
    assert stack.index("in Blocking.run") < stack.index(
        "in Blocking.look_it_up", stack.index("in Blocking.run")
    )


def test_stress_groups_errors_by_message(agent):
    code, out = agent("stress", "Failing", "--say", "a", "--batch-size", 16, "--group-size", 2, "--json")
    (group,) = json.loads(out)["errors"]
    assert code == 1
    assert group["count"] == 12  # rows 0, 3, ... 15
    assert group["message"].startswith("LookupError: no entry ")
    assert "raise LookupError" in group["traceback"]


def test_run_shows_every_call_of_a_workflow_and_its_rows(agent):
    code, out = agent("run", "Turns", "--index", 3, "--say", "ab", "--say", "c")
    assert code == 0
    assert "turn 0  prompt 5 tokens  sampled 3, stop" in out
    assert "turn 1  prompt 8 tokens, starting with the tokens of turn 0  sampled 2, stop" in out
    assert "  prompt    " in out
    assert "of turn 0, 1: reward 2, 2 of 10 tokens in the loss mask" in out
    assert "finished: after 2 turns" in out


def test_run_notes_rows_that_were_not_sampled_and_refuses_what_training_would(agent):
    code, out = agent("run", "TokenisedAgain", "--say", "ab")
    assert code == 0
    assert "row 0 begins with the exact tokens of no call: was text tokenised again" in out
    code, out = agent("run", "WrongDtype", "--say", "ab")
    assert code == 1
    assert "MalformedEpisode: the workflow returned rewards as torch.int64 [1]; expected torch.float32" in out
    code, out = agent("run", "Turns", "--say", "ab", "--arg", "turns=1")
    assert code == 2
    assert "workflow Turns cannot be constructed from gconfig, tokenizer, turns: got an unexpected" in out


@pytest.mark.long
def test_stress_of_a_workflow_reports_load_and_what_blocks(agent):
    load = ("--say", "ab", "--batch-size", 8, "--group-size", 4, "--json")
    code, out = agent("stress", "Turns", *load)
    report = json.loads(out)
    assert (code, report["num_finished"], report["mean_reward"], report["calls"]["count"]) == (0, 32, 3.0, 64)
    assert [loop["name"] for loop in report["loops"]] == ["rollout"]
    code, out = agent("stress", "BlockingWorkflow", *load)
    assert code == 1
    assert "in BlockingWorkflow.arun_episode" in json.dumps(json.loads(out)["loops"])
    code, out = agent("stress", "leaves_out", *load)
    assert (code, json.loads(out)["num_finished"]) == (0, 0)


@pytest.mark.long
def test_stress_with_2048_episodes_at_once_does_not_block_the_event_loop(agent):
    code, out = agent("stress", "Plain", "--say", "It is 12.", "--latency", 8, "--json")
    report = json.loads(out)
    assert (code, report["most_at_once"], report["num_finished"]) == (0, 2048, 2048)
    lags = {loop["name"]: loop["lag_p99_s"] for loop in report["loops"]}
    assert max(lags.values()) < 0.5, lags  # 0.1 s measured with a third of a core
