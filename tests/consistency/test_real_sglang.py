"""A real SGLang server in float32 agrees with Transformers; every unrequested option is named."""

import json

import numpy as np
import pytest

from areal_core.servers.server import call
from areal_core.servers.sglang import SGLANG
from consistency.case import NOISE, Setting
from consistency.diagnose import diagnose, with_derived
from consistency.score import load_scorer, score
from consistency.tokens import Completion, sequences_from_completions
from consistency.transforms import replay

from .records import judged as judged_live

pytestmark = [pytest.mark.sglang, pytest.mark.long]  # `rollout/test_sglang_real.py` starts one every day
EOS, BOS = 1, 2
SETTING = Setting(vocabulary_size=105, eos_token_id=EOS, bos_token_id=BOS, noise=NOISE["float32"])


@pytest.fixture(scope="module")
def server(model, sglang):
    with sglang(model) as running:
        yield running.server


def sampled(server, **sampling):
    """Sample 60 tokens for each of 40 prompts with BOS."""
    rng = np.random.default_rng(0)
    prompts = [[BOS, *rng.integers(5, 100, 9).tolist()] for _ in range(40)]
    payload = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True} | sampling,
        "return_logprob": True,
    }
    replies = [
        SGLANG.parse_generate(json.dumps(reply).encode())
        for reply in json.loads(call(server, "POST", "/generate", payload, 300.0))
    ]
    return sequences_from_completions(
        [
            Completion(prompt, reply.tokens, reply.logprobs)
            for prompt, reply in zip(prompts, replies, strict=True)
        ]
    )


def judged(model, sequences):
    scorer = load_scorer(str(model))
    replays = with_derived(replay(scorer, sequences, 1.0, EOS), sequences)
    return diagnose(sequences, score(scorer, sequences), SETTING, replays, ())


@pytest.mark.parametrize(
    ("sampling", "cause", "evidence"),
    [
        ({"temperature": 0.8}, "R01", "of temperature 0.8"),
        ({"top_p": 0.8}, "R04", "likelier under top_p 0.8"),
        ({"top_k": 10}, "R04", "likelier under top_k 10"),
        ({"min_p": 0.1}, "R04", "likelier under min_p 0.1"),
        ({"repetition_penalty": 1.3}, "R05", "repetition_penalty of output tokens 1.3"),
        ({"frequency_penalty": 0.5}, "R05", "frequency_penalty 0.5"),
        ({"presence_penalty": 0.5}, "R05", "presence_penalty 0.5"),
    ],
)
def test_unrequested_option_is_named_with_its_value(server, model, sampling, cause, evidence):
    first = judged(model, sampled(server, **sampling)).causes[0]
    assert (first.id, evidence in first.evidence) == (cause, True), first


def test_live_server_is_queried(server, model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"input_ids": [BOS, 10 + row, 20, 30 + row]} for row in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--prompts", prompts, "--num-samples", 2, "--max-new-tokens", 32)
    code, found = judged_live("--engine", server.address, "--model", model, *options)
    assert (code, found["verdict"], found["num_sequences"]) == (0, "healthy", 32)
    assert found["engines"] == [f"SGLang 0.5.23 with {model} (float32)"]
    assert found["metrics"]["mean_abs"] < 1e-5
    assert found["rescoring"]["decode"] < 1e-5
    assert found["rescoring"]["prefill"] < 1e-5
