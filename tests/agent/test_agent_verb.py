"""`areal-debug agent run` and `agent stress` on the command line."""

import json
from pathlib import Path

import pytest

from tests.command_line import invoke

AGENTS = Path(__file__).parent / "agents_under_test.py"


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
        done = invoke("agent", verb, f"{AGENTS}:{name}", "--data", rows, *arguments)
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


def test_run_samples_a_real_model_in_this_process(agent, tiny_model):
    code, out = agent("run", "Plain", "--model", tiny_model, "gconfig.max_new_tokens=4", "--json")
    (turn,) = json.loads(out)["turns"]
    assert code == 0
    assert len(turn["tokens"]) <= 4
    assert all(token["logprob"] < 0 for token in turn["tokens"])


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("Nothing", ("--say", "a"), "has no Nothing; its functions and classes are client_of, Plain, "),
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
