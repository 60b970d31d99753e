"""An agent on a real SGLang server on the CPU.

The client gets, and the trainer trains on, the tokens that the server sampled.
"""

import json
from pathlib import Path

import pytest

from areal_core.servers.server import call
from tests.command_line import reported

pytestmark = [pytest.mark.long, pytest.mark.sglang]


@pytest.fixture(scope="module")
def server(tiny_model, sglang):
    with sglang(tiny_model) as started:
        yield started.server


def test_an_agents_tokens_are_those_that_the_server_samples_for_the_same_prompt(server, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    agent = f"{Path(__file__).parent}/agents_under_test.py:Plain"
    options = ["gconfig.max_new_tokens=12", "gconfig.greedy=true", "rollout.agent.chat_template_type=concat"]
    given = ["--data", rows, "--server", server.address, "--arg", "num_turns=2", *options]
    code, report = reported("agent", "run", agent, *given)
    assert code == 0, report
    first, second = report["turns"]
    assert second["continues"] == 0

    sampled = [token["id"] for token in first["tokens"]]
    body = {
        "text": "<|user|>1+1<|end|><|assistant|>",
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, "stop_token_ids": [0, 1]},
        "return_logprob": True,
    }
    entries = json.loads(call(server, "POST", "/generate", body))["meta_info"]["output_token_logprobs"]
    assert sampled == [entry[1] for entry in entries]
    assert [token["logprob"] for token in first["tokens"]] == pytest.approx(
        [entry[0] for entry in entries], abs=1e-5
    )
